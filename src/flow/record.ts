import type { PgBoss } from 'pg-boss'
import type { Db, Pool } from '../db.ts'
import type { Outcome } from '../egress/send.ts'
import { bossDb, DEAD_LETTERS, DELIVERIES, settledIds } from '../queue.ts'
import { createBatcher } from './batch.ts'
import type { Claim } from './claim.ts'
import type { Verdict } from './retry.ts'

/** What an attempt came to. `over_quota` has no outcome: nothing was sent. */
export type AttemptRecord =
  | { claim: Claim; outcome: Outcome; verdict: Verdict }
  | { claim: Claim; outcome: null; verdict: { kind: 'over_quota' } }

/** `settled` is false when the claim had lapsed: then nothing of the attempt was stored. */
export type Recorded = { settled: boolean; nextAttemptAt: Date | null }

type Ending = 'delivered' | 'retrying' | 'retries_exhausted' | 'endpoint_gone' | 'monthly_attempt_limit'
type Result = AttemptRecord & { ending: Ending; nextAttemptAt: Date | null }

const MAX_BATCH = 100

/**
 * Recording attempts, in natural batches, one transaction each: settle the jobs, then the attempts, deliveries and
 * counters of those whose claim still held. pg-boss's fence (id and retry count) decides that, so a worker that was
 * thought dead changes nothing.
 */
export function createRecord(pool: Pool, boss: PgBoss): (attempt: AttemptRecord) => Promise<Recorded> {
  return createBatcher<AttemptRecord, Recorded>({
    max: MAX_BATCH,
    inFlight: 2,
    run: async (attempts) =>
      await pool.begin(async (sql) => {
        const results = await settleJobs(sql, boss, attempts)
        if (results.length > 0) await store(sql, results)
        const byDelivery = new Map(results.map((result) => [result.claim.deliveryId, result]))
        return attempts.map(({ claim }) => {
          const result = byDelivery.get(claim.deliveryId)
          return { settled: result !== undefined, nextAttemptAt: result?.nextAttemptAt ?? null }
        })
      }),
  })
}

/** Settles the jobs of all attempts; answers with those whose claim held and how each ends. */
async function settleJobs(sql: Db, boss: PgBoss, attempts: AttemptRecord[]): Promise<Result[]> {
  const db = bossDb(sql)
  const fence = ({ claim }: AttemptRecord) => claim.job
  const failed = attempts.filter((attempt) => attempt.verdict.kind === 'failed')
  const finished = attempts.filter((attempt) => attempt.verdict.kind !== 'failed')
  const settled = new Set<string>()
  if (finished.length > 0) {
    const answer = await boss.deleteJob(DELIVERIES, finished.map(fence), { db })
    for (const id of settledIds(answer)) settled.add(id)
  }
  const retries = new Map<string, Date>()
  if (failed.length > 0) {
    const answer = await boss.fail(DELIVERIES, failed.map(fence), null, { db })
    for (const id of settledIds(answer)) settled.add(id)
    for (const { id, start_after } of await delayRetries(
      sql,
      failed.filter(({ claim }) => settled.has(claim.deliveryId)),
    )) {
      retries.set(id, start_after)
    }
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

/** pg-boss has set the backoff; the receiver's Retry-After may only make it longer. Returns those that have a retry left. */
async function delayRetries(sql: Db, failed: AttemptRecord[]) {
  return await sql<{ id: string; start_after: Date }[]>`
    update pgboss.job j set start_after = greatest(j.start_after, now() + f.not_before * interval '1 second')
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

async function store(sql: Db, results: Result[]): Promise<void> {
  const column = <T>(read: (result: Result) => T) => results.map(read)
  const ids = column(({ claim }) => claim.deliveryId).sort()
  const status = ({ ending }: Result) => (ending === 'delivered' || ending === 'retrying' ? ending : 'dead_lettered')
  // The driver takes lists of times as text only, and makes every text in a list of booleans false.
  const startedAt = ({ claim, outcome }: Result) =>
    outcome ? new Date(outcome.startedAt.getTime() + claim.clockOffsetMs).toISOString() : null
  await sql`
    with results as materialized (
      select * from unnest(
        ${column(({ claim }) => claim.tenantId)}::text[], ${column(({ claim }) => claim.deliveryId)}::uuid[],
        ${column(({ claim }) => claim.endpointId)}::uuid[], ${column(({ claim }) => claim.url)}::text[],
        ${column(({ claim }) => claim.attemptNumber)}::int[], ${column(({ claim }) => claim.recordedAttempts)}::int[],
        ${column(({ claim }) => claim.status)}::waybill.delivery_status[], ${column(status)}::waybill.delivery_status[],
        ${column(({ ending }) => (ending === 'delivered' || ending === 'retrying' ? null : ending))}::waybill.dead_letter_reason[],
        ${column(({ nextAttemptAt }) => nextAttemptAt?.toISOString() ?? null)}::timestamptz[], ${column(startedAt)}::timestamptz[],
        ${column(({ outcome }) => outcome?.durationMs ?? 0)}::int[], ${column(({ outcome }) => outcome?.statusCode ?? null)}::smallint[],
        ${column(({ outcome }) => outcome?.error ?? null)}::text[], ${column(({ outcome }) => outcome?.errorMessage ?? null)}::text[],
        ${column(({ outcome }) => outcome?.responseBody ?? null)}::text[], ${column(({ outcome }) => String(outcome?.responseTruncated ?? false))}::text[]::boolean[]
      ) as r (tenant_id, delivery_id, endpoint_id, url, attempt_number, recorded_attempts, old_status, status, reason,
              next_attempt_at, started_at, duration_ms, status_code, error, error_message, response_body, response_truncated)
    ), made as (
      -- started_at is null where the quota forbade the attempt. Attempts that are missing before this one were lost with
      -- their worker: when they ended is unknown, so they are dated at the attempt that found them out.
      select tenant_id, delivery_id, endpoint_id, url, attempt_number, started_at, duration_ms, status_code, error, error_message,
        response_body, response_truncated, next_attempt_at,
        (case status when 'delivered' then 'succeeded' when 'retrying' then 'will_retry' else 'exhausted' end)::waybill.retry_state as retry_state
      from results where started_at is not null
      union all
      select tenant_id, delivery_id, endpoint_id, url, lost, started_at, 0, null, 'worker_lost',
        'the worker was lost during this attempt; the request may have arrived', null, false, started_at, 'will_retry'
      from results, generate_series(recorded_attempts + 1, attempt_number - 1) lost where started_at is not null
    ), attempted as (
      insert into waybill.attempts (tenant_id, delivery_id, endpoint_id, url, attempt_number, started_at, duration_ms, status_code,
        error, error_message, response_body, response_truncated, next_attempt_at, retry_state)
      select * from made
    ), updated as (
      update waybill.deliveries d set
        status = r.status,
        attempt_count = case when r.started_at is null then r.recorded_attempts else r.attempt_number end,
        next_attempt_at = r.next_attempt_at,
        last_attempt_at = coalesce(r.started_at, d.last_attempt_at),
        last_status_code = case when r.started_at is null then d.last_status_code else r.status_code end,
        last_error = case when r.started_at is null then d.last_error else r.error end,
        dead_letter_reason = r.reason,
        updated_at = now(),
        completed_at = case when r.status <> 'retrying' then now() end
      from results r
      where d.tenant_id = r.tenant_id and d.delivery_id = r.delivery_id
        and d.delivery_id between waybill.first_delivery_id(${ids[0] as string}) and waybill.last_delivery_id(${ids.at(-1) as string})
    ), counted as (
      insert into waybill.attempt_counts as c (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
      select tenant_id, endpoint_id, date_trunc('hour', now()), coalesce(status_code, 0), count(*),
        count(*) filter (where attempt_number > 1), sum(duration_ms)
      from made group by 1, 2, 3, 4 order by 1, 2, 3, 4
      on conflict (tenant_id, endpoint_id, hour, status_code) do update set
        attempts = c.attempts + excluded.attempts, retries = c.retries + excluded.retries, duration_ms = c.duration_ms + excluded.duration_ms
    ), recent as (
      select tenant_id, endpoint_id, array_agg(status_code order by started_at desc, attempt_number desc) as codes,
        max(started_at) filter (where retry_state = 'succeeded') as last_success_at,
        max(started_at) filter (where retry_state <> 'succeeded') as last_failure_at
      from made group by tenant_id, endpoint_id
    ), moved as (
      select tenant_id, endpoint_id, sum(change) filter (where status = 'pending') as pending, sum(change) filter (where status = 'retrying') as retrying,
        sum(change) filter (where status = 'delivered') as delivered, sum(change) filter (where status = 'dead_lettered') as dead_lettered
      from (select tenant_id, endpoint_id, old_status as status, -1 as change from results
            union all select tenant_id, endpoint_id, status, 1 from results) changes
      group by tenant_id, endpoint_id
    )
    insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, dead_lettered, recent_status_codes, last_success_at, last_failure_at)
    select tenant_id, endpoint_id, coalesce(m.pending, 0), coalesce(m.retrying, 0), coalesce(m.delivered, 0), coalesce(m.dead_lettered, 0),
      coalesce(r.codes[1:20], '{}'), r.last_success_at, r.last_failure_at
    from moved m left join recent r using (tenant_id, endpoint_id) order by tenant_id, endpoint_id
    on conflict (tenant_id, endpoint_id) do update set
      pending = s.pending + excluded.pending, retrying = s.retrying + excluded.retrying,
      delivered = s.delivered + excluded.delivered, dead_lettered = s.dead_lettered + excluded.dead_lettered,
      recent_status_codes = (excluded.recent_status_codes || s.recent_status_codes)[1:20],
      last_success_at = greatest(s.last_success_at, excluded.last_success_at),
      last_failure_at = greatest(s.last_failure_at, excluded.last_failure_at)`
  await deactivateGone(sql, results)
}

/** 410 Gone: the endpoint itself takes no more; what waits for it waits. */
async function deactivateGone(sql: Db, results: Result[]): Promise<void> {
  const gone = results.filter(({ ending }) => ending === 'endpoint_gone')
  if (gone.length === 0) return
  await sql`
    update waybill.endpoints p set is_active = false, updated_at = now()
    from (select distinct * from unnest(${gone.map(({ claim }) => claim.tenantId)}::text[], ${gone.map(({ claim }) => claim.endpointId)}::uuid[]) as g (tenant_id, endpoint_id) order by 1, 2) g
    where p.tenant_id = g.tenant_id and p.endpoint_id = g.endpoint_id and p.is_active`
}
