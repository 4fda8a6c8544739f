import type { PgBoss } from 'pg-boss'
import type { Db } from '../db.ts'
import { bossDb, DEAD_LETTERS, DELIVERIES, settledIds } from '../queue.ts'
import type { AttemptRecord } from './record.ts'

/** How a delivery stands after an attempt: finished, waiting for a retry, or dead-lettered for a reason. */
type Ending = 'delivered' | 'retrying' | 'retries_exhausted' | 'endpoint_gone' | 'monthly_attempt_limit'
export type Result = AttemptRecord & { ending: Ending; nextAttemptAt: Date | null }

/**
 * Settles the jobs of a batch of attempts and answers with those whose claim still held, and how each ends. pg-boss
 * decides on retries and their backoff; its fence (id and retry count) leaves jobs alone that were claimed anew.
 */
export async function settleJobs(sql: Db, boss: PgBoss, attempts: AttemptRecord[]): Promise<Result[]> {
  const db = bossDb(sql)
  const failed = attempts.filter((attempt) => attempt.verdict.kind === 'failed')
  const finished = attempts.filter((attempt) => attempt.verdict.kind !== 'failed')
  const jobsOf = (some: AttemptRecord[]) => some.map(({ claim }) => claim.job)
  const settled = new Set<string>()
  if (finished.length > 0) {
    for (const id of settledIds(await boss.deleteJob(DELIVERIES, jobsOf(finished), { db }))) settled.add(id)
  }
  const retries = new Map<string, Date>()
  if (failed.length > 0) {
    for (const id of settledIds(await boss.fail(DELIVERIES, jobsOf(failed), null, { db }))) settled.add(id)
    const held = failed.filter(({ claim }) => settled.has(claim.deliveryId))
    for (const { id, start_after } of await delayRetries(sql, held)) retries.set(id, start_after)
  }
  const results = attempts
    .filter(({ claim }) => settled.has(claim.deliveryId))
    .map((attempt): Result => {
      const nextAttemptAt = retries.get(attempt.claim.deliveryId) ?? null
      return { ...attempt, ending: endingOf(attempt, nextAttemptAt), nextAttemptAt }
    })
  await announceDeadLetters(sql, boss, results)
  return results
}

function endingOf({ verdict }: AttemptRecord, nextAttemptAt: Date | null): Ending {
  switch (verdict.kind) {
    case 'delivered':
      return 'delivered'
    case 'gone':
      return 'endpoint_gone'
    case 'over_quota':
      return 'monthly_attempt_limit'
    case 'failed':
      return nextAttemptAt ? 'retrying' : 'retries_exhausted'
  }
}

/**
 * pg-boss has set the backoff; the receiver's Retry-After may only make it longer. Retries stand behind first attempts.
 * Returns the deliveries that have a retry left.
 */
async function delayRetries(sql: Db, failed: AttemptRecord[]) {
  return await sql<{ id: string; start_after: Date }[]>`
    update pgboss.job j set priority = waybill.retry_priority(greatest(j.start_after, now() + f.not_before * interval '1 second')),
      start_after = greatest(j.start_after, now() + f.not_before * interval '1 second')
    from unnest(${failed.map(({ claim }) => claim.deliveryId)}::uuid[],
      ${failed.map(({ verdict }) => (verdict.kind === 'failed' ? verdict.notBeforeSeconds : 0))}::int[]) as f (id, not_before)
    where j.name = ${DELIVERIES} and j.id = f.id and j.state = 'retry'
    returning j.id, j.start_after`
}

/**
 * Every dead letter goes through the dead letter queue. pg-boss has put the exhausted ones there; their failed jobs go,
 * because those that are left are how the dead-letter worker knows the deliveries whose worker was lost.
 */
async function announceDeadLetters(sql: Db, boss: PgBoss, results: Result[]): Promise<void> {
  const exhausted = results.filter(({ ending }) => ending === 'retries_exhausted').map(({ claim }) => claim.deliveryId)
  if (exhausted.length > 0) {
    await sql`delete from pgboss.job where name = ${DELIVERIES} and id = any(${exhausted}::uuid[]) and state = 'failed'`
  }
  const given = results.filter(({ ending }) => ending === 'endpoint_gone' || ending === 'monthly_attempt_limit')
  if (given.length > 0) {
    const jobs = given.map(({ claim }) => ({ data: { tenant_id: claim.tenantId, delivery_id: claim.deliveryId } }))
    await boss.insert(DEAD_LETTERS, jobs, { db: bossDb(sql) })
  }
}
