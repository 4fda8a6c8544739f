import { isRefusal, isRetryable } from '../db.ts'

/**
 * Natural batches: whatever arrived while the last batches ran is the next batch, so nothing waits for a timer; alone, an
 * item is a batch of one. `run` gets 1 to `max` items and answers with one result per item, in order; at most `inFlight`
 * runs at once. When the database refuses a batch, its items run one by one, so that a bad one fails alone.
 */
export function createBatcher<Item, Result>(options: {
  max: number
  inFlight: number
  run: (items: Item[]) => Promise<Result[]>
}): (item: Item) => Promise<Result> {
  type Waiting = { item: Item; resolve: (result: Result) => void; reject: (error: unknown) => void }
  let waiting: Waiting[] = []
  let running = 0

  async function runBatch(batch: Waiting[]): Promise<void> {
    try {
      const results = await options.run(batch.map((entry) => entry.item))
      batch.forEach((entry, index) => {
        entry.resolve(results[index] as Result)
      })
    } catch (error) {
      if (isRetryable(error)) await runBatch(batch)
      else if (batch.length > 1 && isRefusal(error)) for (const entry of batch) await runBatch([entry])
      else for (const entry of batch) entry.reject(error)
    }
  }

  function next(): void {
    if (running === options.inFlight || waiting.length === 0) return
    const batch = waiting.slice(0, options.max)
    waiting = waiting.slice(options.max)
    running++
    void runBatch(batch).finally(() => {
      running--
      next()
    })
    next()
  }

  return (item) =>
    new Promise((resolve, reject) => {
      waiting.push({ item, resolve, reject })
      // A turn later, so that requests that arrive in one read of the socket share a batch.
      if (waiting.length === 1) setImmediate(next)
    })
}
