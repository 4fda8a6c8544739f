import type { Db, Pool } from '../db/open.ts'
import { type Fragment, fragment } from '../db/statement.ts'
import { DELIVERIES } from '../queue.ts'
import { type Claim, type ClaimedJob, fenceOf } from './claim.ts'

/**
 * Gives deliveries that were claimed in bundles, and have to come again, jobs of their own, which count as claimed too: then do
 * something with these at once, as touching the bundles does not reach them. Repeating it does nothing. Returns the claims as they
 * then are.
 */
export async function unbundle(sql: Db, claims: ClaimedJob[]): Promise<ClaimedJob[]> {
  const bundled = claims.filter(({ bundle }) => bundle !== null)
  if (bundled.length > 0)
    await sql`
      select waybill.unbundle(${bundled.map(({ tenantId }) => tenantId)}::text[], ${bundled.map(({ bundle }) => bundle)}::uuid[],
        ${bundled.map(({ deliveryId }) => deliveryId)}::uuid[], true)`
  return claims.map((claim) => ({ ...claim, bundle: null }))
}

/** Ends claims of deliveries that need no attempt. Those that have lapsed are left alone. */
export async function dropClaims(pool: Pool, claims: ClaimedJob[]): Promise<void> {
  await pool`select waybill.finish_claims(${claims.map(({ deliveryId }) => deliveryId)}::uuid[], ${claims.map(fenceOf)}::text[])`
}

/**
 * The end of a `select` of aggregates over claims, as `c` (tenant_id, id, endpoint_id, bundle, n), without those whose job has
 * been claimed again since. The fence alone does not tell: after a release or a replay, a delivery's new job may have the id and
 * the retry count of the old one. The time of the claim does. The jobs are locked, so that nobody takes them back before the
 * transaction has put them away, and bundles in the order in which they are locked to be settled. Gives one row, or none.
 */
export function fromClaims(claims: ClaimedJob[]): Fragment {
  return fragment`
    from (select * from unnest(${claims.map((claim) => claim.tenantId)}::text[], ${claims.map((claim) => claim.deliveryId)}::uuid[], ${claims.map((claim) => claim.endpointId)}::uuid[],
      ${claims.map((claim) => claim.bundle)}::uuid[], ${claims.map((claim) => claim.retryCount)}::int[], ${claims.map((claim) => claim.claimedAtMs)}::float8[])
      as u (tenant_id, id, endpoint_id, bundle, n, claimed_ms) order by coalesce(bundle, id)) c
    cross join lateral (
      select from pgboss.job j
      where j.name = ${DELIVERIES} and j.id = coalesce(c.bundle, c.id) and j.state = 'active' and j.retry_count = c.n
        and j.started_on <= to_timestamp(claimed_ms / 1000)
      for no key update offset 0) j
    having count(*) > 0`
}

/**
 * Undoes claims, and takes their attempts off the month's count. Those that have lapsed are left alone. The deliveries are due at
 * once or, if `seconds` are given, as retries, at a random moment of the last of these. Either all have been counted or none. Not one
 * transaction: its lock on the tenant's count would keep all claims of the tenant waiting for this process's next word.
 */
export async function unclaim(pool: Pool, claims: Claim[], seconds: number | null = null): Promise<void> {
  const own = await unbundle(pool, claims)
  await pool`select waybill.unclaim(array_agg(c.id), array_agg(n), ${seconds}, ${claims[0]?.withinQuota !== null}) ${fromClaims(own)}`
}
