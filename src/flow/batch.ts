import { isRefusal, isRetryable } from '../db.ts'

/**
 * Natural batches: whatever arrived while the last batch ran is the next batch, so nothing waits for a timer; alone, an
 * item is a batch of one. `run` gets 1 to `max` items and answers with one result per item, in order. When the database
 * refuses a batch, its items run one by one, so that a bad one fails alone. Who has waited for longer than `patienceMs` is
 * rejected: nobody waits for the answer any more, and those who do come sooner.
 */
export function createBatcher<Item, Result>(options: {
  max: number
  /** A batch ends where its items weigh more than this together; a heavier one goes alone. */
  maxWeight?: number
  weigh?: (item: Item) => number
  patienceMs?: number
  run: (items: Item[]) => Promise<Result[]>
}): (item: Item) => Promise<Result> {
  type Waiting = { item: Item; since: number; resolve: (result: Result) => void; reject: (error: unknown) => void }
  const waiting: Waiting[] = []
  let running = false

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
    giveUpLate()
    if (running || waiting.length === 0) return
    running = true
    void runBatch(waiting.splice(0, batchLength())).finally(() => {
      running = false
      next()
    })
  }

  function batchLength(): number {
    const { max, maxWeight = Infinity, weigh = () => 0 } = options
    let weight = 0
    const end = waiting.slice(0, max).findIndex(({ item }) => {
      weight += weigh(item)
      return weight > maxWeight
    })
    return end < 0 ? max : Math.max(1, end)
  }

  function giveUpLate(): void {
    const oldest = performance.now() - (options.patienceMs ?? Infinity)
    const late = waiting.findIndex(({ since }) => since >= oldest)
    for (const entry of waiting.splice(0, late < 0 ? waiting.length : late))
      entry.reject(new Error('waited too long for the database'))
  }

  return (item) =>
    new Promise((resolve, reject) => {
      waiting.push({ item, since: performance.now(), resolve, reject })
      // A turn later, so that requests that arrive in one read of the socket share a batch.
      if (waiting.length === 1) setImmediate(next)
    })
}
