import type { Pool } from '../db/open.ts'
import { retried } from '../db/retried.ts'
import type { Fragment } from '../db/statement.ts'

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

  async function runAfter(
    before: Promise<unknown> | undefined,
    key: string,
    tenantId: string,
    deliveryId: string,
  ): Run {
    await before?.catch(() => {})
    next.delete(key)
    // The dead-letter worker locks the job before the delivery, so the two can deadlock.
    const [row] = await retried(() => pool`select ${columns} from waybill.replay(${tenantId}, ${deliveryId})`)
    return row as Row | undefined
  }

  return async (tenantId: string, deliveryId: string): Run => {
    const key = `${tenantId} ${deliveryId}`
    const shared = next.get(key)
    if (shared !== undefined) return await shared
    const mine = runAfter(last.get(key), key, tenantId, deliveryId)
    next.set(key, mine)
    last.set(key, mine)
    try {
      return await mine
    } finally {
      if (last.get(key) === mine) last.delete(key)
    }
  }
}
