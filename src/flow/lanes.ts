import { type Claim, linesUp, type Standing } from './claim.ts'
import {
  arriving,
  begin,
  busyIn,
  end,
  inTime,
  isFresh,
  isIdle,
  keptSlots,
  type Lane,
  newLane,
  paceOf,
  stuckIn,
  taken,
  takeStaleFrom,
} from './lane.ts'
import { inPatience } from './pace.ts'
import { createRefusals } from './refusals.ts'
import { createSlotTurns } from './slot-turns.ts'
import { createStuckSlots } from './stuck-slots.ts'

/** How long a place is kept for a released delivery; after that, another worker has probably claimed it. */
const ARRIVAL_MS = 500
/** For each slot, so many of one tenant's may be released in that time to stand in the queue: most of a backlog that is held at first. */
const COMING = 2

type Endpoint = Pick<Claim, 'tenantId' | 'endpointId'>

export type Lanes = {
  /**
   * `start` it now, let it `wait` here for a slot of its endpoint, or in `line` for one of its tenant's, which has all that it may have,
   * or `full`: it has to be held.
   */
  admit(claim: Claim): 'start' | 'wait' | 'line' | 'full'
  /**
   * The request of an attempt ended at `endedAt`. Returns the waiting claim that takes its place, if any, which may be for another
   * endpoint of the tenant. Calling it again for the same attempt does nothing.
   */
  next(claim: Claim, endedAt?: number): Claim | undefined
  /** How many first attempts are worth claiming at once (flow/refusals.ts): more would find no room. */
  worthClaiming(): number
  /** The waiting claims that start now in slots that other tenants have left: those for which they wait may be left much later. */
  takeFree(): Claim[]
  /** Removes and returns the waiting claims that would have to wait longer than expected. */
  takeStale(): Claim[]
  /** Removes and returns all waiting claims. */
  takeWaiting(): Claim[]
  /** Tells which endpoints have held deliveries; unless these are `all` of them, the others stay as they were noted before. */
  noteHeld(endpointIds: Set<string>, how: { all: boolean }): void
  /**
   * Keeps places for up to `wanted` deliveries of the endpoint that are about to be released, and returns how many: none unless
   * half of its room is free. For half a second those deliveries start on arrival, whatever has come in between. But the one of an
   * endpoint whose tenant has all slots that it may have waits for the next that is left; and of a quick endpoint there may be more
   * than slots, which wait here like others of it, or in the queue unless it `hasManyRetries`. Where they do not `comeAtOnce`, as they
   * stand behind others in the queue, those are not to be held for their sake: no slot is kept, unless the endpoint is failing or
   * slow, and they are admitted like any.
   */
  reserve(
    endpoint: Endpoint & { standing: Standing; hasManyRetries: boolean },
    how: { wanted: number; comeAtOnce: boolean },
  ): number
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
 * - The endpoints of one tenant that do not turn their slots over together get at most half of what other tenants leave; three
 *   quarters if they come at once and the worker goes on finishing attempts. All of its endpoints get at most seven eighths
 *   of the slots, those that are not well three quarters; the last slots are for tenants that have hardly any
 *   (flow/stuck-slots.ts). Where a tenant has all that it may have, its endpoints take turns (flow/slot-turns.ts).
 * - Should those of hundreds of tenants hang at once, there is no such room. Then endpoints that are not well may take but a part
 *   of the slots (flow/stuck-slots.ts), and the rest is for those that are. What is released for them never takes more, but for
 *   half as many more that come when nobody expects them any longer.
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
  const turns = createSlotTurns(slots)
  const refusals = createRefusals(stuck, turns)
  function laneOf({ tenantId, endpointId }: Endpoint): Lane {
    let lane = lanes.get(endpointId)
    if (lane === undefined) {
      lane = newLane(tenantId, clock())
      lanes.set(endpointId, lane)
    }
    return lane
  }

  /** The standing as which an endpoint contends for slots: usually all are equal. */
  function contendsAs(lane: Lane, now: number): Standing {
    stuck.count(now)
    return stuck.isStrained(now) ? lane.standing : 'good'
  }

  /** A quarter of the slots that are not stuck in other lanes. */
  const share = (lane: Lane, now: number) =>
    Math.max(1, Math.floor(Math.min(slots, stuck.free(contendsAs(lane, now)) + stuckIn(lane, now)) / 4))

  /** How many may be under way at once. */
  const limitOf = (lane: Lane, now: number) => Math.min(cap, Math.max(paceOf(lane, now), share(lane, now)))

  /** How many deliveries this process can start at once, or finish in half a second; any number, if none would wait for long. */
  const roomOf = (lane: Lane, now: number) => Math.max(limitOf(lane, now), paceOf(lane, now), inTime(lane, now, slots))

  const isRoomy = (lane: Lane, now: number) => busyIn(lane, now) <= roomOf(lane, now) / 2

  /**
   * Whether it may wait for a slot of its tenant's others: no more do than there are such slots, so that none waits for long; or twice
   * as many for which something is released, as those of which all is held would never have a turn.
   */
  const mayLineUp = (lane: Lane, isReleased = false) =>
    turns.mayJoin(lane, stuck.takenBy(lane.tenantId) * (isReleased ? 2 : 1))

  /** For which endpoints of its tenant there is a slot, if they stand like this one. */
  const roomFor = (now: number) => (lane: Lane) =>
    stuck.mayTake(lane) <= 0 ? 'none' : stuck.spareOf(lane.tenantId, contendsAs(lane, now)) > 0 ? 'any' : 'quick'

  /** Starts the claim of a lane that has waited the longest, if any. */
  function startFirst(lane: Lane, now: number): Claim | undefined {
    const claim = lane.waiting.shift()?.claim
    if (!claim) return undefined
    const how = { isReleased: claim.isProbed, now }
    begin(lane, claim, how)
    stuck.take(lane, 1)
    if (lane.turn) {
      turns.leave(lane)
      stuck.add(lane, stuckIn(lane, now), how)
    }
    return claim
  }

  return {
    admit(claim) {
      const lane = laneOf(claim)
      const now = clock()
      stuck.count(now)
      const hasPlace = keptSlots(lane, now) > 0
      // Else as it was released.
      if (!hasPlace) lane.standing = claim.standing
      if (lane.arriving.count > 0) lane.arriving.count--
      if (hasPlace) lane.arriving.slots--
      const isQuick = lane.started.size + lane.waiting.length < paceOf(lane, now)
      const isNew = !hasPlace && !isQuick
      if (isNew && stuck.spareOf(lane.tenantId, contendsAs(lane, now)) <= 0) return refusals.refuse(claim, lane, now)
      // A place may have been kept in another process, or for too short a time.
      const isReleased = hasPlace || claim.isProbed
      if (isNew && isReleased && stuck.hasTooMany(lane.standing)) return 'full'
      // Otherwise held deliveries, which are older, would find no place while new ones come. What lines up was held.
      if (isNew && lane.held && !linesUp(claim) && !isRoomy(lane, now)) return 'full'
      const limit = Math.min(cap, claim.atOnce ?? (hasPlace ? cap : limitOf(lane, now)))
      if (lane.started.size < limit && (hasPlace || stuck.mayTake(lane) > 0)) {
        begin(lane, claim, { isReleased, now })
        turns.leave(lane)
      } else {
        // Without one under way, the tenant's others make room for it.
        const hasNone = lane.started.size === 0
        const most = Math.max(inPatience(lane.pace, now), hasNone ? 1 : isFresh(lane, now) ? share(lane, now) : 0)
        if (lane.waiting.length >= most || (!hasNone && claim.atOnce === 1)) return 'full'
        if (hasNone && !mayLineUp(lane)) return refusals.refuse(claim, lane, now)
        lane.waiting.push({ claim, since: now })
        if (hasNone) turns.join(lane)
      }
      stuck.noteBusy(lane)
      refusals.accept(claim)
      if (isNew && !lane.turn) stuck.add(lane, 1, { isReleased, now })
      if (claim.underWay && !hasPlace) stuck.take(lane, 1)
      return claim.underWay ? 'start' : turns.areTaken && stuck.mayTake(lane) <= 0 ? 'line' : 'wait'
    },
    next(claim, endedAt = clock()) {
      if (claim.underWay === null) return undefined
      const lane = laneOf(claim)
      const now = clock()
      if (end(lane, claim.underWay, { endedAt, now })) {
        stuck.noteFinished(now)
        refusals.noteFinished(claim, now)
      }
      claim.underWay = null
      stuck.take(lane, -1)
      // Not before: while it counted as stuck, it could keep its own slot from the others.
      if (turns.has(lane.tenantId)) stuck.count(now)
      // Else it is free for every tenant's, and the queue tells whose is next.
      if (lane.waiting.length === 0) return undefined
      const next = startFirst(turns.first(lane.tenantId, now, roomFor(now)) ?? lane, now)
      if (lane.waiting.length > 0 && lane.started.size === 0) turns.join(lane)
      return next
    },
    worthClaiming: () => refusals.worthClaiming(clock()),
    takeFree() {
      const now = clock()
      stuck.count(now)
      const claims: Claim[] = []
      const first = () => turns.nextOfAny(now, roomFor(now))
      for (let lane = first(); lane; lane = first()) claims.push(startFirst(lane, now) as Claim)
      return claims
    },
    takeStale() {
      const now = clock()
      const stale: Claim[] = []
      for (const [endpointId, lane] of lanes) {
        stale.push(...takeStaleFrom(lane, now))
        if (lane.waiting.length + arriving(lane, now) === 0) turns.leave(lane)
        if (isIdle(lane, now)) lanes.delete(endpointId)
      }
      return stale
    },
    takeWaiting() {
      return [...lanes.values()].flatMap((lane) => lane.waiting.splice(0).map(({ claim }) => claim))
    },
    noteHeld(endpointIds, { all }) {
      for (const [endpointId, lane] of lanes) lane.held = endpointIds.has(endpointId) || (!all && lane.held)
    },
    reserve(endpoint, { wanted, comeAtOnce }) {
      const lane = laneOf(endpoint)
      const now = clock()
      Object.assign(lane, { standing: endpoint.standing, hasManyRetries: endpoint.hasManyRetries })
      if (!isRoomy(lane, now)) return 0
      const before = busyIn(lane, now)
      const isQuick = before < Math.max(paceOf(lane, now), inTime(lane, now, slots))
      const room = stuck.mayTake(lane)
      const haveSlots = room > 0 || before > 0 || !mayLineUp(lane, true)
      const most = Math.min(roomOf(lane, now) - before, haveSlots ? room : 1)
      // As long as anything is held, all that is published is held, too, and then released: that takes twice as long. An endpoint that
      // would be quick enough without must not fall behind for it, and a few at a time would never be all. Without all the slots that
      // it could use it is not as quick now.
      const isAtItsPace = room >= limitOf(lane, now) - lane.started.size
      const mostQuick = isAtItsPace ? Math.max(most, inTime(lane, now, slots) - before) : most
      // One that has some under way and is slow would otherwise find none on arrival, as new ones leave it half of its places only.
      const needsSlots = comeAtOnce || lane.standing === 'failing' || (!isQuick && lane.started.size > 0)
      const mostComing = needsSlots ? Infinity : COMING * slots - stuck.comingFor(lane.tenantId)
      const spare = Math.min(stuck.spareOf(lane.tenantId, lane.standing), mostComing)
      const count = Math.min(wanted, isQuick ? mostQuick : Math.min(most, spare))
      if (count <= 0) return 0
      const kept = needsSlots && haveSlots ? Math.max(0, Math.min(count, room, cap - taken(lane, now))) : 0
      lane.arriving = {
        count: arriving(lane, now) + count,
        slots: keptSlots(lane, now) + kept,
        until: now + ARRIVAL_MS,
      }
      stuck.noteBusy(lane)
      if (!haveSlots) turns.join(lane)
      else if (!isQuick && needsSlots) stuck.add(lane, count, { isReleased: true, now })
      else if (!isQuick) stuck.expect(lane.tenantId, count)
      stuck.take(lane, kept)
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
