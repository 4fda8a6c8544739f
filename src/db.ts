import type postgresTypes from 'postgres'
import { postgres } from './driver.ts'
import type { Log } from './log.ts'

/** A pool or a transaction: whatever a query runs on. Functions that query take it first. */
export type Db = postgresTypes.ISql
/** The pool itself: what can open transactions and listen. */
export type Pool = postgresTypes.Sql

/**
 * Opens a pool of at most `max` connections; nothing connects before the first query. Plans are made for the values at
 * hand (`force_custom_plan`): ids are bounds on partitions, and a generic plan would open every day there is.
 * `claims: true` is for claiming jobs: its commits return before they are on disk. A crash may forget a claim.
 */
export function openDb(url: string, options: { log: Log; name: string; max: number; claims?: boolean }): Pool {
  return postgres(url, {
    max: options.max,
    connect_timeout: 5,
    // The driver's own backoff grows to 20 s, and every query waits for it: a database that is back is found at once.
    backoff: () => 0.25,
    idle_timeout: 300,
    max_lifetime: 3600,
    connection: {
      application_name: `waybill ${options.name}`,
      plan_cache_mode: 'force_custom_plan',
      statement_timeout: 30_000,
      idle_in_transaction_session_timeout: 30_000,
      ...(options.claims && { synchronous_commit: 'off' }),
    },
    onnotice: (notice) => options.log.debug({ notice: notice.message }, 'database.notice'),
  })
}

/**
 * The driver asks for the array types on every new connection, and nobody catches the failure of that query: a database
 * lost at that moment would end the process. They are the same for the whole pool, so they are asked for once, here.
 */
export async function learnTypes(pool: Pool): Promise<void> {
  await pool`select 1`
  pool.options.fetch_types = false
}

const RETRYABLE = new Set(['40P01', '40001'])

/** Whether Postgres gave up a transaction because of others, so that running it again is right (deadlock, serialization). */
export const isRetryable = (error: unknown) => error instanceof postgres.PostgresError && RETRYABLE.has(error.code)

/** Whether the database itself answered with an error: it is there, and what it was asked is at fault. */
export const isRefusal = (error: unknown) => error instanceof postgres.PostgresError

/** Whether `error` is a violation of the unique constraint or index `constraint`. */
export const isDuplicate = (error: unknown, constraint: string) =>
  error instanceof postgres.PostgresError && error.code === '23505' && error.constraint_name === constraint
