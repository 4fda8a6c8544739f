import type { Pool } from '../db/open.ts'
import { transact } from '../db/retried.ts'
import { lookUpOnly } from './partitions.ts'

/** Tenants whose counts one statement looks at. */
const TENANTS = 100
/** The endpoint that stands for all of a tenant's. */
const ALL = '00000000-0000-0000-0000-000000000000'

/**
 * Attempts are counted by endpoint and hour, as endpoint health tells of the last 24 hours. What is older is summed up by tenant and UTC
 * day here: the metrics read all of a tenant's counts, and a thousand endpoints would have a million in a month. Two runs at once
 * may deadlock, as each locks the rows in any order; the one that Postgres then gives up is repeated.
 */
export async function foldCounts(pool: Pool): Promise<void> {
  for (let last: string | null = ''; last !== null; ) {
    const [row]: [{ last: string | null }] = await transact(pool, async (sql) => {
      // Postgres 18 thinks the way from one endpoint of a tenant to the next so dear that it would read all of the table for these.
      await lookUpOnly(sql)
      return await sql`
        with tenants as (
          select tenant_id from waybill.tenants where tenant_id > ${last} order by tenant_id limit ${TENANTS}
        ), old as (
          delete from waybill.attempt_counts c using tenants t
          where c.tenant_id = t.tenant_id and c.hour <= date_trunc('hour', now(), 'utc') - interval '24 hours' and c.endpoint_id <> ${ALL}
          returning c.*
        ), folded as (
          insert into waybill.attempt_counts as c (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
          select tenant_id, ${ALL}, date_trunc('day', hour, 'utc') as day, status_code, sum(attempts), sum(retries), sum(duration_ms)
          from old group by tenant_id, day, status_code order by tenant_id, day, status_code
          on conflict (tenant_id, endpoint_id, hour, status_code) do update set
            attempts = c.attempts + excluded.attempts, retries = c.retries + excluded.retries,
            duration_ms = c.duration_ms + excluded.duration_ms
        )
        select max(tenant_id) as last from tenants`
    })
    last = row.last
  }
}
