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

/** A 410 from a URL that the endpoint no longer has says nothing about the one that it has now: the attempt has merely failed. */
async function spareMoved(sql: Db, attempts: AttemptRecord[]): Promise<AttemptRecord[]> {
  const gone = attempts.filter(({ verdict }) => verdict.kind === 'gone').map(({ claim }) => claim)
  if (gone.length === 0) return attempts
  const moved = await sql<{ delivery_id: string }[]>`
    select g.delivery_id
    from unnest(${gone.map(({ tenantId }) => tenantId)}::text[], ${gone.map(({ endpointId }) => endpointId)}::uuid[],
      ${gone.map(({ url }) => url)}::text[], ${gone.map(({ deliveryId }) => deliveryId)}::uuid[]) as g (tenant_id, endpoint_id, url, delivery_id)
    join waybill.endpoints p using (tenant_id, endpoint_id) where p.url <> g.url`
  const spared = new Set(moved.map(({ delivery_id }) => delivery_id))
  return attempts.map((attempt) =>
    attempt.outcome !== null && attempt.verdict.kind === 'gone' && spared.has(attempt.claim.deliveryId)
      ? { ...attempt, verdict: { kind: 'failed', notBeforeSeconds: 0 } }
      : attempt,
  )
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
  const attempts = await spareMoved(sql, await withoutReclaimed(sql, made))
  const retries = await retry(
    sql,
    attempts.flatMap(({ claim, verdict }) => (verdict.kind === 'failed' ? [{ claim, ...verdict }] : [])),
  )
  return attempts.flatMap((attempt): Result[] => {
    const { claim, verdict } = attempt
    const nextAttemptAt = retries.get(claim.deliveryId)
    if (verdict.kind !== 'failed') return [{ ...attempt, ending: ENDINGS[verdict.kind], nextAttemptAt: null }]
    if (nextAttemptAt === undefined) return []
    return [{ ...attempt, ending: nextAttemptAt ? 'retrying' : 'retries_exhausted', nextAttemptAt }]
  })
}

/** Settles the jobs of failed attempts; tells of each delivery when it is tried again, null for never. */
async function retry(sql: Db, failed: { claim: Claim; notBeforeSeconds: number }[]): Promise<Map<string, Date | null>> {
  if (failed.length === 0) return new Map()
  const claims = failed.map(({ claim }) => claim)
  const fences = (await unbundle(sql, claims)).map(fenceOf)
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
