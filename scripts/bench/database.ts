import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { freePort, loadPackage, serverOptions } from '../../src/embedded.ts'
import { connect } from '../../test/support/database.ts'
import { keepDays } from '../../test/support/days.ts'
import { makeDirectory, removeDirectory } from '../../test/support/directory.ts'

const SETTINGS = ['shared_preload_libraries=pg_stat_statements']
/** RETENTION_DAYS. */
const KEPT_DAYS = 30

export type Statement = { query: string; calls: number; mean_ms: number; total_ms: number; rows: number }
export type Bytes = { wal: number; tables: number; queue: number }

export type BenchDatabase = {
  directory: string
  /** The service's database. */
  url: string
  /** The bench's own, so that what it does there does not count as the service's statements. */
  benchUrl: string
  port: number
  password: string
  pid: number
  version: string
  bytes: () => Promise<Bytes>
  /** Deliveries that wait, in the queue or held, or are under way; not those of inactive endpoints. */
  queued: () => Promise<number>
  /**
   * Has the server do now what it would do by itself once in a while, and nothing of it until `resumeUpkeep`: autovacuum, which comes
   * every minute, and checkpoints. After one, each page that is changed for the first time is written to the WAL whole. With data
   * checksums that is so for a mere reader, too, if it is the first to see that a row is dead; so vacuum removes those before.
   */
  pauseUpkeep: () => Promise<void>
  resumeUpkeep: () => Promise<void>
  /** Partitions of as many past days as are kept by default, once the service has made its tables: what is slow with them must not go unnoticed. */
  keepDays: () => Promise<unknown>
  /** Starts counting statements anew. */
  resetStatements: () => Promise<void>
  /** What clients have sent to the service's database since; null when the extension is not there. */
  statements: () => Promise<Statement[] | null>
  stop: () => Promise<void>
}

/**
 * A fresh cluster in a temporary folder with the settings of src/embedded.ts, so fsync and synchronous_commit are on;
 * only pg_stat_statements is added. Both are read back from the server: the figures would mean nothing without.
 */
export async function startDatabase(): Promise<BenchDatabase> {
  // Its hook at the exit stays: should the bench crash, the server ends as well.
  const EmbeddedPostgres = await loadPackage(['SIGINT', 'SIGTERM', 'SIGHUP'])
  const directory = await makeDirectory()
  const port = await freePort()
  const password = 'bench'
  const databaseDir = join(directory, 'postgres')
  const server = new EmbeddedPostgres(serverOptions({ databaseDir, port, password, settings: SETTINGS }))
  await server.initialise()
  await server.start()
  await server.createDatabase('waybill')
  await server.createDatabase('bench')
  const url = (name: string, user = 'waybill') => `postgres://${user}:${password}@127.0.0.1:${port}/${name}`
  const bench = connect(url('bench'))
  // A role of the bench's own, so that its looks into the service's database are not counted as the service's.
  await bench.text(`create role observer superuser login password '${password}'`)
  const waybill = connect(url('waybill', 'observer'))
  const counting = await bench`create extension pg_stat_statements`.then(
    () => true,
    () => false,
  )
  const [settings] = await bench<{ fsync: string; commit: string; version: string }[]>`
    select current_setting('fsync') as fsync, current_setting('synchronous_commit') as commit, current_setting('server_version') as version`
  if (settings?.fsync !== 'on' || settings.commit !== 'on') throw new Error('fsync and synchronous_commit must be on')

  return {
    directory,
    url: url('waybill'),
    benchUrl: url('bench'),
    port,
    password,
    pid: Number((await readFile(join(databaseDir, 'postmaster.pid'), 'utf8')).split('\n')[0]),
    version: settings.version,
    async bytes() {
      const [row] = await waybill<[Bytes]>`
        select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 as wal,
          coalesce(sum(pg_total_relation_size(c.oid)) filter (where n.nspname = 'waybill'), 0)::float8 as tables,
          coalesce(sum(pg_total_relation_size(c.oid)) filter (where n.nspname = 'pgboss'), 0)::float8 as queue
        from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.relkind = 'r'`
      return row
    },
    async queued() {
      const [row] = await waybill<[{ n: number }]>`
        select ((select coalesce(sum(coalesce(jsonb_array_length(data -> 'ids'), 1)), 0) from pgboss.job where name = 'deliveries')
          + (select coalesce(sum(held), 0) from waybill.endpoint_stats s join waybill.endpoints using (tenant_id, endpoint_id)
             where is_active))::int as n`
      return row.n
    },
    async pauseUpkeep() {
      await waybill`alter system set autovacuum = off`
      await waybill`select pg_reload_conf()`
      await waybill`vacuum (analyze)`
      await waybill`checkpoint`
    },
    async resumeUpkeep() {
      await waybill`alter system reset autovacuum`
      await waybill`select pg_reload_conf()`
    },
    keepDays: () => keepDays(waybill, { oldest: KEPT_DAYS }),
    async resetStatements() {
      if (counting) await bench`select pg_stat_statements_reset()`
    },
    async statements() {
      if (!counting) return null
      return await bench<Statement[]>`
        select query, calls::float8, mean_exec_time as mean_ms, total_exec_time as total_ms, rows::float8
        from pg_stat_statements
        where dbid = (select oid from pg_database where datname = 'waybill') and userid = 'waybill'::regrole
        order by total_exec_time desc`
    },
    async stop() {
      await Promise.all([bench.end(1000), waybill.end(1000)])
      await server.stop()
      await removeDirectory(directory)
    },
  }
}
