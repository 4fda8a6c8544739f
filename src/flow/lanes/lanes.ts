import { LRUCache } from 'lru-cache'
import { type Claim, linesUp, type Standing } from '../claim.ts'
import {
  arriving,
  begin,
  busyIn,
  earlyIn,
  end,
  isIdle,
  keptSlots,
  type Lane,
  newLane,
  paceOf,
  stuckIn,
  takeStaleFrom,
  trustIn,
  wasQuick,
} from './lane.ts'
import { createLaneRoom } from './lane-room.ts'
import { createRefusals } from './refusals.ts'
import { createSlotTurns } from './slot-turns.ts'
import { createStuckSlots } from './stuck-slots.ts'

/** Of how many endpoints without a lane it is remembered that they were quick. */
const MAX_REMEMBERED = 10_000

/** How long a place is kept for a released delivery; after that, another worker has probably claimed it. */
const ARRIVAL_MS = 500

type Endpoint = Pick<Claim, 'tenantId' | 'endpointId'>

export type Lanes = ReturnType<typeof createLanes>

/**
 * One lane per endpoint for the attempts in this process, such that no endpoint takes the worker from the others:
 * - An endpoint has at most `cap` requests under way.
 * - One that keeps finishing gets as many slots as its pace asks for, and one that is well and was quick in the last half minute gets
 *   one. Any other gets at most a quarter of the slots that are not stuck in other lanes. A slot is stuck if its lane does not turn it
 *   over within a window. So each endpoint that hangs takes less than the one before it, and there is always room for one more.
 * - The endpoints of one tenant that do not turn their slots over together get at most half of what other tenants leave; three
 *   quarters if they come at once and the worker goes on finishing attempts. All of its endpoints get at most seven eighths
 *   of the slots, those that are not well three quarters; the last slots are for tenants that have hardly any
 *   (flow/lanes/stuck-slots.ts). Where a tenant has all that it may have, its endpoints take turns (flow/lanes/slot-turns.ts).
 * - Should those of hundreds of tenants hang at once, there is no such room. Then endpoints that are not well may take but a part
 *   of the slots (flow/lanes/stuck-slots.ts), and the rest is for those that are. What is released for them never takes more, but for
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
}) {
  const lanes = new Map<string, Lane>()
  const quickAt = new LRUCache<string, number>({ max: MAX_REMEMBERED })
  const stuck = createStuckSlots(slots)
  const turns = createSlotTurns(slots)
  const refusals = createRefusals(stuck, turns)
  const room = createLaneRoom({ cap, slots, stuck, turns })
  function laneOf({ tenantId, endpointId }: Endpoint): Lane {
    let lane = lanes.get(endpointId)
    if (lane === undefined) {
      lane = newLane(tenantId, clock(), quickAt.get(endpointId))
      lanes.set(endpointId, lane)
      quickAt.delete(endpointId)
    }
    return lane
  }

  /** Starts the claim of a lane that has waited the longest; there is one. */
  function startFirst(lane: Lane, now: number): Claim {
    const { claim } = lane.waiting.shift() as Lane['waiting'][number]
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
    /**
     * `start` it now, let it wait here for a slot of its `endpoint`, or for one of its `tenant`, which has all that it may have,
     * or `full`: it has to be held, as what does not start has to unless it `mayWait`.
     */
    admit(claim: Claim, { mayWait = true } = {}): 'start' | 'endpoint' | 'tenant' | 'full' {
      const lane = laneOf(claim)
      const now = clock()
      stuck.count(now)
      const hasPlace = keptSlots(lane, now) > 0
      // Else as it was released.
      if (!hasPlace) lane.standing = claim.standing
      if (lane.arriving.count > 0) lane.arriving.count--
      if (hasPlace) lane.arriving.slots--
      const isQuick = lane.started.size + lane.waiting.length < trustIn(lane, now)
      const isNew = !hasPlace && !isQuick
      if (isNew && room.spareOf(lane, now) <= 0) return refusals.refuse(claim, lane, now)
      // A place may have been kept in another process, or for too short a time.
      const isReleased = hasPlace || claim.isProbed
      if (isNew && isReleased && stuck.hasTooMany(lane.standing)) return 'full'
      // Otherwise held deliveries, which are older, would find no place while new ones come. What lines up was held.
      if (isNew && lane.held && !linesUp(claim) && !room.isRoomy(lane, now)) return 'full'
      const limit = Math.min(cap, claim.atOnce ?? (hasPlace ? cap : room.limitOf(lane, now)))
      if (lane.started.size < limit && (hasPlace || stuck.mayTake(lane) > 0)) {
        begin(lane, claim, { isReleased, now })
        turns.leave(lane)
      } else {
        const hasNone = lane.started.size === 0
        if (!mayWait || lane.waiting.length >= room.mostWaiting(lane, claim, now)) return 'full'
        if (hasNone && !room.mayLineUp(lane)) return refusals.refuse(claim, lane, now)
        lane.waiting.push({ claim, since: now })
        if (hasNone) turns.join(lane)
      }
      stuck.noteBusy(lane)
      refusals.accept(claim)
      if (isNew && !lane.turn) stuck.add(lane, 1, { isReleased, now })
      if (claim.underWay && !hasPlace) stuck.take(lane, 1)
      return claim.underWay ? 'start' : turns.areTaken && stuck.mayTake(lane) <= 0 ? 'tenant' : 'endpoint'
    },

    /**
     * The request of an attempt ended at `endedAt`. Returns the waiting claim that takes its place, if any, which may be for another
     * endpoint of the tenant. Calling it again for the same attempt does nothing.
     */
    next(claim: Claim, endedAt = clock()): Claim | undefined {
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
      const next = startFirst(turns.first(lane.tenantId, now, room.roomFor) ?? lane, now)
      if (lane.waiting.length > 0 && lane.started.size === 0) turns.join(lane)
      return next
    },

    /** How many first attempts are worth claiming at once (flow/lanes/refusals.ts): more would find no room. */
    worthClaiming: (): number => refusals.worthClaiming(clock()),

    /** The waiting claims that start now in slots that other tenants have left: those for which they wait may be left much later. */
    takeFree(): Claim[] {
      const now = clock()
      stuck.count(now)
      const claims: Claim[] = []
      const first = () => turns.nextOfAny(now, room.roomFor)
      for (let lane = first(); lane; lane = first()) claims.push(startFirst(lane, now))
      return claims
    },

    /** Removes and returns the waiting claims that would have to wait longer than expected. */
    takeStale(): Claim[] {
      const now = clock()
      const stale: Claim[] = []
      for (const [endpointId, lane] of lanes) {
        stale.push(...takeStaleFrom(lane, now))
        if (lane.waiting.length + arriving(lane, now) === 0) turns.leave(lane)
        if (!isIdle(lane, now)) continue
        lanes.delete(endpointId)
        if (wasQuick(lane, now)) quickAt.set(endpointId, lane.quickAt)
      }
      return stale
    },

    /** Removes and returns all waiting claims. */
    takeWaiting: (): Claim[] => [...lanes.values()].flatMap((lane) => lane.waiting.splice(0).map(({ claim }) => claim)),

    /**
     * Tells which endpoints have held deliveries that may go out, but for probes; unless these are `all` of them, the others stay as they
     * were noted.
     */
    noteHeld(endpointIds: Set<string>, { all }: { all: boolean }): void {
      for (const [endpointId, lane] of lanes) lane.held = endpointIds.has(endpointId) || (!all && lane.held)
    },

    /**
     * Keeps places for up to `wanted` deliveries of the endpoint that are about to be released, and returns how many: none unless
     * half of its room is free, or it is paced. For half a second, what has a place starts on arrival, whatever has come in between,
     * except:
     * - If the endpoint has nothing in hand, and its tenant has all slots that it may have, a single one is released. It waits for the
     *   next slot that the tenant's others leave.
     * - Of a quick endpoint more may be released than there are slots. These wait here like its others or, unless it `hasManyRetries`,
     *   in the queue.
     * - What does not `comeAtOnce` stands behind others in the queue, which are not to be held for its sake. No slot is kept for it,
     *   unless the endpoint is failing or slow, and it is admitted like any other.
     */
    reserve(
      endpoint: Endpoint & { standing: Standing; hasManyRetries: boolean; maxPerSecond: number | null },
      { wanted, comeAtOnce }: { wanted: number; comeAtOnce: boolean },
    ): number {
      const lane = laneOf(endpoint)
      const now = clock()
      Object.assign(lane, { standing: endpoint.standing, hasManyRetries: endpoint.hasManyRetries })
      stuck.count(now)
      if (endpoint.maxPerSecond === null && !room.isRoomy(lane, now)) return 0
      const { most, mostKept, as } = room.releasable(lane, { comeAtOnce, now })
      const count = Math.min(wanted, most)
      if (count <= 0) return 0
      const kept = Math.min(count, mostKept)
      lane.arriving = {
        count: arriving(lane, now) + count,
        slots: keptSlots(lane, now) + kept,
        until: now + ARRIVAL_MS,
      }
      stuck.noteBusy(lane)
      if (as === 'line') turns.join(lane)
      else if (as === 'slots') stuck.add(lane, count, { isReleased: true, now })
      else if (as === 'queue') stuck.expect(lane.tenantId, count)
      stuck.take(lane, kept)
      return count
    },

    /** Gives up `count` of the places that `reserve` kept. */
    giveBack(endpoint: Endpoint, count: number): void {
      const lane = laneOf(endpoint)
      lane.arriving.count = Math.max(0, lane.arriving.count - count)
    },

    /** Whether it is time to release more: at least half of the endpoint's room here is free. */
    isRoomy(endpoint: Endpoint): boolean {
      const now = clock()
      stuck.count(now)
      return room.isRoomy(laneOf(endpoint), now)
    },

    /** How many attempts the endpoint finishes in half a second, as far as is known. */
    pace: (endpoint: Endpoint): number => paceOf(laneOf(endpoint), clock()),

    /** How many of a paced endpoint's deliveries are here, or arriving, before their moment. */
    early: (endpoint: Endpoint): number => earlyIn(laneOf(endpoint), clock()),

    /** How many of the endpoint's deliveries are started, waiting or arriving. */
    busy(endpointId: string): number {
      const lane = lanes.get(endpointId)
      return lane === undefined ? 0 : busyIn(lane, clock())
    },
  }
}
