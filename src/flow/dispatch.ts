import type { Log } from '../log.ts'

export type Dispatcher = {
  /** Says that there may be due work, so the next fetch happens now instead of at the next poll. */
  wake(): void
  /** Stops fetching at once; resolves when the last fetch is over. What is in flight goes on. */
  stop(): Promise<void>
}

/** Due retries announce themselves by time alone, so an idle dispatcher looks this often. */
const POLL_MS = 500
/** With few free slots, as much is waited between fetches: one fetch for several slots costs no more than for one. */
const PAUSE_MS = 5
const MAX_BATCH = 100

/**
 * Keeps up to `slots` items in flight: fetches as many as there are free slots, never more, so that a slow receiver holds
 * one slot and no batch. `fetch` claims at most `max` items and starts each; it answers how many it found and must call
 * `release` once per item that ends.
 */
export function startDispatcher(options: {
  slots: number
  log: Log
  fetch: (max: number, release: () => void) => Promise<number>
}): Dispatcher {
  let inFlight = 0
  let stopped = false
  let due = true
  let alarm: (() => void) | undefined

  function wake() {
    due = true
    alarm?.()
  }

  function release() {
    inFlight--
    if (due) alarm?.()
  }

  const sleep = (ms: number) =>
    new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, ms)
      alarm = () => {
        clearTimeout(timer)
        resolve()
      }
    }).finally(() => {
      alarm = undefined
    })

  async function run() {
    while (!stopped) {
      const max = Math.min(options.slots - inFlight, MAX_BATCH)
      if (max === 0) {
        await sleep(POLL_MS)
        continue
      }
      due = false
      try {
        const found = await options.fetch(max, release)
        inFlight += found
        due ||= found === max
        if (stopped) break
        if (!due) {
          await sleep(POLL_MS)
          due = true
        } else if (max < MAX_BATCH / 4) await new Promise((resolve) => setTimeout(resolve, PAUSE_MS))
      } catch (error) {
        options.log.error({ err: error }, 'dispatch.failed')
        await sleep(POLL_MS)
      }
    }
  }

  const running = run()
  return {
    wake,
    stop() {
      stopped = true
      alarm?.()
      return running
    },
  }
}
