import { setTimeout as sleep } from 'node:timers/promises'

/** Returns a function that runs what it is given, in order: at most `max` of them in one turn of the event loop. */
export function limitPerTurn(max: number): (run: () => void) => void {
  let count = 0
  let waiting: (() => void)[] = []
  const endTurn = () => {
    const next = waiting.slice(0, max)
    waiting = waiting.slice(max)
    count = next.length
    // In the next turn, each with what it leads to at once before the one after it.
    for (const run of next) setImmediate(run)
    if (count > 0) setImmediate(endTurn)
  }
  return (run) => {
    if (count === 0) setImmediate(endTurn)
    if (count < max) {
      count++
      run()
    } else waiting.push(run)
  }
}

/** Lets `max` callers go on in each turn of the event loop, in order. */
export function createTurns(max: number): () => Promise<void> {
  const run = limitPerTurn(max)
  return () => new Promise(run)
}

/** Await it before work that takes milliseconds: each turn of the event loop does one such piece, and serves the others too. */
export const heavyTurn = createTurns(1)

/** Waits until `moment` (by performance.now()). Rejects with the signal's reason if that aborts first. */
export const until = (moment: number, signal: AbortSignal): Promise<void> =>
  sleep(Math.max(0, moment - performance.now()), undefined, { signal }).catch(() => {
    throw signal.reason
  })
