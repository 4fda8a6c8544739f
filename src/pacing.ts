import { setTimeout as sleep } from 'node:timers/promises'

/**
 * Returns a function that runs what it is given, in order: in one turn of the event loop as many as weigh `max` together at most, or
 * one that weighs more.
 */
export function limitPerTurn(max: number): (run: () => void, weight?: number) => void {
  let taken = 0
  const waiting: { run: () => void; weight: number }[] = []
  const fits = (weight: number) => taken === 0 || taken + weight <= max
  const endTurn = () => {
    taken = 0
    const end = waiting.findIndex(({ weight }) => {
      if (!fits(weight)) return true
      taken += weight
      return false
    })
    const next = waiting.splice(0, end < 0 ? waiting.length : end)
    // In the next turn, each with what it leads to at once before the one after it.
    for (const { run } of next) setImmediate(run)
    if (taken > 0) setImmediate(endTurn)
  }
  return (run, weight = 1) => {
    if (taken === 0) setImmediate(endTurn)
    if (waiting.length === 0 && fits(weight)) {
      taken += weight
      run()
    } else waiting.push({ run, weight })
  }
}

/** Lets its callers go on, in order: in one turn of the event loop those that weigh `max` together at most, or one that weighs more. */
export function createTurns(max: number): (weight?: number) => Promise<void> {
  const run = limitPerTurn(max)
  return (weight) => new Promise((go) => run(go, weight))
}

/** Await it before work that takes milliseconds: each turn of the event loop does one such piece, and serves the others too. */
export const heavyTurn = createTurns(1)

/**
 * Calls `work` after `ms`, in the end of that turn of the event loop: where the process stood still, what came meanwhile (an answer, a
 * request) is read first. Clearing the timer keeps it from being called, unless its turn has begun.
 */
export const setLate = (work: () => void, ms: number): NodeJS.Timeout => setTimeout(() => setImmediate(work), ms)

/** Waits until `moment` (by performance.now()). Rejects with the signal's reason if that aborts first. */
export const until = (moment: number, signal: AbortSignal): Promise<void> =>
  sleep(Math.max(0, moment - performance.now()), undefined, { signal }).catch(() => {
    throw signal.reason
  })
