import { createHash } from 'node:crypto'
import { readdir, readFile } from 'node:fs/promises'
import { setTimeout as sleep } from 'node:timers/promises'
import { isGone } from './db/errors.ts'
import { type Db, openDb, type Pool } from './db/open.ts'
import { retried } from './db/retried.ts'
import type { Log } from './log.ts'
import { DEAD_LETTERS, DELIVERIES, type QueueSettings } from './queue.ts'
import { installQueue } from './queue-install.ts'
import { makePartitions } from './upkeep/partitions.ts'
import { VERSION } from './version.ts'

const MIGRATIONS = new URL('../sql/', import.meta.url)
const FUNCTIONS = new URL('../sql/functions/', import.meta.url)
/** One constant for all versions: whoever migrates this database takes turns. */
const LOCK = 0x5741_5942
/** Another one, for those that have files to apply: however many wait for a table, only one of them tries. */
const FILES_LOCK = 0x5741_5943
/** The longest pause between two tries for a lock. Everybody else waits behind each try, so the pauses double, up to this. */
const MAX_PAUSE_MS = 30_000

/**
 * Brings the database to this program's schema: the queue, then what is missing of sql/*.sql, in order, together with the functions
 * of sql/functions, then the daily partitions. Several processes may call it at once; one works, the others wait and find nothing
 * to do. While a dump or report reads a table that a file changes, it waits. Anything else that Postgres throws is thrown; then
 * none of the files has left a trace.
 */
export async function migrate(url: string, log: Log, settings: QueueSettings): Promise<void> {
  const pool = openDb(url, { log, name: 'waybill migrate', max: 1, patienceMs: 0 })
  try {
    await requireServer(pool)
    if (await isBehind(pool)) await takeLock(pool, log, FILES_LOCK)
    const ofQueue = await untilFree(log, async () => {
      // Each try takes it anew: while this waits for a table, a process that has no files to apply, as one of the version before
      // that starts again, does not wait behind.
      await takeLock(pool, log, LOCK)
      try {
        // Asked first: `if not exists` needs the right to make schemas even where there is nothing to make.
        await pool`do $$ begin if to_regnamespace('waybill') is null then create schema waybill; end if; end $$`
        await pool`create table if not exists waybill.migrations (file text primary key, applied_at timestamptz not null default now())`
        await requireOwnQueue(pool)
        return await installQueue(url, log, settings)
      } finally {
        await pool`select pg_advisory_unlock(${LOCK})`
      }
    })
    const done = await untilFree(log, () =>
      pool.begin(async (sql) => {
        await sql`select pg_advisory_xact_lock(${LOCK})`
        const files = await missing(sql)
        if (files.length > 0) await stopVacuum(sql)
        // While this waits for a table, everybody else who wants it waits behind.
        await sql`set local lock_timeout = '1s'`
        for (const file of files) {
          await sql.text(await readFile(new URL(file, MIGRATIONS), 'utf8'))
          await sql`insert into waybill.migrations (file) values (${file})`
        }
        return { files, functions: await putFunctions(sql, ofQueue) }
      }),
    )
    if (done.files.length > 0 || done.functions !== null) log.info(done, 'migration.applied')
    await makePartitions(pool)
  } finally {
    await pool.end()
  }
}

/** A migration may take long, and a start that waits for another's would seem to hang. */
async function takeLock(sql: Db, log: Log, key: number): Promise<void> {
  const [lock] = await sql<[{ taken: boolean }]>`select pg_try_advisory_lock(${key}) as taken`
  if (lock.taken) return
  log.info('migration.waiting')
  await sql`select pg_advisory_lock(${key})`
}

/**
 * Keeps autovacuum from our tables until the transaction ends. It gives way only to who has waited for longer than
 * `deadlock_timeout` (a second), which the files may not; for this lock, nobody else has to wait meanwhile.
 */
async function stopVacuum(sql: Db): Promise<void> {
  await sql`set local lock_timeout = '5s'`
  await sql.text(`do $$ begin
    execute (select 'lock table ' || string_agg(oid::regclass::text, ', ' order by oid) || ' in share update exclusive mode'
      from pg_class where relnamespace = 'waybill'::regnamespace and relkind in ('r', 'p') and not relispartition);
  end $$`)
}

/** Runs `work` again and again as long as others keep it from a lock that it needs: a dump may take hours. */
const untilFree = <Result>(log: Log, work: () => Promise<Result>): Promise<Result> =>
  retried(work, {
    most: Infinity,
    pause(error, tries) {
      const pauseMs = Math.min(1000 * 2 ** (tries - 1), MAX_PAUSE_MS)
      log.warn({ err: error, again_in_ms: pauseMs }, 'migration.blocked')
      return sleep(pauseMs)
    },
  })

/** For a start that does not migrate: throws unless the database is at this program's schema, or at that of a later version. */
export async function requireMigrated(pool: Pool): Promise<void> {
  await requireServer(pool)
  if (!(await isBehind(pool)) && (await hasFunctions(pool, await readFunctions(pool)))) return
  throw new Error(
    'the database is not at this version yet: run `npm run migrate` (in the image, dist/migrate-alone.js), or start without --no-migrate',
  )
}

/**
 * On an older server everything else would start, and deliver without recording anything; behind a pooler that swallows what
 * connections ask for (db/open.ts), too, and then wait without an end, or fail at random.
 */
async function requireServer(sql: Db): Promise<void> {
  const [server] = await sql<[{ version: string; major: number; encoding: string; plans: string }]>`
    select current_setting('server_version') as version, current_setting('server_version_num')::int / 10000 as major,
      current_setting('server_encoding') as encoding, current_setting('plan_cache_mode') as plans`
  if (server.major < 15) throw new Error(`Postgres 15 or later is needed: this is ${server.version}`)
  if (server.encoding !== 'UTF8')
    throw new Error(`a database with encoding UTF8 is needed, to store any payload: this one has ${server.encoding}`)
  if (server.plans !== 'force_custom_plan')
    throw new Error('the settings of a connection do not reach Postgres: connect to it directly, not through a pooler')
}

/** A queue that another application has made here would be taken over, jobs and all. */
async function requireOwnQueue(sql: Db): Promise<void> {
  const [found] = await sql<[{ queue: boolean; queues: boolean }]>`
    select not exists (select from waybill.migrations) and to_regclass('pgboss.version') is not null as queue,
      to_regclass('pgboss.queue') is not null as queues`
  if (!found.queue) return
  // A first start that was interrupted has left no more than this.
  const own = [DELIVERIES, DEAD_LETTERS]
  if (found.queues) {
    const others = await sql`
      select from pgboss.queue where name <> all(${own}) and not starts_with(name, '__pgboss') union all (select from pgboss.job limit 1)`
    if (others.length === 0) return
  }
  throw new Error('the schema pgboss of this database belongs to another application: a database of its own is needed')
}

/** Whether files have not been applied. */
async function isBehind(sql: Db): Promise<boolean> {
  try {
    return (await missing(sql)).length > 0
  } catch (error) {
    if (isGone(error)) return true
    throw error
  }
}

/** The files that have not been applied, in order. */
async function missing(sql: Db): Promise<string[]> {
  const rows = await sql<{ file: string }[]>`select file from waybill.migrations`
  const applied = new Set(rows.map(({ file }) => file))
  return (await readdir(MIGRATIONS)).filter((file) => file.endsWith('.sql') && !applied.has(file)).sort()
}

/** The program's functions. `checksum` differs on another major version of Postgres, since some functions do. */
type Functions = { version: number[]; text: string; checksum: string }

async function readFunctions(sql: Db): Promise<Functions> {
  const files = (await readdir(FUNCTIONS)).filter((file) => file.endsWith('.sql')).sort()
  const texts = await Promise.all(files.map((file) => readFile(new URL(file, FUNCTIONS), 'utf8')))
  const text = texts.join('\n')
  const [server] = await sql<[{ major: number }]>`select current_setting('server_version_num')::int / 10000 as major`
  const checksum = createHash('sha256').update(`${server.major}\n${text}`).digest('hex')
  if (!/^\d+\.\d+\.\d+$/.test(VERSION)) throw new Error(`package.json: the version is not three numbers: ${VERSION}`)
  return { version: VERSION.split('.').map(Number), text, checksum }
}

/** Whether these functions are in the database, or those of a later version. */
async function hasFunctions(sql: Db, { version, checksum }: Functions): Promise<boolean> {
  const rows = await sql`
    select from waybill.functions where version > ${version} or (version, checksum) = (${version}, ${checksum})`
  return rows.length > 0
}

/**
 * Installs the program's functions, and those of `ofQueue` (queue-functions.ts), unless those in the database are the same, or of a later
 * version: during an upgrade, a process of the version before may start again, and must not put back its own. So a release whose
 * functions differ, or that has another pg-boss, needs a version of its own. Returns their version, or null if nothing was to be done.
 *
 * Where `create or replace` would be refused, because a function takes or returns something else than before, its file drops the
 * old one first: a process that still calls the old one waits for the new one, or fails until it is replaced itself.
 */
async function putFunctions(sql: Db, ofQueue: string): Promise<string | null> {
  const functions = await readFunctions(sql)
  if (await hasFunctions(sql, functions)) return null
  // They call one another, but are made in the order of their files' names.
  await sql`set local check_function_bodies = off`
  await sql.text(`${ofQueue};${functions.text}`)
  await sql`delete from waybill.functions`
  await sql`insert into waybill.functions values (${functions.version}, ${functions.checksum})`
  return functions.version.join('.')
}
