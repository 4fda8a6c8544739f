import { isTooSlow } from '../db.ts'

/** Of all the time, this share may go into thorough looks. */
const SHARE = 1 / 50
const PAUSE_MS = 1000

/**
 * For looks that are quick where they go on from the last one, and may take long where they begin anew: says to each whether
 * it is to be `thorough`. At most one a second is, and fewer where they take long, or too long.
 */
export function createThoroughness(): <T>(look: (thorough: boolean) => Promise<T>) => Promise<T> {
  let nextFrom = 0
  return async (look) => {
    const begun = performance.now()
    if (begun < nextFrom) return await look(false)
    nextFrom = begun + PAUSE_MS
    const passOver = () => {
      nextFrom = begun + Math.max(PAUSE_MS, (performance.now() - begun) / SHARE)
    }
    try {
      const found = await look(true)
      passOver()
      return found
    } catch (error) {
      // A database that is away says nothing about how long the look would take.
      if (isTooSlow(error)) passOver()
      throw error
    }
  }
}
