import { type Db, isRetryable, type Pool } from '../db.ts'
import { DELIVERIES } from '../queue.ts'

type State = { endpoint_id: string; status: string; is_active: boolean; attempt_count: number }

/**
 * Makes a delivery due now. A finished one becomes pending again with a full set of retries, and its attempt numbers go
 * on; one that waits for a retry loses the wait; one that is being attempted, or whose endpoint is inactive, stays as it
 * is. The delivery's row is locked, so any number of replays at once queue it once. False when the tenant has no such
 * delivery.
 */
export async function replayDelivery(pool: Pool, tenantId: string, deliveryId: string): Promise<boolean> {
  for (;;) {
    try {
      return await pool.begin((sql) => replay(sql, tenantId, deliveryId))
    } catch (error) {
      // The dead-letter worker locks the job before the delivery: the two can meet crosswise.
      if (!isRetryable(error)) throw error
    }
  }
}

async function replay(sql: Db, tenantId: string, deliveryId: string): Promise<boolean> {
  const [delivery] = await sql<State[]>`
    select d.endpoint_id, d.status, d.attempt_count, p.is_active
    from waybill.deliveries d join waybill.endpoints p using (tenant_id, endpoint_id)
    where d.tenant_id = ${tenantId} and d.delivery_id = ${deliveryId} for update of d for share of p`
  if (delivery === undefined) return false
  const finished = delivery.status === 'delivered' || delivery.status === 'dead_lettered'
  if (finished) {
    await sql`
      update waybill.deliveries set status = 'pending', held = ${!delivery.is_active}, dead_letter_reason = null, completed_at = null,
        next_attempt_at = ${delivery.is_active ? sql`now()` : null}, updated_at = now()
      where tenant_id = ${tenantId} and delivery_id = ${deliveryId}`
    await sql`
      select waybill.count_deliveries(${[tenantId, tenantId]}, ${[delivery.endpoint_id, delivery.endpoint_id]}::uuid[],
        ${[delivery.status, 'pending']}::waybill.delivery_status[], ${[-1, 1]})`
  }
  if (!delivery.is_active) return true
  const hurried = await sql`
    update pgboss.job set start_after = now() where name = ${DELIVERIES} and id = ${deliveryId} and state < 'active' and start_after > now()
    returning id`
  if (hurried.length > 0) {
    await sql`update waybill.deliveries set next_attempt_at = now(), updated_at = now() where tenant_id = ${tenantId} and delivery_id = ${deliveryId}`
    await sql`select pg_notify('waybill_due', '')`
  }
  // A job that failed for good would swallow the new one of the same id.
  await sql`delete from pgboss.job where name = ${DELIVERIES} and id = ${deliveryId} and state > 'active'`
  // To queue it again would wait for whoever settles the job, who waits for this delivery.
  const queued = await sql`select from pgboss.job where name = ${DELIVERIES} and id = ${deliveryId}`
  if (queued.length > 0) return true
  const job = { id: deliveryId, data: { tenant_id: tenantId, earlier_attempts: delivery.attempt_count } }
  await sql`select waybill.enqueue(${JSON.stringify([job])}), pg_notify('waybill_due', '')`
  return true
}
