import { types } from 'pg'
import type { Log } from '../log.ts'
import { type AnyRow, type Ask, createPool, isOutdated } from './connections.ts'
import { createListening } from './listening.ts'
import { startOptions } from './settings.ts'
import { Fragment, nameOf, toStatement, type Value } from './statement.ts'
import { readDatabaseUrl } from './url.ts'

/** A pool or a transaction: whatever a query runs on. Functions that query take it first. */
export type Db = {
  /** Runs a statement, as it is written, and resolves with its rows. Each connection prepares it once. */
  <Rows = AnyRow[]>(texts: TemplateStringsArray, ...values: (Value | Fragment)[]): Promise<Rows>
  /** Runs statements that are given as text; with `values` it is one, and prepared. */
  text(text: string, values?: unknown[]): Promise<AnyRow[]>
}

/** The pool itself: what can open transactions and listen. */
export type Pool = Db & {
  /** Runs `work` in a transaction: commits what it has done, or rolls it back if it throws. */
  begin<Result>(work: (sql: Db) => Promise<Result>): Promise<Result>
  /** Listens to a channel, on a connection of its own (db/listening.ts). */
  listen: ReturnType<typeof createListening>['listen']
  /** Closes all connections: those in use as soon as they are free, but after `timeoutMs` (5 seconds) at the latest. */
  end(timeoutMs?: number): Promise<void>
}

/** How long a query of a request or a worker may take: less than the request itself (http/deadline.ts). */
export const PATIENCE_MS = 3000
/**
 * After this long without a word from its process a transaction is ended. A process that stands still in the middle of one has locks
 * that everybody's batches may want, and these must still get through in their own time (PATIENCE_MS).
 */
const SILENT_MS = 2000
/** How long opening a connection may take. */
const CONNECT_MS = 5000

/**
 * Opens a pool of at most `max` connections, and one more if it listens; nothing connects before the first query. Plans are made for
 * the values at hand (`force_custom_plan`): ids are bounds on partitions, and a generic plan would open every day there is.
 *
 * A statement that takes longer than `patienceMs` is cancelled by the database, and one that is not answered at all ends its
 * connection half a second later; 0 waits for ever. Both sides probe idle connections every few seconds, so that neither keeps
 * one, or its locks, that the other has lost.
 *
 * The database knows the connections by `name`. `claims: true` is for claiming jobs: its commits return before they are on
 * disk, since a crash may forget a claim; and plans are kept, since what it asks are calls of functions.
 */
export function openDb(
  url: string,
  options: { log: Log; name: string; max: number; patienceMs?: number; claims?: boolean },
): Pool {
  const { patienceMs = PATIENCE_MS, max } = options
  const config = {
    ...readDatabaseUrl(url),
    application_name: options.name,
    connectionTimeoutMillis: Math.min(CONNECT_MS, patienceMs || CONNECT_MS),
    keepAlive: true,
    keepAliveInitialDelayMillis: 5000,
    types: { getTypeParser: (oid: number) => READ.get(oid) ?? types.getTypeParser(oid) },
  }
  config.options = startOptions(config.options, {
    // A style that the driver can read, whatever server, database or role are set to.
    DateStyle: 'ISO',
    plan_cache_mode: 'force_custom_plan',
    // Up to Postgres 17, plans made with `enable_seqscan` off count as so expensive that they would be compiled at each use.
    jit: 'off',
    // A tenant's list or sum takes one process of the server, not three: publishing shares its cores.
    max_parallel_workers_per_gather: 0,
    // What goes through a table in the order of its pages (upkeep/prune.ts) is not to begin in the middle, where another scan has got to.
    synchronize_seqscans: 'off',
    statement_timeout: patienceMs,
    idle_in_transaction_session_timeout: patienceMs && SILENT_MS,
    tcp_keepalives_idle: 5,
    tcp_keepalives_interval: 2,
    tcp_keepalives_count: 5,
    tcp_user_timeout: 15_000,
    ...(options.claims && { synchronous_commit: 'off', plan_cache_mode: 'force_generic_plan' }),
  })
  const pool = createPool(config, {
    max,
    patienceMs,
    // Where queries are slow or rare, a dead connection would be noticed late, so idle ones are soon closed. Migrating (0) waits
    // for ever, and its lock lives and dies with the connection.
    idleMs: patienceMs && (patienceMs > PATIENCE_MS ? 5000 : 300_000),
    lifetimeSeconds: patienceMs && 3600,
    log: options.log,
  })
  const sql = tag(async (question) => {
    // An outdated statement has not begun. Another connection prepares it anew, unless it, too, has it from before.
    for (let tries = 0; ; tries++) {
      try {
        return await pool.lend((ask) => ask(question))
      } catch (error) {
        if (!isOutdated(error) || tries === max) throw error
      }
    }
  })
  const listening = createListening(pool.open)
  return Object.assign(sql, {
    begin: <Result>(work: (sql: Db) => Promise<Result>) => pool.lend((ask) => inTransaction(ask, work)),
    listen: listening.listen,
    async end(timeoutMs = 5000) {
      listening.end()
      await pool.end(timeoutMs)
    },
  })
}

async function inTransaction<Result>(ask: Ask, work: (sql: Db) => Promise<Result>): Promise<Result> {
  let isOver = false
  const sql = tag(async (question) => {
    if (isOver) throw new Error('the transaction is over')
    return await ask(question)
  })
  await ask({ text: 'begin' })
  let result: Result
  try {
    result = await work(sql)
  } catch (error) {
    // What is left of `work` must not run after the rollback.
    isOver = true
    // The error that counts is the first.
    await ask({ text: 'rollback' }).catch(() => {})
    throw error
  }
  isOver = true
  // If `work` overlooked a failure, Postgres rolls back.
  if ((await ask({ text: 'commit' })).command !== 'COMMIT') throw new Error('the transaction was rolled back')
  return result
}

/** Makes a Db of what asks the database. */
function tag(ask: Ask): Db {
  const run = async <Rows>(texts: TemplateStringsArray, ...values: (Value | Fragment)[]) => {
    const { text, values: own } = toStatement(new Fragment(texts, values))
    return (await ask({ text, values: own, name: nameOf(text) })).rows as Rows
  }
  return Object.assign(run, {
    text: async (text: string, values?: unknown[]) =>
      (await ask({ text, ...(values && { values, name: nameOf(text) }) })).rows,
  })
}

const UUID_LIST = 2951

/** Values that come with every event and delivery, read faster than the driver does; lists of ids have no nulls in them. */
const READ = new Map<number, (text: string) => unknown>([
  [types.builtins.TIMESTAMPTZ, (text) => new Date(text)],
  [UUID_LIST, (text) => (text === '{}' ? [] : text.slice(1, -1).split(','))],
])
