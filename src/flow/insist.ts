import { setTimeout as sleep } from 'node:timers/promises'
import { isRefusal } from '../db/errors.ts'

const PAUSE_MS = 500
/** Work that is itself at fault does not get better with time: it is given up, and its claims lapse. */
const FAULTY_MS = 45_000

/**
 * Gets work done that must survive a database outage, however long: tries it twice a second until it succeeds. Throws the last
 * error after `forMs`, when `signal` has aborted, or, if it is a refusal by the database (isRefusal) or a fault of ours, after
 * 45 seconds. `waiting` is called with the first error.
 */
export async function insist<T>(
  work: () => Promise<T>,
  waiting: (error: unknown) => void,
  { forMs = Infinity, signal }: { forMs?: number; signal?: AbortSignal } = {},
): Promise<T> {
  const begun = performance.now()
  for (let tries = 1; ; tries++) {
    try {
      return await work()
    } catch (error) {
      const isFaulty = isRefusal(error) || error instanceof TypeError || error instanceof RangeError
      const most = isFaulty ? Math.min(FAULTY_MS, forMs) : forMs
      if (performance.now() > begun + most || signal?.aborted) throw error
      if (tries === 1) waiting(error)
      await sleep(PAUSE_MS)
    }
  }
}
