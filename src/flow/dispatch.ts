import type { Log } from '../log.ts'
import { type Loop, startLoop } from './loop.ts'
import { createThoroughness } from './thorough.ts'

/** First attempts and retries are fetched apart, so that neither can starve the other. */
export type Kind = 'first' | 'retry'

/** Most retries become due by time alone, which tells nobody, so an idle dispatcher looks this often. */
const POLL_MS = 500
/** With few free slots, as much is waited between fetches: one fetch for several slots costs no more than for one. */
const PAUSE_MS = 5
const MAX_BATCH = 100

/**
 * Keeps `slots` taken: fetches as many items as are free, never more, so that a slow receiver holds one slot and no batch.
 * Retries get at most half of the slots, so that a first attempt finds one; while both kinds have a backlog, at most a quarter
 * and at least an eighth. `fetch` claims at most `max` items, now and then from the whole queue (`thorough`), else from where
 * claiming has got to, and answers how many it found; for each that is under way it takes a slot, by `take`, and calls the
 * function that it got when the item ends (once counts, however often it is called). `wake` says that there are first attempts, and whether there are retries as well.
 */
export function startDispatcher(options: {
  slots: number
  log: Log
  fetch: (kind: Kind, how: { max: number; thorough: boolean; take: () => () => void }) => Promise<number>
}): Omit<Loop, 'wake'> & { wake(retries?: boolean): void } {
  const { slots } = options
  const inHand = { first: 0, retry: 0 }
  /** Whether the last fetch found all that it asked for. */
  const backlog = { first: false, retry: false }
  /** Whether there may be some that no fetch has looked for. */
  const announced = { first: true, retry: true }
  /** What a fetch may ask for: half as much after one that failed. It may have been too much to come in time, and would be again. */
  const most = { first: MAX_BATCH, retry: MAX_BATCH }
  let lastLook = -POLL_MS
  let looks = 0
  const look = { first: createThoroughness(), retry: createThoroughness() }

  function take(kind: Kind): () => void {
    let taken = true
    inHand[kind]++
    return () => {
      if (!taken) return
      taken = false
      inHand[kind]--
      if (announced.first || announced.retry || backlog.first || backlog.retry) loop.wake()
    }
  }

  async function fetch(kind: Kind, room: number): Promise<void> {
    const max = Math.min(Math.floor(room), most[kind])
    if (max <= 0) return
    announced[kind] = false
    const asked = look[kind]((thorough) => options.fetch(kind, { max, thorough, take: () => take(kind) }))
    const found = await asked.catch((error: unknown) => {
      most[kind] = Math.ceil(max / 2)
      throw error
    })
    most[kind] = Math.min(2 * most[kind], MAX_BATCH)
    backlog[kind] = found >= max
  }

  const free = () => slots - inHand.first - inHand.retry
  const freeForRetries = () => Math.min(free(), Math.floor(Math.max(1, slots / (backlog.first ? 4 : 2))) - inHand.retry)

  async function run(): Promise<boolean> {
    if (free() <= 0) return false
    if (free() < MAX_BATCH / 2 && (backlog.first || backlog.retry))
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS))
    const mustLook = performance.now() - lastLook >= POLL_MS
    if (mustLook) {
      lastLook = performance.now()
      looks++
    }
    if (announced.first || backlog.first || mustLook) {
      const share = backlog.retry ? Math.floor(slots / 8) - inHand.retry : 0
      // A single slot is for the one and the other by turns.
      const forLook = mustLook && (slots > 1 || looks % 2 === 0) ? 1 : 0
      await fetch('first', free() - Math.max(share, forLook))
    }
    if (announced.retry || backlog.retry || mustLook) await fetch('retry', freeForRetries())
    return (backlog.first && free() > 0) || (backlog.retry && freeForRetries() > 0)
  }

  const loop = startLoop({ name: 'dispatch', run, idleMs: POLL_MS, log: options.log })
  return {
    ...loop,
    wake(retries = false) {
      announced.first = true
      announced.retry ||= retries
      loop.wake()
    },
  }
}
