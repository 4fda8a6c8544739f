import { setTimeout as sleep } from 'node:timers/promises'
import type postgresTypes from 'postgres'
import { readDatabaseUrl } from './database-url.ts'
import { postgres } from './driver.ts'
import type { Log } from './log.ts'

/** A pool or a transaction: whatever a query runs on. Functions that query take it first. */
export type Db = postgresTypes.ISql
/** The pool itself: what can open transactions and listen. */
export type Pool = postgresTypes.Sql

/** How long a query of a request or a worker may take: less than the request itself (http/deadline.ts). */
export const PATIENCE_MS = 3000

/**
 * Opens a pool of at most `max` connections; nothing connects before the first query. Plans are made for the values at
 * hand (`force_custom_plan`): ids are bounds on partitions, and a generic plan would open every day there is.
 *
 * A statement that takes longer than `patienceMs` is cancelled by the database, and one that is not answered at all ends its
 * connection half a second later; 0 waits for ever. Both sides probe idle connections every few seconds, so that neither keeps
 * one, or its locks, that the other has lost.
 *
 * `claims: true` is for claiming jobs: its commits return before they are on disk. A crash may forget a claim. `reads: true`
 * is for queries that may be slow: instead of being sent behind another one, each waits for a free connection. Such a pool has
 * no transactions.
 */
export function openDb(
  url: string,
  options: { log: Log; name: string; max: number; patienceMs?: number; claims?: boolean; reads?: boolean },
): Pool {
  const { patienceMs = PATIENCE_MS, reads } = options
  const mended = { answer_timeout: patienceMs && patienceMs / 1000 + 0.5 }
  // The driver would send up to a hundred of them behind one that runs.
  const alone = reads && { max_pipeline: 0 }
  const { host, port, options: asked, ...who } = readDatabaseUrl(url)
  // Lists, which its types do not know: in a plain host, it takes what follows a colon for the port.
  const where: object = {
    host: [host],
    port: [port],
    ...(host.startsWith('/') && { path: `${host}/.s.PGSQL.${port}` }),
  }
  return postgres({
    ...who,
    ...where,
    ...mended,
    ...alone,
    max: options.max,
    connect_timeout: Math.min(5, patienceMs / 1000 || 5),
    // The driver's own backoff grows to 20 s, and every query waits for it: a database that is back is found at once.
    backoff: () => 0.25,
    // A dead connection would be found out late where queries are slow or rare, so idle ones are soon closed.
    idle_timeout: patienceMs > PATIENCE_MS || reads ? 5 : 300,
    max_lifetime: 3600,
    // Migrating waits for ever, and its lock lives and dies with the connection.
    ...(patienceMs === 0 && { idle_timeout: 0, max_lifetime: 0 }),
    keep_alive: 5,
    connection: {
      application_name: `waybill ${options.name}`,
      // What the driver can read, whatever server, database or role are set to.
      DateStyle: 'ISO',
      bytea_output: 'hex',
      plan_cache_mode: 'force_custom_plan',
      // Up to Postgres 17, plans made with `enable_seqscan` off count as so expensive that they would be compiled at each use.
      jit: 'off',
      statement_timeout: patienceMs,
      // Whose batches meet wait for each other, instead of failing.
      default_transaction_isolation: 'read committed',
      idle_in_transaction_session_timeout: 10_000,
      tcp_keepalives_idle: 5,
      tcp_keepalives_interval: 2,
      tcp_keepalives_count: 5,
      tcp_user_timeout: 15_000,
      ...(options.claims && { synchronous_commit: 'off' }),
      ...(asked && { options: asked }),
    },
    onnotice: ({ severity, message }) =>
      options.log[severity === 'WARNING' ? 'warn' : 'debug']({ notice: message }, 'database.notice'),
  })
}

const PULSE_MS = 5000

/**
 * Keeps querying over the connection on which `pool` listens, which would otherwise never notice that it leads nowhere: without
 * an answer it is closed, and the driver listens again. Returns a function that ends this.
 */
export function watchListening(pool: Pool): () => void {
  // Where the driver keeps the pool of one connection that it listens on, from the first `listen` on.
  const { listen } = pool as Pool & { listen: { sql?: Pool } }
  const timer = setInterval(() => {
    if (listen.sql) listen.sql`select 1`.catch(() => {})
  }, PULSE_MS)
  return () => clearInterval(timer)
}

/** How long a start waits for a database that is not there yet; whoever supervises the process may then start it anew. */
const START_PATIENCE_MS = 60_000
const START_PAUSE_MS = 500
/** Of SQLSTATE: the database is starting, stopping, or out of connections. */
const PASSING = ['57P03', '57P01', '53300']

/**
 * Resolves when the database answers, so that it does not matter which of the two starts first. Throws its error if it refuses
 * (wrong password, no such database), and the last failure if it cannot be reached for a minute.
 */
export async function untilReachable(url: string, log: Log): Promise<void> {
  const until = performance.now() + START_PATIENCE_MS
  for (let tries = 1; ; tries++) {
    const pool = openDb(url, { log, name: 'start', max: 1 })
    // Nobody could catch the failure of that query (learnTypes).
    pool.options.fetch_types = false
    try {
      await pool`select 1`
      return
    } catch (error) {
      const refused = error instanceof postgres.PostgresError && !PASSING.includes(error.code)
      if (refused || performance.now() > until) throw error
      if (tries % 10 === 1) log.warn({ err: error }, 'database.waiting')
    } finally {
      await pool.end({ timeout: 0 })
    }
    await sleep(START_PAUSE_MS)
  }
}

/**
 * The driver asks for the array types on every new connection, and nobody catches the failure of that query: a database
 * lost at that moment would end the process. They are the same for the whole pool, so they are asked for once, here.
 */
export async function learnTypes(...pools: Pool[]): Promise<void> {
  for (const pool of pools) {
    await pool`select 1`
    pool.options.fetch_types = false
  }
}

const RETRYABLE = new Set(['40P01', '40001', '55P03'])

/** Whether Postgres gave up a transaction because of others, so that running it again is right (deadlock, serialization, lock_timeout). */
export const isRetryable = (error: unknown) => error instanceof postgres.PostgresError && RETRYABLE.has(error.code)

const MAX_TRIES = 3

/** Does what Postgres may give up because of others, up to three times in all. `work` must be one statement or transaction. */
export async function retried<Result>(work: () => PromiseLike<Result>): Promise<Result> {
  for (let tries = 1; ; tries++) {
    try {
      return await work()
    } catch (error) {
      if (!isRetryable(error) || tries === MAX_TRIES) throw error
    }
  }
}

/** Runs a transaction, again if Postgres gives it up because of others (`retried`). */
export const transact = <Result>(pool: Pool, work: (sql: Db) => Promise<Result>): Promise<Result> =>
  retried(() => pool.begin(work) as Promise<Result>)

/** Whether a statement was cancelled because it took longer than its pool's patience. */
export const isTooSlow = (error: unknown) => error instanceof postgres.PostgresError && error.code === '57014'

/** Whether a table is not there any more. */
export const isGone = (error: unknown) => error instanceof postgres.PostgresError && error.code === '42P01'

/** Of SQLSTATE: cardinality, data, integrity, program limit and plpgsql errors. */
const FAULTS_OF_VALUES = ['21', '22', '23', '54', 'P0']

/** Whether the database is there and well, and what it was asked is at fault. */
export const isRefusal = (error: unknown) =>
  error instanceof postgres.PostgresError && FAULTS_OF_VALUES.includes(error.code.slice(0, 2))

/** Whether `error` is a violation of the unique constraint or index `constraint`. */
export const isDuplicate = (error: unknown, constraint: string) =>
  error instanceof postgres.PostgresError && error.code === '23505' && error.constraint_name === constraint
