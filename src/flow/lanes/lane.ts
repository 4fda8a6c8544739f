import { Line, type Place } from '../../line.ts'
import type { Claim, Standing, UnderWay } from '../claim.ts'
import { countOf, inPatience, isOver, newPace, noteFinished, PATIENCE_MS, type Pace, WINDOW_MS } from './pace.ts'

/** A claim that has waited this many times as long is held, whatever was expected. */
const STALE = 4

/** What a worker has in hand of one endpoint. */
export type Lane = {
  tenantId: string
  /** The attempts under way, oldest first. */
  started: Line<UnderWay>
  waiting: { claim: Claim; since: number }[]
  /** Released deliveries that are on their way here. `slots`: that many of them start on arrival. */
  arriving: { count: number; slots: number; until: number }
  /** Its place among its tenant's endpoints that have no slot, and get the next that one of the others leaves. */
  turn: Place<Lane> | null
  standing: Standing
  /** Whether many of its deliveries are retries, as was known when some were last released. */
  hasManyRetries: boolean
  /** Whether deliveries of the endpoint are held that may go out. */
  held: boolean
  /** Whether it is noted as having something in hand. */
  isBusy: boolean
  pace: Pace
  /** When an attempt last ended within a window, unless a later one has not. */
  quickAt: number
}

/**
 * For how long an endpoint that was quick is taken to be so still. Most get a delivery now and then, and those of one tenant would
 * otherwise share, as endpoints of which nothing is known, what slow ones leave. As for waybill.standing.
 */
const QUICK_MS = 30_000

/** A lane with nothing in hand. `now`, here and below, is in milliseconds by the clock of the worker's lanes. */
export const newLane = (tenantId: string, now: number, quickAt = -Infinity): Lane => ({
  tenantId,
  started: new Line(),
  waiting: [],
  arriving: { count: 0, slots: 0, until: 0 },
  turn: null,
  standing: 'unsure',
  hasManyRetries: false,
  held: false,
  isBusy: false,
  pace: newPace(now),
  quickAt,
})

/** How many are on their way: none once their time is over. */
export const arriving = (lane: Lane, now: number) => (lane.arriving.until > now ? lane.arriving.count : 0)

/** How many of these start on arrival. */
export const keptSlots = (lane: Lane, now: number) => Math.min(arriving(lane, now), lane.arriving.slots)

/** How many slots it has, or are kept for it. */
export const taken = (lane: Lane, now: number) => lane.started.size + keptSlots(lane, now)

/** How many are started, waiting or arriving. */
export const busyIn = (lane: Lane, now: number) => lane.started.size + arriving(lane, now) + lane.waiting.length

/** How many of these may not begin yet: what waits here does so for those that have started, and comes after them. */
export function earlyIn(lane: Lane, now: number): number {
  let early = arriving(lane, now) + lane.waiting.length
  for (const { since } of lane.started) if (since > now) early++
  return early
}

/** An attempt gets under way; a paced one not before its time slot. */
export function begin(lane: Lane, claim: Claim, { isReleased, now }: { isReleased: boolean; now: number }): void {
  claim.underWay = lane.started.join({ since: Math.max(now, claim.startAt ?? 0), isReleased })
}

/** Whether the endpoint was quick not long ago. */
export const wasQuick = (lane: Lane, now: number) => now - lane.quickAt < QUICK_MS

/** How many attempts the endpoint finishes in a window. */
export const paceOf = (lane: Lane, now: number) => countOf(lane.pace, now)

/** How many it is trusted to finish in one: if it is well and was quick, one at least, until that turns out to take longer. */
export const trustIn = (lane: Lane, now: number) =>
  Math.max(paceOf(lane, now), lane.standing === 'good' && wasQuick(lane, now) && isFresh(lane, now) ? 1 : 0)

/** The request of an attempt is over since `endedAt`. Returns whether it tells of the endpoint's pace. */
export function end(
  lane: Lane,
  underWay: Place<UnderWay>,
  { endedAt, now }: { endedAt: number; now: number },
): boolean {
  lane.started.leave(underWay)
  // One that took longer than a window, perhaps to its deadline, says nothing about how many more the endpoint could take.
  const isSoon = endedAt - underWay.value.since <= WINDOW_MS
  if (isSoon) noteFinished(lane.pace, now)
  lane.quickAt = isSoon ? now : -Infinity
  return isSoon
}

/**
 * By how many it is busy beyond what it is trusted with. What waits for a slot of another endpoint is not stuck in one, nor is what
 * arrives without one. An idle lane's window is left to age, so that the lane can be dropped.
 */
export function stuckIn(lane: Lane, now: number): number {
  const count = lane.turn && taken(lane, now) === 0 ? 0 : taken(lane, now) + lane.waiting.length
  return count === 0 ? 0 : Math.max(0, count - trustIn(lane, now))
}

/** Whether nothing has been under way for long, so that nobody knows yet how fast the endpoint is. */
export function isFresh(lane: Lane, now: number): boolean {
  const [oldest] = lane.started
  return oldest === undefined || now - oldest.since <= PATIENCE_MS
}

/** Whether nothing of the endpoint is here, nor has been for so long that its pace is not known any more. */
export const isIdle = (lane: Lane, now: number) => busyIn(lane, now) === 0 && isOver(lane.pace, now)

/**
 * How many may come at once and not wait here for longer. Where a process with so many `slots` never has as many in hand
 * (flow/in-hand.ts), any number: the others wait in the queue, and what limits is this process or the machine, not the endpoint. But
 * retries would wait there before those of others that are due later.
 */
export function inTime(lane: Lane, now: number, slots: number): number {
  const count = inPatience(lane.pace, now)
  return lane.hasManyRetries || count < 2 * slots ? count : Infinity
}

/** Removes and returns the waiting claims that would have to wait longer than expected. */
export function takeStaleFrom(lane: Lane, now: number): Claim[] {
  const keep = isFresh(lane, now) ? lane.waiting.length : 2 * inPatience(lane.pace, now)
  // The newest are removed, so that those that stay are in order.
  const stale = lane.waiting.splice(keep)
  while (lane.waiting[0] !== undefined && lane.waiting[0].since < now - STALE * PATIENCE_MS)
    stale.push(...lane.waiting.splice(0, 1))
  return stale.map(({ claim }) => claim)
}
