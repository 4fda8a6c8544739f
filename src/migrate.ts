import { readdir, readFile } from 'node:fs/promises'
import { openDb } from './db.ts'
import { makePartitions } from './flow/partitions.ts'
import type { Log } from './log.ts'
import type { QueueSettings } from './queue.ts'
import { installQueue } from './queue-install.ts'

const DIRECTORY = new URL('../sql/', import.meta.url)
/** One constant for all versions: whoever migrates this database takes turns. */
const LOCK = 0x5741_5942

/**
 * Brings the database to this program's schema: the queue, then sql/*.sql in order, each in a transaction of its own and
 * once only, then the daily partitions. Several processes may call it at once; one works, the others wait and find
 * nothing to do. Throws what Postgres throws; a failed file leaves no trace.
 */
export async function migrate(url: string, log: Log, settings: QueueSettings): Promise<void> {
  const pool = openDb(url, { log, name: 'migrate', max: 1, patienceMs: 0 })
  try {
    await pool`select pg_advisory_lock(${LOCK})`
    await pool`create schema if not exists waybill`
    await pool`create table if not exists waybill.migrations (file text primary key, applied_at timestamptz not null default now())`
    // The functions below queue by those that are made here.
    await installQueue(url, log, settings)
    const applied = new Set(
      (await pool<{ file: string }[]>`select file from waybill.migrations`).map((row) => row.file),
    )
    const files = (await readdir(DIRECTORY)).filter((file) => /^\d{4}_.*\.sql$/.test(file)).sort()
    for (const file of files.filter((name) => !applied.has(name))) {
      const text = await readFile(new URL(file, DIRECTORY), 'utf8')
      await pool.begin(async (sql) => {
        await sql.unsafe(text)
        await sql`insert into waybill.migrations (file) values (${file})`
      })
      log.info({ file }, 'migration.applied')
    }
    await makePartitions(pool)
  } finally {
    await pool.end({ timeout: 5 })
  }
}
