import { type ChildProcess, spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { openSync, writeFileSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { AUTHORITY } from '../../test/support/certificates.ts'
import { asShipped, THIS_CHECKOUT } from '../as-shipped.ts'
import type { BenchDatabase } from './database.ts'
import { cpuSeconds, peakMemory, residentMemory } from './usage.ts'

const START_MS = 60_000

export type Role = 'api' | 'worker'
export type Services = ReturnType<typeof createServices>

export type Running = { role: Role; child: ChildProcess; pid: number; port: number }

/**
 * The real program in processes of their own, with everything on: authentication, idempotency keys, rate windows and
 * quotas are counted (against limits too high to be met), statistics are kept, every step is logged as in production
 * (info; to a file, as a container's log would be).
 */
export function createServices(database: BenchDatabase, { profileTo }: { profileTo: string | undefined }) {
  const authority = join(database.directory, 'authority.pem')
  writeFileSync(authority, AUTHORITY)
  const adminKey = randomBytes(24).toString('base64url')
  const env = {
    ...process.env,
    DATABASE_URL: database.url,
    ADMIN_API_KEY: adminKey,
    ENCRYPTION_KEY: randomBytes(32).toString('base64'),
    HOST: '127.0.0.1',
    PORT: '0',
    LOG_LEVEL: 'info',
    EGRESS_ALLOW: '127.0.0.0/8',
    NODE_EXTRA_CA_CERTS: authority,
    RATE_LIMIT_EVENTS_WRITE: '1000000000',
    RATE_LIMIT_ENDPOINTS_WRITE: '1000000000',
    MONTHLY_EVENT_LIMIT: '1000000000000',
    MONTHLY_ATTEMPT_LIMIT: '1000000000000',
  }
  const running: Running[] = []
  /** Of processes that have ended. */
  const spent = { api: { cpu: 0, peak: 0 }, worker: { cpu: 0, peak: 0 } }
  let started = 0
  const of = (role: Role) => running.filter((one) => one.role === role)

  async function start(role: Role, checkout: string): Promise<Running> {
    const shipped = asShipped(checkout)
    const name = `${role}-${++started}`
    const logFile = join(database.directory, `${name}.log`)
    const profile = profileTo ? ['--cpu-prof', `--cpu-prof-dir=${profileTo}`, `--cpu-prof-name=${name}.cpuprofile`] : []
    const child = spawn(process.execPath, [...profile, ...shipped.flags, shipped.main, '--mode', role], {
      cwd: checkout,
      env: { ...env, ...shipped.env },
      stdio: ['ignore', openSync(logFile, 'w'), 'inherit'],
    })
    const port = await readyPort(child, name, logFile)
    const one = { role, child, pid: child.pid ?? 0, port }
    running.push(one)
    return one
  }

  async function stop(role: Role): Promise<void> {
    for (const one of of(role)) {
      running.splice(running.indexOf(one), 1)
      spent[role].cpu += cpuSeconds(one.pid) ?? 0
      spent[role].peak = Math.max(spent[role].peak, peakMemory(one.pid) ?? 0)
      const exited = new Promise((resolve) => one.child.once('exit', resolve))
      one.child.kill('SIGTERM')
      await exited
    }
  }

  const signal = (role: Role, name: NodeJS.Signals) => {
    for (const { child } of of(role)) child.kill(name)
  }
  return {
    adminKey,
    /** Starts `count` of them, of this checkout of the program or of another. */
    start: async (role: Role, count: number, checkout = THIS_CHECKOUT) => {
      const started: Running[] = []
      while (started.length < count) started.push(await start(role, checkout))
      return started
    },
    stop,
    /** Stops its processes where they are, until they are to go on. */
    halt: (role: Role) => signal(role, 'SIGSTOP'),
    goOn: (role: Role) => signal(role, 'SIGCONT'),
    ports: () => of('api').map(({ port }) => port),
    cpu: (role: Role) => of(role).reduce((sum, { pid }) => sum + (cpuSeconds(pid) ?? 0), spent[role].cpu),
    /** The most memory that one process of the role ever held, in MiB. */
    peak: (role: Role) => of(role).reduce((most, { pid }) => Math.max(most, peakMemory(pid) ?? 0), spent[role].peak),
    /** The memory that the largest process of the role holds now, in MiB. */
    memory: (role: Role) => Math.max(...of(role).map(({ pid }) => residentMemory(pid) ?? 0)),
    kill: () => {
      for (const { child } of running) child.kill('SIGKILL')
    },
  }
}

/** The port in the line that a process logs when it is ready. */
async function readyPort(child: ChildProcess, name: string, logFile: string): Promise<number> {
  for (const deadline = Date.now() + START_MS; Date.now() < deadline; ) {
    const log = await readFile(logFile, 'utf8')
    const ready = log.split('\n').find((line) => line.includes('"service.ready"'))
    if (ready) return JSON.parse(ready).port
    if (child.exitCode !== null) throw new Error(`${name} did not start:\n${log}`)
    await sleep(20)
  }
  throw new Error(`${name} was not ready within ${START_MS / 1000} s`)
}
