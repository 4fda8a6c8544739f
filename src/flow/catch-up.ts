import type { Pool } from '../db/open.ts'
import { retried } from '../db/retried.ts'
import type { Log } from '../log.ts'
import { createBatcher } from './batch.ts'
import type { Claim } from './claim.ts'
import { replayAsRequested } from './replay.ts'

type Failed = Pick<Claim, 'tenantId' | 'endpointId' | 'url' | 'deliveryId'>

/** How many are caught up with in turn. Tenants share this, so that none waits for all of another's replays. */
const MAX_BATCH = 50
/** How many may wait for that, each with its claim and payload in memory. */
const MAX_WAITING = 500

/** Catches up with attempts in batches. Never rejects: what fails, or is too much, is left to the sweep. */
export function createCatchUp(pool: Pool, log: Log): (failed: Failed) => Promise<void> {
  let waiting = 0
  const inBatches = createBatcher<Failed, null>({
    max: MAX_BATCH,
    owner: ({ tenantId }) => tenantId,
    async run(failed) {
      await catchUp(pool, failed).catch((error: unknown) => log.error({ err: error }, 'record.not_caught_up'))
      return failed.map(() => null)
    },
  })
  return async (failed) => {
    if (waiting === MAX_WAITING) return
    waiting++
    await inBatches(failed)
    waiting--
  }
}

/**
 * To be called once failed attempts are recorded: what was asked for or changed while they ran must not wait for their backoff. Replays of
 * their deliveries are carried out. And where an ordered endpoint has another URL by now, or an older delivery to get first, it is not
 * kept waiting for the one that has failed.
 */
export async function catchUp(pool: Pool, failed: Failed[]): Promise<void> {
  const due = await pool<{ tenant_id: string; delivery_id: string; is_replayed: boolean }[]>`
    with failed as materialized (
      select * from unnest(${failed.map(({ tenantId }) => tenantId)}::text[], ${failed.map(({ endpointId }) => endpointId)}::uuid[],
        ${failed.map(({ url }) => url)}::text[], ${failed.map(({ deliveryId }) => deliveryId)}::uuid[])
        as f (tenant_id, endpoint_id, url, delivery_id)
    ), ordered as materialized (
      select tenant_id, endpoint_id, delivery_id, e.url <> f.url as has_moved from failed f cross join lateral (
        -- Whoever is changing it, and has found nothing to hurry yet, is waited for.
        select url from waybill.endpoints e where e.tenant_id = f.tenant_id and e.endpoint_id = f.endpoint_id and e.ordered offset 0 for key share
      ) e
    )
    select tenant_id, delivery_id, true as is_replayed from failed join waybill.replay_requests using (tenant_id, delivery_id)
    union all
    select tenant_id, delivery_id, false from ordered where has_moved or delivery_id = any((
      select waybill.behind(array_agg(tenant_id), array_agg(endpoint_id), array_agg(delivery_id), array_agg(false)) from ordered)::uuid[])`
  for (const { tenant_id, delivery_id, is_replayed } of due)
    if (is_replayed) await replayAsRequested(pool, tenant_id, delivery_id)
    else await retried(() => pool`select waybill.hurry(${tenant_id}, ${[delivery_id]}::uuid[])`)
}

/**
 * The same for what waits for its retry at those of the `endpoints` that are ordered: whoever recorded its failure may have been
 * interrupted before that.
 */
export async function catchUpLeftOver(pool: Pool, endpoints: { tenant_id: string; endpoint_id: string }[]) {
  const failed = await pool<Failed[]>`
    select e.tenant_id as "tenantId", e.endpoint_id as "endpointId", a.url, d.delivery_id as "deliveryId"
    from unnest(${endpoints.map((one) => one.tenant_id)}::text[], ${endpoints.map((one) => one.endpoint_id)}::uuid[]) as u (tenant_id, endpoint_id)
    cross join lateral (
      select * from waybill.endpoints e where e.tenant_id = u.tenant_id and e.endpoint_id = u.endpoint_id and e.ordered offset 0
    ) e
    cross join lateral (
      select * from waybill.deliveries d where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id
        -- One at most, unless it has just been made ordered.
        and d.status in ('pending', 'retrying') and not d.held and d.next_attempt_at > now() limit 1
    ) d
    cross join lateral (
      select url from waybill.attempts a
      where a.tenant_id = d.tenant_id and a.delivery_id = d.delivery_id and a.attempt_number = d.attempt_count offset 0
    ) a`
  if (failed.length > 0) await catchUp(pool, failed)
}
