import type { PgBoss } from 'pg-boss'
import type { Pool } from '../db.ts'
import { bossDb, DELIVERIES, settledIds } from '../queue.ts'
import { type ClaimedJob, refundAttempts } from './claim.ts'

/**
 * Takes claimed deliveries out of the queue: their rows wait, `held`, until `release_held` queues them again with the
 * retries that they have left. Held wrongly, because the endpoint recovered meanwhile, they are released at the next look.
 * `counted`: they have places in the month, which they give back.
 */
export async function holdDeliveries(
  pool: Pool,
  boss: PgBoss,
  jobs: ClaimedJob[],
  { counted = false } = {},
): Promise<void> {
  await pool.begin(async (sql) => {
    const answer = await boss.deleteJob(
      DELIVERIES,
      jobs.map(({ job }) => job),
      { db: bossDb(sql) },
    )
    const settled = new Set(settledIds(answer))
    const held = jobs.filter(({ job }) => settled.has(job.id))
    if (held.length === 0) return
    const tenants = held.map((job) => job.tenantId)
    const ids = held.map((job) => job.deliveryId).sort()
    await sql`
      update waybill.deliveries d set held = true, spent_retries = h.spent, next_attempt_at = null, updated_at = now()
      from unnest(${tenants}::text[], ${held.map((job) => job.deliveryId)}::uuid[], ${held.map(({ job }) => job.retryCount)}::int[]) as h (tenant_id, delivery_id, spent)
      where d.tenant_id = h.tenant_id and d.delivery_id = h.delivery_id
        and d.delivery_id between waybill.first_delivery_id(${ids[0] as string}) and waybill.last_delivery_id(${ids.at(-1) as string})`
    await sql`
      select waybill.count_held(${tenants}::text[], ${held.map((job) => job.endpointId)}::uuid[],
        ${held.map(() => 1)}::int[])`
    // Last, as where attempts are recorded: in another order the two could wait for each other.
    if (counted) await refundAttempts(sql, tenants)
  })
}
