import { isTooSlow } from '../db/errors.ts'

/**
 * How many to do at once: `max`, but half of what was tried last if that was too much, which `isTooMuch` tells by its error (usually
 * that it took the database too long), and up to twice as many again after each try that succeeded.
 */
export function createPortion(max: number, isTooMuch: (error: unknown) => boolean = isTooSlow) {
  let most = max
  return {
    most: () => most,

    /** Tries `count` of them. Rejects as `run` does. */
    async try<Result>(count: number, run: () => Promise<Result>): Promise<Result> {
      const result = await run().catch((error: unknown) => {
        if (isTooMuch(error)) most = Math.ceil(count / 2)
        throw error
      })
      most = Math.min(Math.max(most, 2 * count), max)
      return result
    },
  }
}
