import type { Log } from '../log.ts'
import { type Loop, startLoop } from './loop.ts'

/** First attempts and retries are fetched apart, so that neither can starve the other. */
export type Kind = 'first' | 'retry'

/** Due retries announce themselves by time alone, so an idle dispatcher looks this often. */
const POLL_MS = 500
/** With few free slots, as much is waited between fetches: one fetch for several slots costs no more than for one. */
const PAUSE_MS = 5
const MAX_BATCH = 100

/**
 * Keeps up to `slots` items in flight: fetches as many as there are free slots, never more, so that a slow receiver holds
 * one slot and no batch. While both kinds have a backlog, retries get at least an eighth and at most a quarter of the
 * slots. `fetch` claims at most `max` items and starts each; it answers how many it found and must call `release` once
 * for each that ends.
 */
export function startDispatcher(options: {
  slots: number
  log: Log
  fetch: (kind: Kind, max: number, release: () => void) => Promise<number>
}): Loop {
  const { slots } = options
  const inFlight = { first: 0, retry: 0 }
  /** Whether the last fetch found all that it asked for. */
  const backlog = { first: false, retry: false }
  let lastRetryLook = 0

  async function fetch(kind: Kind, room: number): Promise<void> {
    const max = Math.min(Math.floor(room), MAX_BATCH)
    if (max <= 0) return
    const found = await options.fetch(kind, max, () => {
      inFlight[kind]--
      if (backlog.first || backlog.retry) loop.wake()
    })
    inFlight[kind] += found
    backlog[kind] = found >= max
  }

  async function run(): Promise<boolean> {
    const free = () => slots - inFlight.first - inFlight.retry
    if (free() <= 0) return false
    if (free() < MAX_BATCH / 4 && (backlog.first || backlog.retry))
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS))
    const reserved = backlog.retry ? Math.max(0, Math.ceil(slots / 8) - inFlight.retry) : 0
    await fetch('first', free() - reserved)
    if (backlog.retry || Date.now() - lastRetryLook >= POLL_MS) {
      lastRetryLook = Date.now()
      await fetch('retry', Math.min(free(), backlog.first ? Math.max(1, slots / 4) - inFlight.retry : slots))
    }
    return (backlog.first || backlog.retry) && free() > 0
  }

  const loop = startLoop({ name: 'dispatch', run, idleMs: POLL_MS, log: options.log })
  return loop
}
