/** Claims wait in a lane only if they are likely to start within this time; others are held. */
export const PATIENCE_MS = 300
/** A pace is how many attempts were finished in a window of this length, not counting any that took longer. */
export const WINDOW_MS = 500

/** What tells how fast attempts are finished: those of this window and of the last whole one. */
export type Pace = { since: number; finished: number; before: number }

/** A pace of which nothing is known. `now`, here and below, is in milliseconds by the clock of the worker's lanes. */
export const newPace = (now: number): Pace => ({ since: now, finished: 0, before: 0 })

/** How many attempts are finished in a window, as far as is known. */
export function countOf(pace: Pace, now: number): number {
  const age = now - pace.since
  if (age >= WINDOW_MS) {
    pace.before = age < 2 * WINDOW_MS ? pace.finished : 0
    pace.since = now
    pace.finished = 0
  }
  return Math.max(pace.before, pace.finished)
}

/** One more is finished. */
export function noteFinished(pace: Pace, now: number): void {
  countOf(pace, now)
  pace.finished++
}

/** How many are finished within the time for which claims wait. */
export const inPatience = (pace: Pace, now: number) => Math.ceil((countOf(pace, now) * PATIENCE_MS) / WINDOW_MS)

/** Whether nobody has asked for so long that nothing is known any more. */
export const isOver = (pace: Pace, now: number) => now - pace.since > 2 * WINDOW_MS
