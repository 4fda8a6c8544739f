import type { Db, Pool } from '../db/open.ts'
import { type Fragment, fragment } from '../db/statement.ts'
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

/** The end of a `select` of aggregates over those claims that still hold (waybill.claims_that_hold). Gives one row, or none. */
export function fromClaims(claims: ClaimedJob[]): Fragment {
  return fragment`
    from waybill.claims_that_hold(${claims.map((claim) => claim.tenantId)}::text[], ${claims.map((claim) => claim.deliveryId)}::uuid[],
      ${claims.map((claim) => claim.endpointId)}::uuid[], ${claims.map((claim) => claim.bundle)}::uuid[],
      ${claims.map((claim) => claim.retryCount)}::int[], ${claims.map((claim) => claim.claimedAtMs)}::float8[]) c
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
