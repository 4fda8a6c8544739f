/** Beyond this the claims that it is about have lapsed, and other workers have the jobs. */
const INSIST_MS = 45_000
const PAUSE_MS = 500

/**
 * What is worth keeping while the database is away: tries `work` until it succeeds, twice a second, and throws its last
 * error after three quarters of a minute, or after `forMs`. `waiting` is told of the first one.
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
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS))
    }
  }
}
