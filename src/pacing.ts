import { setTimeout as sleep } from 'node:timers/promises'

/** Lets `perTurn` callers go on in each turn of the event loop, in order. */
export function createTurns(perTurn: number): () => Promise<void> {
  const waiting: (() => void)[] = []
  const run = () => {
    for (const go of waiting.splice(0, perTurn)) go()
    if (waiting.length > 0) setImmediate(run)
  }
  return () =>
    new Promise((resolve) => {
      waiting.push(resolve)
      if (waiting.length === 1) setImmediate(run)
    })
}

/** Await it before work that takes milliseconds: each turn of the event loop does one such piece, and serves the others too. */
export const heavyTurn = createTurns(1)

/** Waits until `moment` (by performance.now()). Rejects with the signal's reason if that aborts first. */
export const until = (moment: number, signal: AbortSignal): Promise<void> =>
  sleep(Math.max(0, moment - performance.now()), undefined, { signal }).catch(() => {
    throw signal.reason
  })
