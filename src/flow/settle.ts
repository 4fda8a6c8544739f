import type { PgBoss } from 'pg-boss'
import type { Db } from '../db/open.ts'
import type { Outcome } from '../egress/send.ts'
import { bossDb, DEAD_LETTERS, DELIVERIES } from '../queue.ts'
import { type Claim, fenceOf } from './claim.ts'
import { fromClaims, unbundle } from './give-back.ts'
import type { Verdict } from './verdict.ts'

/** What an attempt came to. `over_quota` has no outcome: nothing was sent. */
export type AttemptRecord =
  | { claim: Claim; outcome: Outcome; verdict: Verdict }
  | { claim: Claim; outcome: null; verdict: { kind: 'over_quota' } }

/** How a delivery stands after an attempt: finished, waiting for a retry, or dead-lettered for a reason. */
type Ending = 'delivered' | 'retrying' | 'retries_exhausted' | 'endpoint_gone' | 'monthly_attempt_limit'
export type Result = AttemptRecord & { ending: Ending; nextAttemptAt: Date | null }

type Change = { has_moved: boolean; ordered: boolean }

/** Of failed attempts, those whose endpoint has another URL by now, or is ordered and has an older delivery to get first: a replayed one. */
async function findChanges(sql: Db, attempts: AttemptRecord[]): Promise<Map<string, Change>> {
  const failed = attempts.filter(({ verdict }) => verdict.kind === 'gone' || verdict.kind === 'failed')
  if (failed.length === 0) return new Map()
  const claims = failed.map(({ claim }) => claim)
  const changed = await sql<({ delivery_id: string } & Change)[]>`
    select delivery_id, e.url <> f.url as has_moved, ordered
    from unnest(${claims.map(({ tenantId }) => tenantId)}::text[], ${claims.map(({ endpointId }) => endpointId)}::uuid[],
      ${claims.map(({ url }) => url)}::text[], ${claims.map(({ deliveryId }) => deliveryId)}::uuid[])
      as f (tenant_id, endpoint_id, url, delivery_id)
    cross join lateral (
      select url, ordered from waybill.endpoints e where e.tenant_id = f.tenant_id and e.endpoint_id = f.endpoint_id offset 0
    ) e
    where e.url <> f.url or ordered and not waybill.is_oldest(tenant_id, endpoint_id, delivery_id)`
  return new Map(changed.map(({ delivery_id, ...change }) => [delivery_id, change]))
}

/**
 * Leaves out deliveries that the month's limit kept from being sent and that have been claimed again since. An attempt that was
 * made is told from a later one by its number, which is stored only once. Here none was made, and a replay's job may have the
 * same id and retry count.
 */
async function withoutReclaimed(sql: Db, attempts: AttemptRecord[]): Promise<AttemptRecord[]> {
  const unmade = attempts.filter(({ outcome }) => outcome === null).map(({ claim }) => claim)
  if (unmade.length === 0) return attempts
  const [still] = await sql<{ ids: string[] }[]>`select array_agg(c.id) as ids ${fromClaims(unmade)}`
  const ids = new Set(still?.ids)
  return attempts.filter(({ claim, outcome }) => outcome !== null || ids.has(claim.deliveryId))
}

/**
 * Returns how each attempt of a batch ends. Jobs of failed attempts are settled here, since pg-boss decides on retries and their
 * backoff; failed attempts whose job has been claimed again are left out. The other jobs remain to be finished.
 */
export async function settle(sql: Db, made: AttemptRecord[]): Promise<Result[]> {
  const bundles = made.flatMap(({ claim: { bundle } }) => bundle ?? [])
  // All bundles of the batch at once: those of attempts that have not failed would otherwise be locked later, by when whoever has
  // them might wait for these.
  if (bundles.length > 0)
    await sql`select from pgboss.job where name = ${DELIVERIES} and id = any(${bundles}::uuid[]) order by id for no key update`
  const valid = await withoutReclaimed(sql, made)
  const changes = await findChanges(sql, valid)
  const attempts = valid.map((attempt): AttemptRecord => {
    // A 410 from a URL that the endpoint no longer has says nothing about the one that it has now: the attempt has merely failed.
    const isSpared = attempt.verdict.kind === 'gone' && changes.get(attempt.claim.deliveryId)?.has_moved
    return isSpared && attempt.outcome ? { ...attempt, verdict: { kind: 'failed', notBeforeSeconds: 0 } } : attempt
  })
  const failed = attempts.flatMap(({ claim, verdict }) => {
    if (verdict.kind !== 'failed') return []
    // All others of an ordered endpoint would wait for the backoff.
    const isUrgent = changes.get(claim.deliveryId)?.ordered
    return [{ claim, notBeforeSeconds: isUrgent ? null : verdict.notBeforeSeconds }]
  })
  const retries = await retry(sql, failed)
  return attempts.flatMap((attempt): Result[] => {
    const { claim, verdict } = attempt
    const nextAttemptAt = retries.get(claim.deliveryId)
    if (verdict.kind !== 'failed') return [{ ...attempt, ending: ENDINGS[verdict.kind], nextAttemptAt: null }]
    if (nextAttemptAt === undefined) return []
    return [{ ...attempt, ending: nextAttemptAt ? 'retrying' : 'retries_exhausted', nextAttemptAt }]
  })
}

type Failed = { claim: Claim; notBeforeSeconds: number | null }

/** Settles the jobs of failed attempts, without a backoff where `notBeforeSeconds` is null; tells of each delivery when it is tried again, null for never. */
async function retry(sql: Db, failed: Failed[]): Promise<Map<string, Date | null>> {
  if (failed.length === 0) return new Map()
  const claims = failed.map(({ claim }) => claim)
  await unbundle(sql, claims)
  // Each has a job of its own now.
  const fences = claims.map((claim) => fenceOf({ ...claim, bundle: null }))
  const settled = await sql<{ delivery_id: string; next_attempt_at: Date | null }[]>`
    select * from waybill.settle_failed(${claims.map(({ deliveryId }) => deliveryId)}::uuid[], ${fences}::text[],
      ${failed.map(({ notBeforeSeconds }) => notBeforeSeconds)}::int[])`
  return new Map(settled.map(({ delivery_id, next_attempt_at }) => [delivery_id, next_attempt_at]))
}

const ENDINGS = { delivered: 'delivered', gone: 'endpoint_gone', over_quota: 'monthly_attempt_limit' } as const

/** Every dead letter goes through the dead letter queue. pg-boss puts those without a retry left there; this puts the others. */
export async function queueDeadLetters(sql: Db, boss: PgBoss, results: Result[]): Promise<void> {
  const given = results.filter(({ ending }) => ending === 'endpoint_gone' || ending === 'monthly_attempt_limit')
  if (given.length > 0) {
    const jobs = given.map(({ claim }) => ({ data: { tenant_id: claim.tenantId, delivery_id: claim.deliveryId } }))
    await boss.insert(DEAD_LETTERS, jobs, { db: bossDb(sql) })
  }
}
