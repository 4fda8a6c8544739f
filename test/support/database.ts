import { randomBytes } from 'node:crypto'
import { type Db, openDb, type Pool } from '../../src/db/open.ts'
import { createLog } from '../../src/log.ts'
import { createBoss, stopBoss } from '../../src/queue.ts'
import { cleanUp, type Scope } from './cleanup.ts'
import { passMidnight } from './wait.ts'

/** The variable through which test/setup.ts tells the test files where its Postgres is. */
export const SERVER_URL = 'WAYBILL_TEST_SERVER'
export const TEMPLATE = 'waybill_template'
/** Long enough to be told from other words in a log. */
export const PASSWORD = 'test-database-password'

/** What a start of the service would install anyway; every service that is started sets its own. */
export const QUEUE = { RETRY_LIMIT: 14, RETRY_DELAY_SECONDS: 5, RETRY_DELAY_MAX_SECONDS: 36_000 }

export type TestDatabase = {
  url: string
  sql: Pool
  /** A connection of its own, for a transaction or locks that a test holds as long as it likes. */
  newSession: () => Pool
  /** A pool as the service has it, of one connection unless more are asked for. */
  openPool: (options?: { max?: number; patienceMs?: number }) => Pool
}

const log = createLog('silent')

/** Connections that wait for whatever a test makes them wait for. */
export const connect = (url: string, max = 1) => openDb(url, { log, name: 'test', max, patienceMs: 0 })

/** Holds tables, as in `waybill.events in share mode`, until the returned function is called. */
export async function lock(sql: Pool, what: string): Promise<() => Promise<void>> {
  const held = Promise.withResolvers<void>()
  const released = Promise.withResolvers<void>()
  const locking = sql.begin(async (sql) => {
    await sql.text(`lock table ${what}`)
    held.resolve()
    await released.promise
  })
  await Promise.race([held.promise, locking])
  return async () => {
    released.resolve()
    await locking
  }
}

/** Stores an endpoint, and its tenant where that is new, behind the API's back; resolves with its id. */
export async function insertEndpoint(
  sql: Db,
  { tenant = 'acme', url = 'http://x', types = ['*'] as readonly string[], ordered = false } = {},
): Promise<string> {
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values (${tenant}, ${tenant}) on conflict do nothing`
  const [row] = await sql<{ id: string }[]>`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret, ordered)
    values (${tenant}, waybill.make_id(clock_timestamp()), ${url}, ${types}, '', ${ordered}) returning endpoint_id as id`
  return row!.id
}

/** How many wait for a table that is locked. In other tests' databases the table has the same number. */
export const waitingFor = async (sql: Pool, table: string) =>
  (
    await sql`
      select from pg_locks l join pg_database d on d.oid = l.database
      where datname = current_database() and relation = ${table}::regclass and not granted`
  ).length

/** How many statements wait for others' locks; with `query`, of those like it. */
export const waitingForLocks = async (sql: Pool, query = '%') =>
  (
    await sql`
      select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like ${query}`
  ).length

/**
 * A database of the test's own, cloned from the migrated template (`template: null`: an empty one), and dropped
 * afterwards, whoever is still connected.
 */
export async function createDatabase(
  scope: Scope,
  { template = TEMPLATE as string | null } = {},
): Promise<TestDatabase> {
  const server = process.env[SERVER_URL]
  if (!server) throw new Error('no test database: run with --test-global-setup=test/setup.ts, as npm test does')
  await passMidnight()
  const name = `test_${randomBytes(6).toString('hex')}`
  const admin = connect(`${server}/postgres`)
  await admin.text(`create database ${name} template ${template ?? 'template0'} strategy wal_log`)
  const url = `${server}/${name}`
  const sql = connect(url, 4)
  const pools: Pool[] = [sql]
  cleanUp(scope, async () => {
    for (const pool of pools) await pool.end(1000)
    await admin.text(`drop database ${name} with (force)`)
    await admin.end()
  })
  const openPool: TestDatabase['openPool'] = (options) => {
    const pool = openDb(url, { log, name: 'test', max: 1, ...options })
    pools.push(pool)
    return pool
  }
  return { url, sql, newSession: () => openPool({ patienceMs: 0 }), openPool }
}

/** pg-boss as a worker has it, until the test ends. */
export async function startBoss(scope: Scope, url: string) {
  const boss = createBoss(url, log)
  await boss.start()
  cleanUp(scope, () => stopBoss(boss))
  return boss
}
