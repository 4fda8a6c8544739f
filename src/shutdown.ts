import type { Log } from './log.ts'

export interface Releasers {
  /** Registers what closes a thing that was just opened. `name` appears in the log when closing fails. */
  add(name: string, close: () => Promise<unknown> | unknown): void
  /** Closes everything, last opened first; a failing closer is logged and does not stop the others. */
  releaseAll(log: Log): Promise<void>
}

/** Keeps what was opened, so that it can be closed in reverse order, whether the start succeeded or not. */
export function createReleasers(): Releasers {
  const opened: { name: string; close: () => Promise<unknown> | unknown }[] = []
  return {
    add(name, close) {
      opened.push({ name, close })
    },
    async releaseAll(log) {
      for (let last = opened.pop(); last !== undefined; last = opened.pop()) {
        try {
          await last.close()
        } catch (error) {
          log.warn({ err: error, part: last.name }, 'shutdown.failed')
        }
      }
    },
  }
}
