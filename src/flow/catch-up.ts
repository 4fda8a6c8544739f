import type { Pool } from '../db/open.ts'
import { retried } from '../db/retried.ts'
import type { Claim } from './claim.ts'
import { replayAsRequested } from './replay.ts'

/**
 * To be called once failed attempts are recorded: what was asked for or changed while they ran must not wait for their backoff. Replays of
 * their deliveries are carried out; an ordered endpoint that has another URL, or an older delivery to get first, is hurried.
 */
export async function catchUp(pool: Pool, failed: Claim[]): Promise<void> {
  const due = await pool<{ tenant_id: string; endpoint_id: string; replayed: string | null }[]>`
    with failed as materialized (
      select * from unnest(${failed.map(({ tenantId }) => tenantId)}::text[], ${failed.map(({ endpointId }) => endpointId)}::uuid[],
        ${failed.map(({ url }) => url)}::text[], ${failed.map(({ deliveryId }) => deliveryId)}::uuid[])
        as f (tenant_id, endpoint_id, url, delivery_id)
    )
    select tenant_id, endpoint_id, r.delivery_id as replayed from failed f join waybill.replay_requests r using (tenant_id, delivery_id)
    union all
    select distinct tenant_id, endpoint_id, null::uuid from failed f cross join lateral (
      select url from waybill.endpoints e where e.tenant_id = f.tenant_id and e.endpoint_id = f.endpoint_id and e.ordered offset 0
    ) e
    where e.url <> f.url or not waybill.is_oldest(tenant_id, endpoint_id, delivery_id)`
  for (const { tenant_id, endpoint_id, replayed } of due)
    if (replayed) await replayAsRequested(pool, tenant_id, replayed)
    else await retried(() => pool`select waybill.hurry_ordered(${tenant_id}, ${endpoint_id})`)
}
