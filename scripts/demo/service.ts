import { randomBytes } from 'node:crypto'
import { runProgram } from '../../test/support/service.ts'
import type { Observations } from './observations.ts'

const START_SECONDS = 120

export type Service = {
  url: string
  adminKey: string
  ready: Promise<unknown>
  /** Ends it and its Postgres; resolves when it is gone. */
  stop: () => Promise<unknown>
  /** The same at once, for when nothing can be waited for. */
  kill: () => void
}

/** The real program on its embedded Postgres, with short retries; each line that it logs becomes an observation. */
export function startService(port: number, observations: Observations): Service {
  const adminKey = `wb_admin_${randomBytes(24).toString('base64url')}`
  const program = runProgram(
    { after: () => {} },
    {
      // Ctrl-C reaches the demo alone, which then ends the service in order.
      detached: true,
      onLog: observations.add,
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
        SHUTDOWN_GRACE_SECONDS: '3',
      },
    },
  )
  void program.exited.then(({ code, signal }) => {
    const how = signal ? `was ended by ${signal}` : `ended with code ${code}`
    const faults = program.logs.flatMap(({ msg, err }) => (err ? `${msg}: ${(err as Error).message}` : []))
    observations.fail(new Error([`the service ${how}`, ...faults.slice(-5), program.stderr()].join('\n  ').trim()))
  })
  return {
    url: `http://localhost:${port}`,
    adminKey,
    ready: observations.until('the service’s start', START_SECONDS, (seen) => seen.msg === 'service.ready'),
    stop: program.stop,
    /** The whole group, so that Postgres does not outlive the service. */
    kill() {
      try {
        if (program.pid) process.kill(-program.pid, 'SIGKILL')
      } catch {
        // All of it is gone already.
      }
    },
  }
}
