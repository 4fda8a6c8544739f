import { isGone, isKept, isRetryable } from '../db/errors.ts'
import type { Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { countDay, dropDay, uncountDropped } from './drop-day.ts'
import { type Counts, KINDS, NO_ROWS } from './partitions.ts'
import { countKeys, countRowsToPrune, deleteKeys, pruneRows } from './prune.ts'

/** How many rows were deleted, or would be. */
type Retention = Counts & {
  applied: boolean
  /** Whatever was created before this is deleted. It is a midnight UTC, since the tables are partitioned by day. */
  cutoff: Date
  idempotency_keys: number
}

const MAX_TRIES = 20

/**
 * Deletes events, deliveries, attempts and idempotency keys that are older than `days` whole UTC days; with `apply: false` it only
 * counts them. Days are dropped as a whole, after their live rows have moved to the default partitions. A day with too many live
 * rows, or one that stays in use for long (as by a dump, until that ends), loses only the rows of finished events, one by one.
 * Safe to run twice at once. What keeps a day from being deleted is thrown when all else is done.
 */
export async function runRetention(
  pool: Pool,
  options: { days: number; apply: boolean; log: Log },
): Promise<Retention> {
  const [{ cutoff }] = await pool<[{ cutoff: Date }]>`
    select date_trunc('day', now() - ${options.days} * interval '24 hours', 'utc') as cutoff`
  const total = { ...NO_ROWS }
  let obstacle: unknown
  let tries = MAX_TRIES
  async function dropInTime(day: string): Promise<Counts | null> {
    try {
      const counts = await dropDay(pool, day, tries)
      tries = MAX_TRIES
      return counts
    } catch (error) {
      if (!isRetryable(error)) throw error
      options.log.warn({ err: error, day }, 'retention.day_in_use')
      // Whoever is in the way of one day is most likely in the way of the next, and everybody waits at each try.
      tries = 1
      return null
    }
  }
  const [wholeDay, rows, keys] = options.apply
    ? [dropInTime, pruneRows, deleteKeys]
    : [(day: string) => countDay(pool, day), countRowsToPrune, countKeys]
  for (const day of await daysBefore(pool, cutoff)) {
    const counts = await wholeDay(day)
      .then((whole) => whole ?? rows(pool, day, null))
      .catch((error: unknown) => {
        if (isKept(error)) obstacle ??= error
        // One that is gone has been dropped by another run before it was counted.
        else if (!isGone(error)) throw error
        return NO_ROWS
      })
    for (const kind of KINDS) total[kind] += counts[kind]
    if (options.apply) await uncountDropped(pool)
  }
  const leftovers = await rows(pool, 'default', cutoff)
  for (const kind of KINDS) total[kind] += leftovers[kind]
  const result = {
    applied: options.apply,
    cutoff,
    ...total,
    idempotency_keys: await keys(pool, cutoff),
  }
  if (options.apply) await pool`delete from waybill.attempt_counts where hour < ${cutoff}`
  options.log.info(result, 'retention.run')
  // What a run that died has left.
  if (options.apply) await uncountDropped(pool)
  if (obstacle) throw obstacle
  return result
}

/** The suffixes of the daily partitions that end at or before `cutoff`, oldest first. */
async function daysBefore(pool: Pool, cutoff: Date): Promise<string[]> {
  const last = cutoff.toISOString().slice(0, 10).replaceAll('-', '')
  const rows = await pool<{ day: string }[]>`
    select right(relname, 8) as day from pg_class
    where relnamespace = 'waybill'::regnamespace and relkind = 'r' and relname ~ '^deliveries_\\d{8}$' and right(relname, 8) < ${last}
    order by 1`
  return rows.map((row) => row.day)
}
