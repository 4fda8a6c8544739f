import type { Pool } from '../db/open.ts'

/**
 * Follows by how much the database's clock is ahead of this process's, `clock`, which nobody sets. The returned function is told what
 * the former showed at some time after the latter showed `askedMs`, and tells by how much it is `ahead`, and how far that has `moved`
 * since the last call. All are in milliseconds.
 */
export function followClock(clock = () => performance.now()) {
  let ahead: number | undefined
  return (clockMs: number, askedMs: number) => {
    const before = ahead
    // By how much it is ahead lies between these bounds, which are far apart if the answer was late. It moves only if they force it.
    const [least, most] = [clockMs - clock(), clockMs - askedMs]
    ahead = Math.min(Math.max(before ?? least, least), most)
    return { ahead, moved: ahead - (before ?? ahead) }
  }
}

/** The returned function asks by how many milliseconds the database's clock has leapt ahead since the last call; below 0, it was set back. */
export function followLeaps(pool: Pool): () => Promise<number> {
  const follow = followClock()
  return async () => {
    const askedMs = performance.now()
    const [clock] = await pool<[{ now: Date }]>`select clock_timestamp() as now`
    return follow(clock.now.getTime(), askedMs).moved
  }
}
