import type { Claim } from './claim.ts'

/** How long a released delivery counts as on its way here: another worker may have claimed it. */
const ARRIVAL_MS = 2000
/** What waits here must be done in about this time; what would take longer is held. */
const PATIENCE_MS = 300
/** An endpoint's pace is what it finished in windows of this length. */
const WINDOW_MS = 500

type Lane = {
  /** When each attempt under way was started, oldest first. */
  started: Map<string, number>
  waiting: { claim: Claim; since: number }[]
  arriving: { count: number; until: number }
  window: { since: number; finished: number }
  /** Attempts finished in the last whole window. */
  pace: number
}

export type Lanes = {
  /** `start` it now, let it `wait` here for its turn, or `full`: it has to be held. */
  admit(claim: Claim): 'start' | 'wait' | 'full'
  /** An attempt has ended: answers the claim that takes its place, if one waits. */
  next(claim: Claim): Claim | undefined
  /** Claims that have waited far longer than was foreseen; they are no longer waiting afterwards. */
  takeStale(now: number): Claim[]
  /** `count` deliveries of the endpoint were released and will arrive soon. */
  expect(endpointId: string, count: number): void
  /** How many of the endpoint's deliveries are started, waiting or arriving. */
  busy(endpointId: string): number
  /** How many of them this process can make use of: what it starts at once, or finishes in half a second. */
  room(endpointId: string): number
}

/**
 * The attempts under way in this process, by endpoint: at most `cap` each (fewer where the endpoint says so), so that a
 * slow one cannot take the whole worker; one that keeps finishing gets more with its pace, up to `trusted`. Others may
 * wait here as long as the endpoint is fast enough not to keep them waiting; so a fast one is never slowed, and a slow
 * one never fills the memory.
 */
export function createLanes({ cap, trusted }: { cap: number; trusted: number }): Lanes {
  const lanes = new Map<string, Lane>()

  function laneOf(endpointId: string): Lane {
    let lane = lanes.get(endpointId)
    if (lane === undefined) {
      lane = {
        started: new Map(),
        waiting: [],
        arriving: { count: 0, until: 0 },
        window: { since: Date.now(), finished: 0 },
        pace: 0,
      }
      lanes.set(endpointId, lane)
    }
    return lane
  }

  const arriving = (lane: Lane) => (lane.arriving.until > Date.now() ? lane.arriving.count : 0)

  function forgetIdle(endpointId: string, lane: Lane) {
    const idle = lane.started.size === 0 && lane.waiting.length === 0 && arriving(lane) === 0
    if (idle && Date.now() - lane.window.since > ARRIVAL_MS) lanes.delete(endpointId)
  }

  function roll(lane: Lane, now: number) {
    const age = now - lane.window.since
    if (age < WINDOW_MS) return
    lane.pace = age < 2 * WINDOW_MS ? lane.window.finished : 0
    lane.window = { since: now, finished: 0 }
  }

  function isPatient(lane: Lane, now: number): boolean {
    const [oldest] = lane.started.values()
    // Once nothing has come back for as long as one may wait, the endpoint is not fast now.
    return oldest === undefined || now - oldest <= PATIENCE_MS
  }

  return {
    admit(claim) {
      const lane = laneOf(claim.endpointId)
      const now = Date.now()
      roll(lane, now)
      if (lane.arriving.count > 0) lane.arriving.count--
      if (lane.started.size < (claim.atOnce ?? Math.max(cap, Math.min(trusted, lane.pace)))) {
        lane.started.set(claim.deliveryId, now)
        return 'start'
      }
      if (claim.atOnce === 1 || !isPatient(lane, now)) return 'full'
      lane.waiting.push({ claim, since: now })
      return 'wait'
    },
    next(claim) {
      const lane = laneOf(claim.endpointId)
      const now = Date.now()
      roll(lane, now)
      lane.window.finished++
      lane.started.delete(claim.deliveryId)
      const entry = lane.waiting.shift()
      if (entry !== undefined) lane.started.set(entry.claim.deliveryId, now)
      return entry?.claim
    },
    takeStale(now) {
      const stale: Claim[] = []
      for (const [endpointId, lane] of lanes) {
        while (lane.waiting[0] !== undefined && lane.waiting[0].since < now - 4 * PATIENCE_MS) {
          stale.push((lane.waiting.shift() as Lane['waiting'][number]).claim)
        }
        forgetIdle(endpointId, lane)
      }
      return stale
    },
    expect(endpointId, count) {
      const lane = laneOf(endpointId)
      lane.arriving = { count: arriving(lane) + count, until: Date.now() + ARRIVAL_MS }
    },
    busy(endpointId) {
      const lane = lanes.get(endpointId)
      return lane === undefined ? 0 : lane.started.size + lane.waiting.length + arriving(lane)
    },
    room(endpointId) {
      const lane = lanes.get(endpointId)
      if (lane === undefined) return cap
      roll(lane, Date.now())
      return Math.max(cap, lane.pace, lane.window.finished)
    },
  }
}
