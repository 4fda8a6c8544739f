import type { PgBoss } from 'pg-boss'
import type { Db, Pool } from '../db.ts'
import { bossDb, DELIVERIES, settledIds, unclaim } from '../queue.ts'
import type { Unsendable } from './claim.ts'

/**
 * Takes deliveries of inactive endpoints out of the queue: their rows wait, `held`, for the endpoint to become active.
 * The endpoints stay locked meanwhile, so one that is being activated either waits for this or is seen to be active.
 */
export async function holdDeliveries(pool: Pool, boss: PgBoss, jobs: Unsendable[]): Promise<void> {
  await pool.begin(async (sql) => {
    const inactive = await sql<{ tenant_id: string; endpoint_id: string }[]>`
      select tenant_id, endpoint_id from waybill.endpoints
      where (tenant_id, endpoint_id) in (select * from unnest(${jobs.map((job) => job.tenantId)}::text[], ${jobs.map((job) => job.endpointId)}::uuid[]))
        and not is_active
      order by tenant_id, endpoint_id for share`
    const known = new Set(inactive.map((row) => row.tenant_id + row.endpoint_id))
    const held = jobs.filter((job) => known.has(job.tenantId + job.endpointId))
    const active = jobs.filter((job) => !known.has(job.tenantId + job.endpointId))
    if (active.length > 0)
      await unclaim(
        sql,
        active.map(({ job }) => job),
      )
    if (held.length === 0) return
    const answer = await boss.deleteJob(
      DELIVERIES,
      held.map(({ job }) => job),
      { db: bossDb(sql) },
    )
    const settled = new Set(settledIds(answer))
    const mine = held.filter((job) => settled.has(job.deliveryId))
    await sql`
      update waybill.deliveries d set held = true, next_attempt_at = null, updated_at = now()
      from unnest(${mine.map((job) => job.tenantId)}::text[], ${mine.map((job) => job.deliveryId)}::uuid[]) as h (tenant_id, delivery_id)
      where d.tenant_id = h.tenant_id and d.delivery_id = h.delivery_id`
  })
}

/** Queues again what was held for an endpoint, oldest first, in the transaction that made it active. */
export async function releaseDeliveries(sql: Db, tenantId: string, endpointId: string): Promise<void> {
  await sql`
    with released as (
      update waybill.deliveries set held = false, next_attempt_at = now(), updated_at = now()
      where tenant_id = ${tenantId} and endpoint_id = ${endpointId} and status in ('pending', 'retrying') and held
      returning tenant_id, delivery_id, attempt_count
    )
    select waybill.enqueue(json_agg(json_build_object('id', delivery_id,
      'data', json_build_object('tenant_id', tenant_id, 'earlier_attempts', attempt_count)) order by delivery_id)::text), pg_notify('waybill_due', '')
    from released having count(*) > 0`
}
