import { type ChildProcess, spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { createInterface } from 'node:readline'
import { setTimeout } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { cleanUp, type Scope } from './cleanup.ts'
import { createDatabase } from './database.ts'
import { checkAnswer } from './validate.ts'
import { waitFor } from './wait.ts'

const MAIN = fileURLToPath(new URL('../../src/main.ts', import.meta.url))
const ROOT = fileURLToPath(new URL('../..', import.meta.url))
const START_MS = 60_000
const LAST_WORDS_MS = 200
/** Lines of output that a test shows when it has failed. */
const MAX_SHOWN = 50

export const ADMIN_KEY = 'test-admin-key-0123456789'
export const ENCRYPTION_KEY = Buffer.alloc(32, 7).toString('base64')

/** A line of the service's log, parsed; `text` is the line as it was written. */
export type LogLine = { text: string; level: string; msg: string; [field: string]: unknown }
export type Exit = { code: number | null; signal: NodeJS.Signals | null }

export type Program = {
  pid: number
  /** Everything on stdout that is a log line, so far. */
  logs: LogLine[]
  /** What was written so far, for messages to people. */
  stdout: () => string
  stderr: () => string
  /** Resolves when the process has ended and its output is complete. */
  exited: Promise<Exit>
  /** Resolves with the first log line `msg`, or rejects when the process ends without it. */
  logged: (msg: string, timeoutMs?: number) => Promise<LogLine>
  signal: (signal: NodeJS.Signals) => void
  /** Signals (SIGTERM) and waits for the end. */
  stop: (signal?: NodeJS.Signals) => Promise<Exit>
  /** kill -9, and waits for the end. */
  kill: () => Promise<Exit>
}

/** Where Node keeps what it has compiled; the global setup sets it for the whole run. */
export const COMPILED = 'NODE_COMPILE_CACHE'

/**
 * `main`: another version's, for instance; `flags`: Node's own. `detached`: in a process group of its own, which signals of the terminal
 * do not reach. `onLog` gets each log line when it comes.
 */
type ProgramOptions = {
  args?: string[]
  env?: NodeJS.ProcessEnv
  cwd?: string
  main?: string
  flags?: string[]
  detached?: boolean
  onLog?: (line: LogLine) => void
}

/**
 * Runs the real program with nothing of our own environment but PATH and COMPILED. It is killed after the test, if it still
 * runs. A test that has failed shows what it complained of.
 */
export function runProgram(
  scope: Scope,
  { args = [], env = {}, cwd = ROOT, main = MAIN, flags = [], detached = false, onLog }: ProgramOptions = {},
): Program {
  const child: ChildProcess = spawn(process.execPath, [...flags, main, ...args], {
    cwd,
    detached,
    env: { PATH: process.env.PATH, [COMPILED]: process.env[COMPILED], ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const logs: LogLine[] = []
  const stdout: string[] = []
  const stderr: string[] = []
  let ended = false
  createInterface({ input: child.stdout! }).on('line', (text) => {
    stdout.push(text)
    // Whoever is killed may leave half a line.
    if (!/^\{.*\}$/.test(text)) return
    const line: LogLine = { ...JSON.parse(text), text }
    logs.push(line)
    onLog?.(line)
  })
  createInterface({ input: child.stderr! }).on('line', (text) => stderr.push(text))
  const exited = new Promise<Exit>((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (code, signal) => {
      ended = true
      resolve({ code, signal })
    })
  })
  const output = () => [...stderr, ...stdout.slice(-50)].join('\n')

  async function logged(msg: string, timeoutMs = START_MS): Promise<LogLine> {
    const find = () => logs.find((line) => line.msg === msg)
    await waitFor(() => ended || find(), { timeoutMs, intervalMs: 10, what: `the log line ${msg}` }).catch((error) => {
      throw new Error(`${(error as Error).message}; the output was:\n${output()}`)
    })
    const line = find()
    if (line === undefined) throw new Error(`the program ended without ${msg}:\n${output()}`)
    return line
  }

  async function stop(signal: NodeJS.Signals = 'SIGTERM'): Promise<Exit> {
    if (!ended) child.kill(signal)
    return await exited
  }
  const kill = () => stop('SIGKILL')
  cleanUp(scope, async () => {
    // What it complains of is written a moment later.
    if (scope.passed === false) await setTimeout(LAST_WORDS_MS)
    await kill()
    if (scope.passed !== false) return
    const complaints = logs.filter(({ level }) => level !== 'debug' && level !== 'info').map(({ text }) => text)
    scope.diagnostic?.(['The program complained of:', ...stderr, ...complaints].slice(0, MAX_SHOWN).join('\n'))
  })
  return {
    pid: child.pid ?? 0,
    logs,
    stdout: () => stdout.join('\n'),
    stderr: () => stderr.join('\n'),
    exited,
    logged,
    signal: (signal) => void child.kill(signal),
    stop,
    kill,
  }
}

// biome-ignore lint/suspicious/noExplicitAny: tests read many bodies; a wrong field fails the assertion that reads it
export type Reply = { status: number; headers: Headers; text: string; body: any }
export type CallOptions = { key?: string; body?: unknown; headers?: Record<string, string> }
export type Call = (method: string, path: string, options?: CallOptions) => Promise<Reply>

/** Calls `url`, and holds every answer against the API's description. A string or bytes as `body` go out as they are, anything else as JSON. */
export const caller =
  (url: string, defaultKey?: string): Call =>
  async (method, path, { key = defaultKey, body, headers = {} } = {}) => {
    const raw = typeof body === 'string' || body instanceof Uint8Array
    const response = await fetch(url + path, {
      method,
      headers: {
        ...(key !== undefined && { authorization: `Bearer ${key}` }),
        ...(body !== undefined && { 'content-type': 'application/json' }),
        ...headers,
      },
      ...(body !== undefined && { body: raw ? (body as string) : JSON.stringify(body) }),
    })
    const text = await response.text()
    checkAnswer(method, path, { status: response.status, headers: response.headers, text })
    const isJson = text !== '' && response.headers.get('content-type')?.includes('json')
    return { status: response.status, headers: response.headers, text, body: isJson ? JSON.parse(text) : undefined }
  }

export type Service = Program & { url: string; port: number; call: Call }

type ServiceOptions = {
  databaseUrl: string
  mode?: 'all' | 'api' | 'worker'
  env?: Record<string, string>
  args?: string[]
  main?: string
  flags?: string[]
}

/** The environment in which tests run the service: a free port, known keys, receivers on this machine allowed. */
export const testEnvironment = (databaseUrl: string): Record<string, string> => ({
  DATABASE_URL: databaseUrl,
  ADMIN_API_KEY: ADMIN_KEY,
  ENCRYPTION_KEY,
  HOST: '127.0.0.1',
  PORT: '0',
  EGRESS_ALLOW: '127.0.0.0/8,::1/128',
  // On a slow machine the test's own receiver answers late; a timeout would be a second request.
  ATTEMPT_TIMEOUT_SECONDS: '60',
})

/** Starts the service as a process of its own and resolves when it is ready; rejects, with its output, when it is not. */
export async function startService(
  scope: Scope,
  { databaseUrl, mode = 'all', env = {}, args = [], ...how }: ServiceOptions,
): Promise<Service> {
  const program = runProgram(scope, {
    args: ['--mode', mode, ...args],
    env: { ...testEnvironment(databaseUrl), ...env },
    ...how,
  })
  const { port } = await program.logged('service.ready')
  const url = `http://127.0.0.1:${port}`
  return { ...program, url, port: Number(port), call: caller(url) }
}

export type Endpoint = { endpoint_id: string; signing_secret: string }
type EndpointFields = { subscribed_events?: string[]; description?: string; max_per_second?: number; ordered?: boolean }

export type Tenant = {
  tenantId: string
  key: string
  /** Calls the API as this tenant. */
  call: Call
  /** Registers an endpoint; by default for every event. */
  createEndpoint: (url: string, fields?: EndpointFields) => Promise<Endpoint>
  /** Publishes; a string as `payload` goes in as it is. Rejects unless the answer is 202. */
  publish: (
    eventType?: string,
    payload?: unknown,
    key?: string,
  ) => Promise<{ event_id: string; delivery_ids: string[] }>
}

/** A tenant with an API key, made through the admin routes. */
export async function createTenant(
  service: { url: string },
  overrides: { tenant_id?: string; tenant_slug?: string; limits?: Record<string, number> } = {},
): Promise<Tenant> {
  const admin = caller(service.url, ADMIN_KEY)
  const tenantId = overrides.tenant_id ?? `t-${randomBytes(6).toString('hex')}`
  const body = { tenant_id: tenantId, tenant_slug: tenantId.toLowerCase(), ...overrides }
  expectStatus(await admin('POST', '/v1/admin/tenants', { body }), 200)
  const made = await admin('POST', '/v1/admin/api-keys', { body: { tenant_id: tenantId, name: 'test' } })
  const key: string = expectStatus(made, 201).body.api_key
  const call = caller(service.url, key)
  return {
    tenantId,
    key,
    call,
    async createEndpoint(url, fields = {}) {
      const answer = await call('POST', '/v1/endpoints', { body: { url, subscribed_events: ['*'], ...fields } })
      return expectStatus(answer, 201).body
    },
    async publish(eventType = 'thing.happened', payload = { n: 1 }, idempotencyKey) {
      const text = typeof payload === 'string' ? payload : JSON.stringify(payload)
      const answer = await call('POST', '/v1/events', {
        body: `{"event_type":${JSON.stringify(eventType)},"payload":${text}}`,
        ...(idempotencyKey !== undefined && { headers: { 'idempotency-key': idempotencyKey } }),
      })
      return expectStatus(answer, 202).body
    },
  }
}

/** A database of the test's own, the service on it, and a tenant. */
export async function startTenant(scope: Scope, options: Omit<ServiceOptions, 'databaseUrl'> = {}) {
  const { url: databaseUrl, ...database } = await createDatabase(scope)
  const service = await startService(scope, { databaseUrl, ...options })
  return { ...database, databaseUrl, service, tenant: await createTenant(service) }
}

function expectStatus(reply: Reply, status: number): Reply {
  if (reply.status !== status) throw new Error(`expected ${status}, got ${reply.status}: ${reply.text}`)
  return reply
}
