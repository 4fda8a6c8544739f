import { spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { createServer } from 'node:net'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import type { Observations } from './observations.ts'

const ROOT = fileURLToPath(new URL('../../', import.meta.url))
const START_SECONDS = 120
const GRACE_SECONDS = 3
/** The service's own last resort is 10 s beyond its grace. */
const STOP_MS = (GRACE_SECONDS + 15) * 1000

export type Service = {
  url: string
  adminKey: string
  /** Ends it and its Postgres; resolves when it is gone. */
  stop: () => Promise<void>
  /** The same at once, for when nothing can be waited for. */
  kill: () => void
}

/** The real program on its embedded Postgres, with short retries; each line that it logs becomes an observation. */
export function startService(port: number, observations: Observations): Service {
  const adminKey = `wb_admin_${randomBytes(24).toString('base64url')}`
  const child = spawn(process.execPath, ['src/main.ts', '--mode', 'all'], {
    cwd: ROOT,
    // A process group of its own: Ctrl-C reaches the demo alone, which then ends the service in order.
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
    env: {
      ...process.env,
      DATABASE_URL: '',
      ENCRYPTION_KEY: '',
      BASE_URL: '',
      ADMIN_API_KEY: adminKey,
      HOST: process.env.HOST || '127.0.0.1',
      PORT: String(port),
      LOG_LEVEL: 'info',
      // The demo's receiver listens on loopback, which is refused as a destination otherwise.
      EGRESS_ALLOW: '127.0.0.0/8',
      RETRY_LIMIT: '3',
      RETRY_DELAY_SECONDS: '1',
      RETRY_DELAY_MAX_SECONDS: '2',
      SHUTDOWN_GRACE_SECONDS: String(GRACE_SECONDS),
    },
  })
  const lastWords: string[] = []
  const keep = (line: string) => {
    lastWords.push(line)
    if (lastWords.length > 5) lastWords.shift()
  }
  createInterface({ input: child.stdout }).on('line', (line) => {
    const parsed = parseLine(line)
    if (parsed === null) keep(line)
    else if (parsed.err) keep(`${parsed.msg}: ${parsed.err.message}`)
    if (parsed) observations.add(parsed)
  })
  createInterface({ input: child.stderr }).on('line', keep)

  const exited = new Promise<void>((resolve) => {
    child.once('error', (error) => {
      observations.fail(error)
      resolve()
    })
    child.once('close', (code, signal) => {
      const how = signal ? `was ended by ${signal}` : `ended with code ${code}`
      observations.fail(new Error([`the service ${how}`, ...lastWords].join('\n  ')))
      resolve()
    })
  })
  /** The whole group, so that Postgres does not outlive the service. */
  const kill = () => {
    try {
      if (child.pid) process.kill(-child.pid, 'SIGKILL')
    } catch {
      // All of it is gone already.
    }
  }
  return {
    url: `http://localhost:${port}`,
    adminKey,
    kill,
    async stop() {
      const force = setTimeout(kill, STOP_MS)
      child.kill('SIGTERM')
      await exited
      clearTimeout(force)
    },
  }
}

export const serviceReady = (observations: Observations) =>
  observations.until('the service’s start', START_SECONDS, (seen) => seen.msg === 'service.ready')

function parseLine(line: string): { msg: string; err?: { message: string } } | null {
  try {
    const parsed = JSON.parse(line)
    return typeof parsed.msg === 'string' ? parsed : null
  } catch {
    return null
  }
}

/** The first port from `first` on that nobody listens on. */
export async function freePort(first: number): Promise<number> {
  for (let port = first; port < first + 100; port++) {
    const probe = createServer()
    const free = await new Promise<boolean>((resolve) => {
      probe.once('error', () => resolve(false))
      probe.listen(port, () => resolve(true))
    })
    if (free) await new Promise((closed) => probe.close(closed))
    if (free) return port
  }
  throw new Error(`no free port between ${first} and ${first + 99}`)
}
