/** Of all the time, this share may go into thorough looks. */
const SHARE = 1 / 20

/**
 * For looks that are quick where they go on from the last one, and may take long where they begin anew: says to each whether
 * it is to be `thorough`. At most one every `pauseMs` is, and fewer where they take long.
 */
export function createThoroughness(pauseMs: number): <T>(look: (thorough: boolean) => Promise<T>) => Promise<T> {
  let nextFrom = 0
  return async (look) => {
    const begun = performance.now()
    if (begun < nextFrom) return await look(false)
    try {
      return await look(true)
    } finally {
      nextFrom = begun + Math.max(pauseMs, (performance.now() - begun) / SHARE)
    }
  }
}
