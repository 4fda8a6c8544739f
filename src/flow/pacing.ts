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

/** Waits until `moment` (by performance.now()). Rejects with the signal's reason if that aborts first. */
export function until(moment: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer)
      reject(signal.reason)
    }
    const timer = setTimeout(
      () => {
        signal.removeEventListener('abort', stop)
        resolve()
      },
      Math.max(0, moment - performance.now()),
    )
    if (signal.aborted) stop()
    else signal.addEventListener('abort', stop)
  })
}
