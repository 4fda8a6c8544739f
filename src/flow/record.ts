import type { PgBoss } from 'pg-boss'
import type { Db, Pool } from '../db.ts'
import type { Outcome } from '../egress/send.ts'
import type { Log } from '../log.ts'
import { createBatcher } from './batch.ts'
import { type Claim, refundAttempts } from './claim.ts'
import { type EndpointRules, observeEndpoints, type Standing } from './observe.ts'
import type { Verdict } from './retry.ts'
import { type Result, settleJobs } from './settle.ts'

/** What an attempt came to. `over_quota` has no outcome: nothing was sent. */
export type AttemptRecord =
  | { claim: Claim; outcome: Outcome; verdict: Verdict }
  | { claim: Claim; outcome: null; verdict: { kind: 'over_quota' } }

export type Recorded = {
  /** False when the claim had lapsed: then nothing of the attempt was stored. */
  settled: boolean
  nextAttemptAt: Date | null
  /** Whether the endpoint has deliveries that are held. */
  held: boolean
}

const MAX_BATCH = 100

/**
 * Recording attempts, in natural batches, one transaction each: settle the jobs, then the attempts, deliveries and
 * counters of those whose claim still held, then what follows for their endpoints. A worker that was thought dead
 * changes nothing.
 */
export function createRecord(deps: { pool: Pool; boss: PgBoss; rules: EndpointRules; log: Log }) {
  return createBatcher<AttemptRecord, Recorded>({
    max: MAX_BATCH,
    inFlight: 2,
    async run(attempts) {
      const { results, standings, changes } = await deps.pool.begin(async (sql) => {
        const results = await settleJobs(sql, deps.boss, attempts)
        const standings = results.length > 0 ? await store(sql, results) : []
        const unmade = results.filter(({ outcome }) => outcome === null).map(({ claim }) => claim.tenantId)
        if (unmade.length > 0) await refundAttempts(sql, unmade)
        return { results, standings, changes: await observeEndpoints(sql, standings, results, deps.rules) }
      })
      for (const change of changes) deps.log.warn(change, 'endpoint.state_changed')
      const byDelivery = new Map(results.map((result) => [result.claim.deliveryId, result]))
      const holding = new Set(standings.filter(({ held }) => held > 0).map((standing) => standing.endpoint_id))
      return attempts.map(({ claim }) => {
        const result = byDelivery.get(claim.deliveryId)
        return {
          settled: result !== undefined,
          nextAttemptAt: result?.nextAttemptAt ?? null,
          held: holding.has(claim.endpointId),
        }
      })
    },
  })
}

/** Answers how the endpoints of the batch stand after it. */
async function store(sql: Db, results: Result[]): Promise<Standing[]> {
  const column = <T>(read: (result: Result) => T) => results.map(read)
  const ids = column(({ claim }) => claim.deliveryId).sort()
  const status = ({ ending }: Result) => (ending === 'delivered' || ending === 'retrying' ? ending : 'dead_lettered')
  // The driver takes lists of times as text only, and makes every text in a list of booleans false.
  const startedAt = ({ claim, outcome }: Result) =>
    outcome ? new Date(outcome.startedAt.getTime() + claim.clockOffsetMs).toISOString() : null
  return await sql<Standing[]>`
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
        max(started_at) filter (where retry_state <> 'succeeded') as last_failure_at,
        min(started_at) filter (where retry_state <> 'succeeded') as first_failure_at,
        count(*) filter (where retry_state <> 'succeeded') as failures
      from made group by tenant_id, endpoint_id
    ), moved as (
      select tenant_id, endpoint_id, sum(change) filter (where status = 'pending') as pending, sum(change) filter (where status = 'retrying') as retrying,
        sum(change) filter (where status = 'delivered') as delivered, sum(change) filter (where status = 'dead_lettered') as dead_lettered
      from (select tenant_id, endpoint_id, old_status as status, -1 as change from results
            union all select tenant_id, endpoint_id, status, 1 from results) changes
      group by tenant_id, endpoint_id
    )
    insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, dead_lettered, recent_status_codes, last_success_at, last_failure_at,
      failure_streak, failing_since)
    select tenant_id, endpoint_id, coalesce(m.pending, 0), coalesce(m.retrying, 0), coalesce(m.delivered, 0), coalesce(m.dead_lettered, 0),
      coalesce(r.codes[1:20], '{}'), r.last_success_at, r.last_failure_at,
      case when r.last_success_at is null then coalesce(r.failures, 0) else 0 end, case when r.last_success_at is null then r.first_failure_at end
    from moved m left join recent r using (tenant_id, endpoint_id) order by tenant_id, endpoint_id
    on conflict (tenant_id, endpoint_id) do update set
      pending = s.pending + excluded.pending, retrying = s.retrying + excluded.retrying,
      delivered = s.delivered + excluded.delivered, dead_lettered = s.dead_lettered + excluded.dead_lettered,
      recent_status_codes = (excluded.recent_status_codes || s.recent_status_codes)[1:20],
      last_success_at = greatest(s.last_success_at, excluded.last_success_at),
      last_failure_at = greatest(s.last_failure_at, excluded.last_failure_at),
      failure_streak = case when excluded.last_success_at is null then s.failure_streak + excluded.failure_streak else 0 end,
      failing_since = case when excluded.last_success_at is null then coalesce(s.failing_since, excluded.failing_since) end
    returning tenant_id, endpoint_id, held::float8, failure_streak, coalesce(extract(epoch from now() - failing_since), 0)::float8 as failing_seconds,
      breaker, ramp, failed_probes, probing`
}
