import type { Pool } from '../db/open.ts'
import { retried } from '../db/retried.ts'
import type { Fragment } from '../db/statement.ts'
import { DELIVERIES } from '../queue.ts'

/**
 * The returned function makes a delivery due now (waybill.replay), and resolves with its row as it then is, or undefined if the
 * tenant has no such delivery; `columns` are those of the row. Replays of a delivery that come while one runs share the next run:
 * otherwise all of them would wait for its lock, each with a connection.
 */
export function createReplay<Row>(pool: Pool, columns: Fragment) {
  type Run = Promise<Row | undefined>
  const last = new Map<string, Run>()
  /** Runs that have not begun. */
  const next = new Map<string, Run>()

  return async (tenantId: string, deliveryId: string): Run => {
    const key = `${tenantId} ${deliveryId}`
    const shared = next.get(key)
    if (shared !== undefined) return await shared
    const before = last.get(key)
    const run = async () => {
      await before?.catch(() => {})
      next.delete(key)
      // The dead-letter worker locks the job before the delivery, so the two can deadlock.
      const [row] = await retried(() => pool<Row[]>`select ${columns} from waybill.replay(${tenantId}, ${deliveryId})`)
      return row
    }
    const mine = run()
    next.set(key, mine)
    last.set(key, mine)
    try {
      return await mine
    } finally {
      if (last.get(key) === mine) last.delete(key)
    }
  }
}

/**
 * Carries out the replays that were asked for during attempts (waybill.replay_requests), of all deliveries that are not being attempted,
 * at most a thousand: the attempt has succeeded or was not made, or whoever recorded its failure was interrupted before `catchUp`.
 */
export async function replayLeftOver(pool: Pool): Promise<void> {
  const requests = await pool<{ tenant_id: string; delivery_id: string }[]>`
    select r.tenant_id, r.delivery_id from waybill.replay_requests r left join waybill.deliveries d using (tenant_id, delivery_id)
    where not exists (
      select from pgboss.job j where j.name = ${DELIVERIES} and j.id in (r.delivery_id, d.bundle) and j.state = 'active')
    limit 1000`
  for (const { tenant_id, delivery_id } of requests) await replayAsRequested(pool, tenant_id, delivery_id)
}

/** Carries out the replay of a delivery that was asked for during an attempt, if it is still to be (waybill.replay_as_requested). */
export const replayAsRequested = (pool: Pool, tenantId: string, deliveryId: string) =>
  retried(() => pool`select waybill.replay_as_requested(${tenantId}, ${deliveryId})`)
