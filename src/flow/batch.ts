import { awakeMs } from '../awake.ts'
import { isRefusal } from '../db/errors.ts'
import { retried } from '../db/retried.ts'
import { inTurn } from '../in-turn.ts'
import { createPortion } from './portion.ts'

/** A batch that takes longer has waited for other processes' batches: for the database's attention, or for locks. */
const BUSY_MS = 6
const PAUSE_MS = 4

/**
 * Natural batches: whatever arrived while the last batch ran is the next batch; a lone item is a batch of one. Nothing waits for
 * a timer, unless the database is busy with other processes' batches: then fewer and larger ones get everybody through sooner. Only
 * where nobody waits for results are items told to `gather`.
 *
 * `run` gets 1 to `max` items, fewer after a batch that took the database too long, and returns one result per item, in order. It must be
 * safe to run again: what Postgres gives up because of others is repeated, as often as it takes. If the
 * database refuses a batch, its items run one by one, so that a bad one fails alone. An item that has waited longer than `patienceMs` is
 * rejected: nobody waits for it any more, and the others are served sooner.
 */
export function createBatcher<Item, Result>(options: {
  max: number
  /** The items of a batch weigh at most this together; a heavier item runs alone. */
  maxWeight?: number
  /** `isFirst`: of its owner's in the batch. */
  weigh?: (item: Item, isFirst: boolean) => number
  /** Whose an item is. Owners take turns, so that none waits for everything that another has brought. */
  owner?: (item: Item) => string
  patienceMs?: number
  /** Batches begin at least so long after each other, unless `enough` items wait, or one that `isUrgent`, or the last one was full. */
  gather?: { ms: number; enough: number; isUrgent: (item: Item) => boolean }
  run: (items: Item[]) => Promise<Result[]>
}): (item: Item) => Promise<Result> {
  /** `since`: by `awakeMs`. */
  type Waiting = { item: Item; since: number; resolve: (result: Result) => void; reject: (error: unknown) => void }
  const { maxWeight = Infinity, weigh = () => 0, owner = () => '' } = options
  const { ms: gatherMs, enough, isUrgent } = options.gather ?? { ms: 0, enough: options.max, isUrgent: () => false }
  let waiting: Waiting[] = []
  let running = false
  /** Before this, by `performance.now`, a batch begins only if enough wait. */
  let notBefore = 0
  let isAlarmSet = false
  const portion = createPortion(options.max)

  /** Returns a function that tells the waiting callers how it went. */
  async function run(batch: Waiting[]): Promise<() => void> {
    try {
      const items = batch.map(({ item }) => item)
      const results = await portion.try(batch.length, () => retried(() => options.run(items), { most: Infinity }))
      // Each caller's result is found by its position, so if one is missing, nobody can be given theirs.
      if (results.length !== batch.length) throw new Error(`${results.length} results for ${batch.length} items`)
      return () =>
        batch.forEach((entry, index) => {
          entry.resolve(results[index] as Result)
        })
    } catch (error) {
      if (batch.length > 1 && isRefusal(error)) return await runEach(batch)
      return () => {
        for (const entry of batch) entry.reject(error)
      }
    }
  }

  /** Runs them one by one, for as long as the database is well. */
  async function runEach(batch: Waiting[]): Promise<() => void> {
    let fault: unknown
    for (const entry of batch) {
      const reject = (error: unknown) => {
        if (!isRefusal(error)) fault = error
        entry.reject(error)
      }
      if (fault === undefined) (await run([{ ...entry, reject }]))()
      else entry.reject(fault)
    }
    return () => {}
  }

  function next(): void {
    giveUpLate()
    if (running || waiting.length === 0) return
    const begun = performance.now()
    if (begun < notBefore && waiting.length < Math.min(enough, portion.most())) {
      setAlarm(notBefore - begun)
      return
    }
    running = true
    const batch = takeBatch()
    const tookAll = waiting.length === 0
    notBefore = tookAll ? begun + gatherMs : 0
    void run(batch).then((tell) => {
      running = false
      const now = performance.now()
      const isBusy = tookAll && now - begun > BUSY_MS
      if (isBusy && waiting.length > 0) notBefore = Math.max(notBefore, now + PAUSE_MS)
      next()
      // Told a turn later: the database gets the next batch in this turn, and works on it while the callers of this one go on.
      setImmediate(tell)
    })
  }

  function setAlarm(ms: number): void {
    if (isAlarmSet) return
    isAlarmSet = true
    setTimeout(() => {
      isAlarmSet = false
      next()
    }, ms)
  }

  function takeBatch(): Waiting[] {
    const batch = new Set<Waiting>()
    const served = new Set<string>()
    /** Those whose next item is too heavy for the rest of the batch. Were it the end of the batch, light ones would wait for heavy ones. */
    const passedOver = new Set<string>()
    let weight = 0
    for (const entry of inTurn(waiting, ({ item }) => owner(item))) {
      if (batch.size === portion.most() || weight > maxWeight) break
      const its = owner(entry.item)
      const own = weigh(entry.item, !served.has(its))
      if (batch.size > 0 && weight + own > maxWeight) passedOver.add(its)
      if (passedOver.has(its)) continue
      weight += own
      batch.add(entry)
      served.add(its)
    }
    // Who has a part in this batch comes behind the others in the next: one whose items fill batches would always be the first.
    const rest = waiting.filter((entry) => !batch.has(entry))
    const { others = [], again = [] } = Object.groupBy(rest, ({ item }) =>
      served.has(owner(item)) ? 'again' : 'others',
    )
    waiting = [...others, ...again]
    return [...batch]
  }

  function giveUpLate(): void {
    const oldest = awakeMs() - (options.patienceMs ?? Infinity)
    const { late = [], inTime = [] } = Object.groupBy(waiting, ({ since }) => (since < oldest ? 'late' : 'inTime'))
    for (const entry of late) entry.reject(new Error('waited too long for the database'))
    waiting = inTime
  }

  return (item) =>
    new Promise((resolve, reject) => {
      waiting.push({ item, since: awakeMs(), resolve, reject })
      if (isUrgent(item)) notBefore = 0
      // A turn later, so that requests that were read from sockets together share a batch.
      if (waiting.length === 1 || waiting.length === enough || isUrgent(item)) setImmediate(next)
    })
}
