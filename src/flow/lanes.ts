import { Line } from '../line.ts'
import type { Claim } from './claim.ts'

/** How long a released delivery counts as on its way here: another worker may have claimed it. */
const ARRIVAL_MS = 500
/** What waits here must be done in about this time; what would take longer is held. */
const PATIENCE_MS = 300
/** An endpoint's pace is what it finished in windows of this length, of attempts that took no longer than one. */
const WINDOW_MS = 500
/** Beyond this many times the patience a wait is over, whatever was foreseen. */
const STALE = 4

type Lane = {
  tenantId: string
  /** When each attempt under way was started, oldest first. */
  started: Line<number>
  waiting: { claim: Claim; since: number }[]
  arriving: { count: number; until: number }
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
   * An attempt's request is over, since `endedAt`: answers the claim that takes its place, if one waits. Said again, it means
   * nothing.
   */
  next(claim: Claim, endedAt?: number): Claim | undefined
  /** Claims that would have to wait longer than was foreseen; they are no longer waiting afterwards. */
  takeStale(): Claim[]
  /** All claims that wait; none is waiting afterwards. */
  takeWaiting(): Claim[]
  /** These are the endpoints of which deliveries are held. */
  noteHeld(endpointIds: Set<string>): void
  /**
   * Keeps places for up to `wanted` deliveries of the endpoint that are about to be released, half of what it can have in hand
   * here at least, and answers how many; for half a second they start on arrival, whatever has come in between.
   */
  reserve(tenantId: string, endpointId: string, wanted: number): number
  /** `count` of the places that were kept are not needed. */
  giveBack(endpointId: string, count: number): void
  /** Whether it is time to release more: half of what the endpoint can have in hand here, or more, is free. */
  isRoomy(endpointId: string): boolean
  /** What the endpoint finishes in half a second, as far as is known. */
  pace(endpointId: string): number
  /** How many more slots endpoints of the tenant may take that are not known to be quick. */
  spare(tenantId: string): number
  /** How many of the endpoint's deliveries are started, waiting or arriving. */
  busy(endpointId: string): number
  /** How many of them this process can make use of: what it starts at once, or finishes in half a second. */
  room(endpointId: string): number
}

/**
 * The attempts under way in this process, by endpoint, such that no endpoint takes the worker from the others:
 * - at most `cap` requests at once;
 * - and at most a quarter of the slots in which no other is stuck. A slot is stuck when its lane does not turn it over within
 *   a window; so each endpoint that hangs takes less than the one before, and leaves room for others. One that keeps
 *   finishing has what its pace asks for: it is never slowed;
 * - the endpoints of one tenant that do not turn theirs over, together at most half of what others leave;
 * - others wait here only as long as the endpoint is fast enough to come to them soon; what does not fit is held, so a
 *   slow endpoint fills neither the slots nor the memory;
 * - while deliveries of a slow endpoint are held, what is new takes at most half of its places, and what was released, oldest
 *   first, those that were kept for it.
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
  let stuck = { at: 0, count: 0, byTenant: new Map<string, number>() }

  function laneOf(endpointId: string, tenantId = ''): Lane {
    let lane = lanes.get(endpointId)
    if (lane === undefined) {
      lane = {
        tenantId,
        started: new Line(),
        waiting: [],
        arriving: { count: 0, until: 0 },
        held: false,
        window: { since: clock(), finished: 0 },
        lastWindow: 0,
      }
      lanes.set(endpointId, lane)
    }
    lane.tenantId ||= tenantId
    return lane
  }

  const arriving = (lane: Lane, now: number) => (lane.arriving.until > now ? lane.arriving.count : 0)

  const inHand = (lane: Lane, now: number) => lane.started.size + lane.waiting.length + arriving(lane, now)

  /** Attempts that the endpoint finishes in a window, as far as is known. */
  function paceOf(lane: Lane, now: number): number {
    const age = now - lane.window.since
    if (age >= WINDOW_MS) {
      lane.lastWindow = age < 2 * WINDOW_MS ? lane.window.finished : 0
      lane.window = { since: now, finished: 0 }
    }
    return Math.max(lane.lastWindow, lane.window.finished)
  }

  /** What the endpoint has in hand beyond what it finishes in a window. One that has nothing is not looked at, so that it is forgotten. */
  function stuckIn(lane: Lane, now: number): number {
    const count = inHand(lane, now)
    return count === 0 ? 0 : Math.max(0, count - paceOf(lane, now))
  }

  /** Counted anew every millisecond, and kept up in between. */
  function countStuck(now: number): void {
    if (now - stuck.at < 1) return
    stuck = { at: now, count: 0, byTenant: new Map() }
    for (const lane of lanes.values()) addStuck(lane, stuckIn(lane, now))
  }

  function addStuck({ tenantId }: Lane, count: number): void {
    if (count === 0) return
    stuck.count += count
    stuck.byTenant.set(tenantId, (stuck.byTenant.get(tenantId) ?? 0) + count)
  }

  /** A quarter of the slots in which no other lane is stuck. */
  function share(lane: Lane, now: number): number {
    countStuck(now)
    return Math.max(1, Math.floor((slots - stuck.count + stuckIn(lane, now)) / 4))
  }

  /** How many more slots may be stuck for a tenant: in all half of those in which no other tenant is. */
  function spareOf(tenantId: string, now: number): number {
    countStuck(now)
    const own = stuck.byTenant.get(tenantId) ?? 0
    return Math.max(1, Math.floor((slots - stuck.count + own) / 2)) - own
  }

  /** What may be under way at once. */
  const limitOf = (lane: Lane, now: number) => Math.min(cap, Math.max(paceOf(lane, now), share(lane, now)))

  /** What this process can make use of: what it starts at once, or finishes in half a second. */
  const roomOf = (lane: Lane, now: number) => Math.max(limitOf(lane, now), paceOf(lane, now))

  const isRoomy = (lane: Lane, now: number) => inHand(lane, now) <= roomOf(lane, now) / 2

  /** Nothing has been under way for long: there is no telling yet how fast the endpoint is. */
  function isFresh(lane: Lane, now: number): boolean {
    const [oldest] = lane.started
    return oldest === undefined || now - oldest <= PATIENCE_MS
  }

  const inPatience = (lane: Lane, now: number) => Math.ceil((paceOf(lane, now) * PATIENCE_MS) / WINDOW_MS)

  return {
    admit(claim) {
      const lane = laneOf(claim.endpointId, claim.tenantId)
      const now = clock()
      const hasPlace = arriving(lane, now) > 0
      if (lane.arriving.count > 0) lane.arriving.count--
      const isQuick = lane.started.size + lane.waiting.length < paceOf(lane, now)
      const isNew = !hasPlace && !isQuick
      if (isNew && spareOf(claim.tenantId, now) <= 0) return 'full'
      // Or what is held, which is older, would find no place as long as others come. Probes and what is paced were held, if late.
      const wasHeld = claim.atOnce !== null || claim.startAt !== null
      if (isNew && lane.held && !wasHeld && !isRoomy(lane, now)) return 'full'
      const limit = Math.min(cap, claim.atOnce ?? (hasPlace ? cap : limitOf(lane, now)))
      if (lane.started.size < limit) {
        // A paced one is not under way before its slot.
        claim.underWay = lane.started.join(Math.max(now, claim.startAt ?? 0))
      } else {
        const most = Math.max(inPatience(lane, now), isFresh(lane, now) ? share(lane, now) : 0)
        if (claim.atOnce === 1 || lane.waiting.length >= most) return 'full'
        lane.waiting.push({ claim, since: now })
      }
      if (isNew) addStuck(lane, 1)
      return claim.underWay ? 'start' : 'wait'
    },
    next(claim, endedAt = clock()) {
      if (claim.underWay === null) return undefined
      const lane = laneOf(claim.endpointId)
      const now = clock()
      lane.started.leave(claim.underWay)
      paceOf(lane, now)
      // What a deadline has ended says nothing about how many more the endpoint could take.
      if (endedAt - claim.underWay.value <= WINDOW_MS) lane.window.finished++
      claim.underWay = null
      const entry = lane.waiting.shift()
      if (entry !== undefined) entry.claim.underWay = lane.started.join(now)
      return entry?.claim
    },
    takeStale() {
      const now = clock()
      const stale: Claim[] = []
      for (const [endpointId, lane] of lanes) {
        const keep = isFresh(lane, now) ? lane.waiting.length : 2 * inPatience(lane, now)
        // The newest go first, so that those which stay are in order.
        if (lane.waiting.length > keep) stale.push(...lane.waiting.splice(keep).map(({ claim }) => claim))
        while (lane.waiting[0] !== undefined && lane.waiting[0].since < now - STALE * PATIENCE_MS) {
          stale.push((lane.waiting.shift() as Lane['waiting'][number]).claim)
        }
        const idle = lane.started.size === 0 && lane.waiting.length === 0 && arriving(lane, now) === 0
        if (idle && now - lane.window.since > 2 * WINDOW_MS) lanes.delete(endpointId)
      }
      return stale
    },
    takeWaiting() {
      return [...lanes.values()].flatMap((lane) => lane.waiting.splice(0).map(({ claim }) => claim))
    },
    noteHeld(endpointIds) {
      for (const [endpointId, lane] of lanes) lane.held = endpointIds.has(endpointId)
    },
    reserve(tenantId, endpointId, wanted) {
      const lane = laneOf(endpointId, tenantId)
      const now = clock()
      if (!isRoomy(lane, now)) return 0
      const before = inHand(lane, now)
      const isQuick = before < paceOf(lane, now)
      const count = Math.min(wanted, roomOf(lane, now) - before, isQuick ? Infinity : spareOf(tenantId, now))
      if (count <= 0) return 0
      lane.arriving = { count: arriving(lane, now) + count, until: now + ARRIVAL_MS }
      if (!isQuick) addStuck(lane, count)
      return count
    },
    giveBack(endpointId, count) {
      const lane = laneOf(endpointId)
      lane.arriving.count = Math.max(0, lane.arriving.count - count)
    },
    isRoomy: (endpointId) => isRoomy(laneOf(endpointId), clock()),
    pace: (endpointId) => paceOf(laneOf(endpointId), clock()),
    spare: (tenantId) => spareOf(tenantId, clock()),
    busy(endpointId) {
      const lane = lanes.get(endpointId)
      return lane === undefined ? 0 : inHand(lane, clock())
    },
    room: (endpointId) => roomOf(laneOf(endpointId), clock()),
  }
}
