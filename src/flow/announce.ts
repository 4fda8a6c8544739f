import type { Db, Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { type Loop, startLoop } from './loop.ts'
import { createPortion } from './portion.ts'

const LOOK_MS = 500
const MAX_BATCH = 100

/**
 * Publishes what the service has to tell its tenants (`waybill.announce`) as events like any other, fewer at once if they take too
 * long, since everybody's announcements wait behind them.
 */
export function startAnnouncing(pool: Pool, log: Log): Loop {
  const portion = createPortion(MAX_BATCH)
  return startLoop({
    name: 'announce',
    idleMs: LOOK_MS,
    log,
    async run() {
      const asked = portion.most()
      const [row] = await portion.try(
        asked,
        () => pool<[{ told: number }]>`select waybill.publish_announcements(${asked})::int as told`,
      )
      return row.told === asked
    },
  })
}

/** What the service tells a tenant of one of its endpoints: all but the tenant's own id. */
type Told = { tenant_id: string; endpoint_id: string; [detail: string]: unknown }

/** Has these told, soon, to the tenants' other endpoints that ask for `type`. */
export async function announce(sql: Db, type: string, told: Told[]): Promise<void> {
  if (told.length === 0) return
  const payloads = told.map(({ tenant_id, ...payload }) => JSON.stringify(payload))
  await sql`
    select waybill.announce(tenant_id, endpoint_id, ${type}, payload)
    from unnest(${told.map((one) => one.tenant_id)}::text[], ${told.map((one) => one.endpoint_id)}::uuid[], ${payloads}::text[])
      as t (tenant_id, endpoint_id, payload)`
}
