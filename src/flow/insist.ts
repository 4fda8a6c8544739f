import { setTimeout as sleep } from 'node:timers/promises'

/** After this it gives up: the claims in question lapse, and other workers get the jobs. */
const INSIST_MS = 45_000
const PAUSE_MS = 500

/**
 * Gets work done that must survive a database outage: tries it twice a second until it succeeds, and throws its last error after
 * 45 seconds, or after `forMs`. `waiting` is called with the first error.
 */
export async function insist<T>(
  work: () => Promise<T>,
  waiting: (error: unknown) => void,
  { forMs = INSIST_MS, signal }: { forMs?: number; signal?: AbortSignal } = {},
): Promise<T> {
  const until = performance.now() + forMs
  for (let tries = 1; ; tries++) {
    try {
      return await work()
    } catch (error) {
      if (performance.now() > until || signal?.aborted) throw error
      if (tries === 1) waiting(error)
      await sleep(PAUSE_MS)
    }
  }
}
