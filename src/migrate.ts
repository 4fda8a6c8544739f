import { createHash } from 'node:crypto'
import { readdir, readFile } from 'node:fs/promises'
import { isGone, openDb, type Pool } from './db.ts'
import { makePartitions } from './flow/partitions.ts'
import type { Log } from './log.ts'
import type { QueueSettings } from './queue.ts'
import { installQueue } from './queue-install.ts'
import { readVersion } from './version.ts'

const MIGRATIONS = new URL('../sql/', import.meta.url)
const FUNCTIONS = new URL('../sql/functions/', import.meta.url)
/** One constant for all versions: whoever migrates this database takes turns. */
const LOCK = 0x5741_5942

/**
 * Brings the database to this program's schema: the queue, then sql/*.sql in order, each in a transaction of its own and
 * once only, then the functions of sql/functions, then the daily partitions. Several processes may call it at once; one works,
 * the others wait and find nothing to do. Throws what Postgres throws; a failed file leaves no trace.
 */
export async function migrate(url: string, log: Log, settings: QueueSettings): Promise<void> {
  const pool = openDb(url, { log, name: 'migrate', max: 1, patienceMs: 0 })
  try {
    await pool`select pg_advisory_lock(${LOCK})`
    await pool`create schema if not exists waybill`
    await pool`create table if not exists waybill.migrations (file text primary key, applied_at timestamptz not null default now())`
    // The functions call what is made here.
    await installQueue(url, log, settings)
    for (const file of await missing(pool)) {
      const text = await readFile(new URL(file, MIGRATIONS), 'utf8')
      await pool.begin(async (sql) => {
        await sql.unsafe(text)
        await sql`insert into waybill.migrations (file) values (${file})`
      })
      log.info({ file }, 'migration.applied')
    }
    await putFunctions(pool, log)
    await makePartitions(pool)
  } finally {
    await pool.end({ timeout: 5 })
  }
}

/**
 * For a start that does not migrate. Throws unless the database is at this program's schema or at a later one, which is made so that
 * a program from before can go on with it.
 */
export async function requireMigrated(pool: Pool): Promise<void> {
  try {
    const [put] = await pool`select from waybill.functions where version >= ${await versionNumbers()}`
    if (put && (await missing(pool)).length === 0) return
  } catch (error) {
    if (!isGone(error)) throw error
  }
  throw new Error('the database is not at this version yet: run `npm run migrate`, or start without --no-migrate')
}

/** The files that have not been applied, in order. */
async function missing(pool: Pool): Promise<string[]> {
  const rows = await pool<{ file: string }[]>`select file from waybill.migrations`
  const applied = new Set(rows.map(({ file }) => file))
  return (await readdir(MIGRATIONS)).filter((file) => file.endsWith('.sql') && !applied.has(file)).sort()
}

/**
 * Puts the program's functions in, unless those that are there are the same, or of a later version: during an upgrade, a process of
 * the version before may start again, and must not put back its own. So a release whose functions differ needs a version of its
 * own. On another version of Postgres they are put in again, since some depend on it.
 */
async function putFunctions(pool: Pool, log: Log): Promise<void> {
  const version = await versionNumbers()
  const files = (await readdir(FUNCTIONS)).sort()
  const texts = await Promise.all(files.map((file) => readFile(new URL(file, FUNCTIONS), 'utf8')))
  const [server] = await pool<{ version: string }[]>`select current_setting('server_version_num') as version`
  const checksum = createHash('sha256')
    .update([server?.version, ...texts].join('\n'))
    .digest('hex')
  const [put] = await pool`
    select from waybill.functions where version > ${version} or (version, checksum) = (${version}, ${checksum})`
  if (put) return
  await pool.begin(async (sql) => {
    // They call one another, and come in the order of their names.
    await sql`set local check_function_bodies = off`
    await sql.unsafe(texts.join('\n'))
    await sql`delete from waybill.functions`
    await sql`insert into waybill.functions values (${version}, ${checksum})`
  })
  log.info({ version, checksum }, 'functions.put')
}

/** The program's version as numbers, which Postgres compares from left to right. */
const versionNumbers = async () => (await readVersion()).replace(/-.*/, '').split('.').map(Number)
