import { Line } from '../line.ts'
import { type Claim, linesUp, type Standing, type UnderWay } from './claim.ts'
import { createStuckSlots } from './stuck-slots.ts'

/** How long a place is kept for a released delivery; after that, another worker has probably claimed it. */
const ARRIVAL_MS = 500
/** Claims wait here only if they are likely to start within this time; others are held. */
const PATIENCE_MS = 300
/** An endpoint's pace is how many attempts it finished in a window of this length, not counting any that took longer. */
const WINDOW_MS = 500
/** A claim that has waited this many times `PATIENCE_MS` is held, whatever was expected. */
const STALE = 4
/** An attempt that has been under way for longer than this is hanging. */
const HANGING_MS = 1000

type Endpoint = Pick<Claim, 'tenantId' | 'endpointId'>

type Lane = {
  tenantId: string
  /** The attempts under way, oldest first. */
  started: Line<UnderWay>
  waiting: { claim: Claim; since: number }[]
  arriving: { count: number; until: number }
  standing: Standing
  /** Whether deliveries of the endpoint are held. */
  held: boolean
  window: { since: number; finished: number }
  /** Attempts finished in the last whole window. */
  lastWindow: number
}

export type Lanes = {
  /** `start` it now, let it `wait` here for its turn, or `full`: it has to be held. */
  admit(claim: Claim): 'start' | 'wait' | 'full'
  /**
   * The request of an attempt ended at `endedAt`. Returns the waiting claim that takes its place, if any. Calling it again for
   * the same attempt does nothing.
   */
  next(claim: Claim, endedAt?: number): Claim | undefined
  /** Removes and returns the waiting claims that would have to wait longer than expected. */
  takeStale(): Claim[]
  /** Removes and returns all waiting claims. */
  takeWaiting(): Claim[]
  /** Tells which endpoints have held deliveries; unless these are `all` of them, the others stay as they were noted before. */
  noteHeld(endpointIds: Set<string>, how: { all: boolean }): void
  /**
   * Keeps places for up to `wanted` deliveries of the endpoint that are about to be released, and returns how many: none unless
   * half of its room is free. For half a second those deliveries start on arrival, whatever has come in between.
   */
  reserve(endpoint: Endpoint & { standing: Standing }, wanted: number): number
  /** Gives up `count` of the places that `reserve` kept. */
  giveBack(endpoint: Endpoint, count: number): void
  /** Whether it is time to release more: at least half of the endpoint's room here is free. */
  isRoomy(endpoint: Endpoint): boolean
  /** How many attempts the endpoint finishes in half a second, as far as is known. */
  pace(endpoint: Endpoint): number
  /** How many of the endpoint's deliveries are started, waiting or arriving. */
  busy(endpointId: string): number
}

/**
 * One lane per endpoint for the attempts in this process, such that no endpoint takes the worker from the others:
 * - An endpoint has at most `cap` requests under way.
 * - One that keeps finishing gets as many slots as its pace asks for. Any other gets at most a quarter of the slots that are
 *   not stuck in other lanes. A slot is stuck if its lane does not turn it over within a window. So each endpoint that hangs takes
 *   less than the one before it, and there is always room for one more.
 * - The endpoints of one tenant that do not turn their slots over together get at most half of what other tenants leave, and all
 *   of its endpoints at most seven eighths of the slots, or three quarters where the next is for one that is not well; the last
 *   slots are for tenants that have hardly any (flow/stuck-slots.ts).
 * - Should those of hundreds of tenants hang at once, there is no such room. Then endpoints that are not well may take but a part
 *   of the slots (flow/stuck-slots.ts), and the rest is for those that are. What is released for them never takes more.
 * - A claim waits here only if its endpoint is fast enough to start it soon. Otherwise it is held, so that a slow endpoint
 *   fills neither slots nor memory.
 * - While a slow endpoint has held deliveries, new ones get at most half of its places; the others are for released ones.
 */
export function createLanes({
  cap,
  slots,
  clock = () => performance.now(),
}: {
  cap: number
  slots: number
  clock?: () => number
}): Lanes {
  const lanes = new Map<string, Lane>()
  const stuck = createStuckSlots(slots)
  let countedAt = 0

  function laneOf({ tenantId, endpointId }: Endpoint): Lane {
    let lane = lanes.get(endpointId)
    if (lane === undefined) {
      lane = {
        tenantId,
        started: new Line(),
        waiting: [],
        arriving: { count: 0, until: 0 },
        standing: 'unsure',
        held: false,
        window: { since: clock(), finished: 0 },
        lastWindow: 0,
      }
      lanes.set(endpointId, lane)
    }
    return lane
  }

  const arriving = (lane: Lane, now: number) => (lane.arriving.until > now ? lane.arriving.count : 0)

  /** How many slots it has, or has places for. */
  const taken = (lane: Lane, now: number) => lane.started.size + arriving(lane, now)

  const busyIn = (lane: Lane, now: number) => taken(lane, now) + lane.waiting.length

  /** How many attempts the endpoint finishes in a window, as far as is known. */
  function paceOf(lane: Lane, now: number): number {
    const age = now - lane.window.since
    if (age >= WINDOW_MS) {
      lane.lastWindow = age < 2 * WINDOW_MS ? lane.window.finished : 0
      lane.window = { since: now, finished: 0 }
    }
    return Math.max(lane.lastWindow, lane.window.finished)
  }

  /** How many of those it has beyond its pace. An idle lane's window is left to age, so that `takeStale` can drop the lane. */
  function stuckIn(lane: Lane, now: number): number {
    const count = busyIn(lane, now)
    return count === 0 ? 0 : Math.max(0, count - paceOf(lane, now))
  }

  /** Counts anew, at most once a millisecond; in between, what comes is added. */
  function countStuck(now: number): void {
    if (now - countedAt < 1) return
    countedAt = now
    stuck.clear()
    let hanging = 0
    for (const lane of lanes.values()) {
      let released = arriving(lane, now)
      for (const { since, isReleased } of lane.started) {
        if (isReleased) released++
        if (now - since > HANGING_MS) hanging++
      }
      const all = stuckIn(lane, now)
      stuck.add(lane, Math.min(all, released), { isReleased: true, now })
      stuck.add(lane, Math.max(0, all - released), { isReleased: false, now })
      stuck.take(lane, taken(lane, now))
    }
    stuck.noteHanging(hanging, now)
  }

  /** The standing as which an endpoint contends for slots: usually all are equal. */
  function contendsAs(lane: Lane, now: number): Standing {
    countStuck(now)
    return stuck.isStrained(now) ? lane.standing : 'good'
  }

  /** A quarter of the slots that are not stuck in other lanes. */
  const share = (lane: Lane, now: number) =>
    Math.max(1, Math.floor((stuck.free(contendsAs(lane, now)) + stuckIn(lane, now)) / 4))

  /** How many may be under way at once. */
  const limitOf = (lane: Lane, now: number) => Math.min(cap, Math.max(paceOf(lane, now), share(lane, now)))

  /** How many deliveries this process can start at once, or finish in half a second. */
  const roomOf = (lane: Lane, now: number) => Math.max(limitOf(lane, now), paceOf(lane, now))

  const isRoomy = (lane: Lane, now: number) => busyIn(lane, now) <= roomOf(lane, now) / 2

  /** Whether nothing has been under way for long, so that nobody knows yet how fast the endpoint is. */
  function isFresh(lane: Lane, now: number): boolean {
    const [oldest] = lane.started
    return oldest === undefined || now - oldest.since <= PATIENCE_MS
  }

  const inPatience = (lane: Lane, now: number) => Math.ceil((paceOf(lane, now) * PATIENCE_MS) / WINDOW_MS)

  return {
    admit(claim) {
      const lane = laneOf(claim)
      const now = clock()
      countStuck(now)
      const hasPlace = arriving(lane, now) > 0
      // Else as it was released.
      if (!hasPlace) lane.standing = claim.standing
      if (lane.arriving.count > 0) lane.arriving.count--
      const isQuick = lane.started.size + lane.waiting.length < paceOf(lane, now)
      const isNew = !hasPlace && !isQuick
      if (isNew && stuck.spareOf(lane.tenantId, contendsAs(lane, now)) <= 0) return 'full'
      // A place may have been kept in another process, or for too short a time.
      const isReleased = hasPlace || claim.isProbed
      // Otherwise held deliveries, which are older, would find no place while new ones come. What lines up was held.
      if (isNew && lane.held && !linesUp(claim) && !isRoomy(lane, now)) return 'full'
      const limit = Math.min(cap, claim.atOnce ?? (hasPlace ? cap : limitOf(lane, now)))
      if (lane.started.size < limit && (hasPlace || stuck.mayTake(lane) > 0)) {
        // A paced attempt is not under way before its time slot.
        claim.underWay = lane.started.join({ since: Math.max(now, claim.startAt ?? 0), isReleased })
      } else {
        const most = Math.max(inPatience(lane, now), isFresh(lane, now) ? share(lane, now) : 0)
        // Without one under way, none would make room for it.
        if (claim.atOnce === 1 || lane.started.size === 0 || lane.waiting.length >= most) return 'full'
        lane.waiting.push({ claim, since: now })
      }
      if (isNew) stuck.add(lane, 1, { isReleased, now })
      if (claim.underWay && !hasPlace) stuck.take(lane, 1)
      return claim.underWay ? 'start' : 'wait'
    },
    next(claim, endedAt = clock()) {
      if (claim.underWay === null) return undefined
      const lane = laneOf(claim)
      const now = clock()
      lane.started.leave(claim.underWay)
      paceOf(lane, now)
      // One that took longer than a window, perhaps to its deadline, says nothing about how many more the endpoint could take.
      if (endedAt - claim.underWay.value.since <= WINDOW_MS) lane.window.finished++
      claim.underWay = null
      const entry = lane.waiting.shift()
      if (entry !== undefined)
        entry.claim.underWay = lane.started.join({ since: now, isReleased: entry.claim.isProbed })
      return entry?.claim
    },
    takeStale() {
      const now = clock()
      const stale: Claim[] = []
      for (const [endpointId, lane] of lanes) {
        const keep = isFresh(lane, now) ? lane.waiting.length : 2 * inPatience(lane, now)
        // The newest are removed, so that those that stay are in order.
        if (lane.waiting.length > keep) stale.push(...lane.waiting.splice(keep).map(({ claim }) => claim))
        while (lane.waiting[0] !== undefined && lane.waiting[0].since < now - STALE * PATIENCE_MS) {
          stale.push((lane.waiting.shift() as Lane['waiting'][number]).claim)
        }
        if (busyIn(lane, now) === 0 && now - lane.window.since > 2 * WINDOW_MS) lanes.delete(endpointId)
      }
      return stale
    },
    takeWaiting() {
      return [...lanes.values()].flatMap((lane) => lane.waiting.splice(0).map(({ claim }) => claim))
    },
    noteHeld(endpointIds, { all }) {
      for (const [endpointId, lane] of lanes) lane.held = endpointIds.has(endpointId) || (!all && lane.held)
    },
    reserve(endpoint, wanted) {
      const lane = laneOf(endpoint)
      const now = clock()
      lane.standing = endpoint.standing
      if (!isRoomy(lane, now)) return 0
      const before = busyIn(lane, now)
      const isQuick = before < paceOf(lane, now)
      const count = Math.min(
        wanted,
        roomOf(lane, now) - before,
        stuck.mayTake(lane),
        isQuick ? Infinity : stuck.spareOf(lane.tenantId, lane.standing),
      )
      if (count <= 0) return 0
      lane.arriving = { count: arriving(lane, now) + count, until: now + ARRIVAL_MS }
      if (!isQuick) stuck.add(lane, count, { isReleased: true, now })
      stuck.take(lane, count)
      return count
    },
    giveBack(endpoint, count) {
      const lane = laneOf(endpoint)
      lane.arriving.count = Math.max(0, lane.arriving.count - count)
    },
    isRoomy: (endpoint) => isRoomy(laneOf(endpoint), clock()),
    pace: (endpoint) => paceOf(laneOf(endpoint), clock()),
    busy(endpointId) {
      const lane = lanes.get(endpointId)
      return lane === undefined ? 0 : busyIn(lane, clock())
    },
  }
}
