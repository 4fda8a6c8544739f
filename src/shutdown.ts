import { setTimeout as sleep } from 'node:timers/promises'
import type { Log } from './log.ts'

/** The time after the grace for handing back what was interrupted. */
export const LAST_WORDS_MS = 1000
/** How long each thing still open gets after that: while the database is away, no connection closes in order. */
const LAST_MOMENT_MS = 500

export type Closers = {
  /**
   * Registers what closes a thing that was just opened. `name` appears in the log when closing fails. `atOnce`: closing it begins
   * when the first thing is closed, and is awaited in its turn.
   */
  add(name: string, close: () => Promise<unknown> | unknown, options?: { atOnce: boolean }): void
  /**
   * Closes everything, last opened first, each awaited while the grace lasts; a closer that fails, or takes longer, is logged
   * and does not stop the others.
   */
  closeAll(log: Log, graceMs: number): Promise<void>
}

/** Keeps what was opened, so that it can be closed in reverse order, whether the start succeeded or not. */
export function createClosers(): Closers {
  type Opened = { name: string; close: () => Promise<unknown> | unknown; atOnce: boolean }
  const opened: Opened[] = []

  async function closeOne({ name, close }: Opened, log: Log): Promise<void> {
    try {
      await close()
    } catch (error) {
      log.warn({ err: error, part: name }, 'shutdown.failed')
    }
  }

  return {
    add(name, close, { atOnce } = { atOnce: false }) {
      opened.push({ name, close, atOnce })
    },
    async closeAll(log, graceMs) {
      const over = sleep(graceMs + LAST_WORDS_MS)
      const begun = new Map(opened.filter(({ atOnce }) => atOnce).map((one) => [one, closeOne(one, log)]))
      for (let last = opened.pop(); last !== undefined; last = opened.pop()) {
        const closed = begun.get(last) ?? closeOne(last, log)
        const isLate = await Promise.race([closed, over.then(() => sleep(LAST_MOMENT_MS, true))])
        if (isLate) log.warn({ part: last.name }, 'shutdown.not_awaited')
      }
    },
  }
}
