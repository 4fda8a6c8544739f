import type { Log } from './log.ts'

export interface Releasers {
  /**
   * Registers what closes a thing that was just opened. `name` appears in the log when closing fails. `atOnce`: it begins to
   * close before its turn, beside the first.
   */
  add(name: string, close: () => Promise<unknown> | unknown, options?: { atOnce: boolean }): void
  /** Closes everything, last opened first, each awaited; a failing closer is logged and does not stop the others. */
  releaseAll(log: Log): Promise<void>
}

/** Keeps what was opened, so that it can be closed in reverse order, whether the start succeeded or not. */
export function createReleasers(): Releasers {
  type Opened = { name: string; close: () => Promise<unknown> | unknown; atOnce: boolean }
  const opened: Opened[] = []

  async function release({ name, close }: Opened, log: Log): Promise<void> {
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
    async releaseAll(log) {
      const begun = new Map(opened.filter(({ atOnce }) => atOnce).map((one) => [one, release(one, log)]))
      for (let last = opened.pop(); last !== undefined; last = opened.pop()) {
        await (begun.get(last) ?? release(last, log))
      }
    },
  }
}
