import type { Pool } from '../db.ts'
import type { Log } from '../log.ts'
import { type Loop, startLoop } from './loop.ts'

const LOOK_MS = 500
const MAX_BATCH = 100

/** Publishes what the service has to tell its tenants (`waybill.announce`), as events like any other. */
export function startAnnouncing(pool: Pool, log: Log): Loop {
  return startLoop({
    name: 'announce',
    idleMs: LOOK_MS,
    log,
    async run() {
      const [row] = await pool<{ told: number }[]>`select waybill.publish_announcements(${MAX_BATCH})::int as told`
      return row?.told === MAX_BATCH
    },
  })
}
