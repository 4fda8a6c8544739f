import { isTooSlow } from '../db/errors.ts'

/** The share of all time that thorough looks may take. */
const SHARE = 1 / 50
const PAUSE_MS = 1000
/** How long a first slow look puts off the next at most: it may have waited for a lock rather than scanned much. */
const DOUBT_MS = 10_000

/**
 * For looks that are quick when they go on from where the last one ended, and may be slow when they begin anew (`thorough`).
 * Tells each look which it is to be. At most one a second is thorough, and fewer if several in a row are slow or time out.
 * `clock` is in milliseconds.
 */
export function createThoroughness(
  clock = () => performance.now(),
): <T>(look: (thorough: boolean) => Promise<T>) => Promise<T> {
  let nextFrom = 0
  let wasSlow = false
  return async (look) => {
    const begun = clock()
    if (begun < nextFrom) return await look(false)
    nextFrom = begun + PAUSE_MS
    const putOffNext = () => {
      const pause = Math.max(PAUSE_MS, (clock() - begun) / SHARE)
      nextFrom = begun + (wasSlow ? pause : Math.min(pause, DOUBT_MS))
      wasSlow = pause > DOUBT_MS
    }
    try {
      const found = await look(true)
      putOffNext()
      return found
    } catch (error) {
      // A database that is away says nothing about how long the look would take.
      if (isTooSlow(error)) putOffNext()
      throw error
    }
  }
}
