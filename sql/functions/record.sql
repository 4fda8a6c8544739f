-- Records attempts and returns how each endpoint stands afterwards, and which deliveries' claims were still valid (`settled`). A
-- fence is `job id:retry count`: that job is finished here (of a bundle, the delivery's part), and where another worker has
-- claimed it meanwhile, nothing of the attempt is stored. Where there is no fence, the caller has settled the job. `started` is
-- null where the quota forbade the attempt. `reasons`, `next_attempts`, `errors` and `error_messages` are null as a whole where
-- no attempt has one.
create or replace function waybill.record(tenants text[], deliveries uuid[], fences text[], endpoints uuid[], urls text[],
  attempt_numbers int[], recorded_attempts int[], old_statuses waybill.delivery_status[], statuses waybill.delivery_status[],
  reasons waybill.dead_letter_reason[], next_attempts timestamptz[], started timestamptz[], durations_ms int[],
  status_codes smallint[], errors text[], error_messages text[], response_bodies text[], truncated boolean[])
returns table (tenant_id text, endpoint_id uuid, settled uuid[], held float8, failure_streak int, failing_seconds float8,
               breaker waybill.breaker, ramp int, failed_probes int, probing uuid)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  fenced constant uuid[] := array(select id from unnest(deliveries, fences) as u (id, fence) where fence is not null);
  -- Null if all are, as is usual.
  finished uuid[] := waybill.finish_claims(fenced, array_remove(fences, null));
begin
  if cardinality(finished) = cardinality(fenced) then finished := null; end if;

  perform waybill.move_deliveries(tenants, deliveries, fences, finished, attempt_numbers, recorded_attempts, statuses, reasons,
    next_attempts, started, status_codes, errors);
  if array_position(started, null) is not null then
    perform waybill.exhaust_last(tenants, deliveries, fences, finished, attempt_numbers, started);
  end if;
  return query
  with results as materialized (
    select * from unnest(tenants, deliveries, fences, endpoints, urls, attempt_numbers, recorded_attempts, old_statuses, statuses,
      reasons, next_attempts, started, durations_ms, status_codes, errors, error_messages, response_bodies, truncated)
      as r (tenant_id, delivery_id, fence, endpoint_id, url, attempt_number, recorded_attempts, old_status, status,
            reason, next_attempt_at, started_at, duration_ms, status_code, error, error_message, response_body, response_truncated)
    where finished is null or fence is null or delivery_id = any(finished)
  ), made as (
    -- Attempts that are missing before this one were lost with their worker: when they ended is unknown, so they are dated at the
    -- attempt that revealed them.
    select tenant_id, delivery_id, endpoint_id, url, attempt_number, started_at, duration_ms, status_code, error, error_message,
      response_body, response_truncated, next_attempt_at,
      (case status when 'delivered' then 'succeeded' when 'retrying' then 'will_retry' else 'exhausted' end)::waybill.retry_state
        as retry_state
    from results where started_at is not null
    union all
    select tenant_id, delivery_id, endpoint_id, url, lost, coalesce(started_at, now()), 0, null, 'worker_lost', waybill.lost_message(), null,
      false, case when not is_last then coalesce(started_at, now()) end,
      (case when is_last then 'exhausted' else 'will_retry' end)::waybill.retry_state
    from (select *, started_at is null and lost = attempt_number - 1 as is_last
          from results, generate_series(recorded_attempts + 1, attempt_number - 1) lost) l
  ), attempted as (
    insert into waybill.attempts (tenant_id, delivery_id, endpoint_id, url, attempt_number, started_at, duration_ms, status_code,
      error, error_message, response_body, response_truncated, next_attempt_at, retry_state)
    select * from made
  ), counted as (
    insert into waybill.attempt_counts as c (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
    select tenant_id, endpoint_id, date_trunc('hour', now(), 'utc'),
      -- Negative where a 2xx broke off, which is no success; 0 where there was no response.
      coalesce(case when retry_state <> 'succeeded' and status_code between 200 and 299 then -status_code else status_code end, 0), count(*),
      count(*) filter (where attempt_number > 1), sum(duration_ms)
    from made group by 1, 2, 3, 4 order by 1, 2, 3, 4
    on conflict (tenant_id, endpoint_id, hour, status_code) do update set
      attempts = c.attempts + excluded.attempts, retries = c.retries + excluded.retries,
      duration_ms = c.duration_ms + excluded.duration_ms
  ), recent as (
    select tenant_id, endpoint_id, array_agg(status_code order by started_at + duration_ms * interval '1 millisecond' desc, attempt_number desc) as codes,
      max(started_at) filter (where retry_state = 'succeeded') as last_success_at,
      max(started_at) filter (where retry_state <> 'succeeded') as last_failure_at,
      min(started_at) filter (where is_strike) as first_failure_at, count(*) filter (where is_strike) as failures
    from made m cross join lateral (
      -- What failed at a URL that the endpoint no longer has says nothing about its present one; nor does the loss of a worker.
      select case when retry_state <> 'succeeded' and m.error is distinct from 'worker_lost' then (
        select p.url = m.url from waybill.endpoints p where p.tenant_id = m.tenant_id and p.endpoint_id = m.endpoint_id
      ) else false end as is_strike offset 0
    ) u
    group by tenant_id, endpoint_id
  ), moved as (
    select tenant_id, endpoint_id, array_agg(delivery_id) as settled,
      count(*) filter (where status = 'retrying') - count(*) filter (where old_status = 'retrying') as retrying,
      count(*) filter (where status = 'pending') - count(*) filter (where old_status = 'pending') as pending,
      count(*) filter (where status = 'delivered') as delivered, count(*) filter (where status = 'dead_lettered') as dead_lettered
    from results group by tenant_id, endpoint_id
  ), counted_endpoints as (
    insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, dead_lettered, recent_status_codes,
      last_success_at, last_failure_at, failure_streak, failing_since)
    select tenant_id, endpoint_id, m.pending, m.retrying, m.delivered, m.dead_lettered, coalesce(r.codes[1:20], '{}'),
      r.last_success_at, r.last_failure_at, case when r.last_success_at is null then coalesce(r.failures, 0) else 0 end,
      case when r.last_success_at is null then r.first_failure_at end
    from moved m left join recent r using (tenant_id, endpoint_id) order by tenant_id, endpoint_id
    on conflict (tenant_id, endpoint_id) do update set
      pending = s.pending + excluded.pending, retrying = s.retrying + excluded.retrying,
      delivered = s.delivered + excluded.delivered, dead_lettered = s.dead_lettered + excluded.dead_lettered,
      recent_status_codes = (excluded.recent_status_codes || s.recent_status_codes)[1:20],
      last_success_at = greatest(s.last_success_at, excluded.last_success_at),
      last_failure_at = greatest(s.last_failure_at, excluded.last_failure_at),
      failure_streak = case when excluded.last_success_at is null then s.failure_streak + excluded.failure_streak else 0 end,
      failing_since = case when excluded.last_success_at is null then coalesce(s.failing_since, excluded.failing_since) end
    returning *
  )
  select m.tenant_id, m.endpoint_id, m.settled, s.held::float8, s.failure_streak,
    coalesce(extract(epoch from least(now(), s.last_failure_at) - s.failing_since), 0)::float8, s.breaker, s.ramp, s.failed_probes, s.probing
  from moved m join counted_endpoints s using (tenant_id, endpoint_id);
end $$;

-- The deliveries' part of waybill.record, whose `finished` is null where all are. A merge, although nothing is ever inserted: its plan has
-- to start from the given rows. It is planned anew each time, for the partitions at hand: where a kept plan has pruned partitions by the
-- bounds, and somebody has changed one of these rows meanwhile, Postgres 18 passes over that row and all that come after it, or crashes;
-- and up to 17 a kept plan opens all partitions for writing.
create or replace function waybill.move_deliveries(tenants text[], deliveries uuid[], fences text[], finished uuid[],
  attempt_numbers int[], recorded_attempts int[], statuses waybill.delivery_status[], reasons waybill.dead_letter_reason[],
  next_attempts timestamptz[], started timestamptz[], status_codes smallint[], errors text[])
returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_material = off set enable_memoize = off
as $$
declare
  ids constant uuid[] := array(select id from unnest(deliveries) as u (id) order by id);
  -- The bounds by which their partitions are found.
  first_id constant uuid := ids[1];
  last_id constant uuid := ids[cardinality(ids)];
begin
  merge into waybill.deliveries d
  using unnest(tenants, deliveries, fences, attempt_numbers, recorded_attempts, statuses, reasons, next_attempts, started,
      status_codes, errors)
    as r (tenant_id, delivery_id, fence, attempt_number, recorded_attempts, status, reason, next_attempt_at, started_at,
          status_code, error)
  on d.tenant_id = r.tenant_id and d.delivery_id = r.delivery_id and d.delivery_id between first_id and last_id
    and (finished is null or r.fence is null or r.delivery_id = any(finished))
  when matched then update set
    status = r.status,
    bundle = null,
    -- Where the quota forbade the attempt, the last one was the one before, which may have lost its worker.
    attempt_count = case when r.started_at is null then r.attempt_number - 1 else r.attempt_number end,
    next_attempt_at = r.next_attempt_at,
    last_attempt_at = coalesce(r.started_at, case when r.recorded_attempts < r.attempt_number - 1 then now() else d.last_attempt_at end),
    last_status_code = case when r.started_at is not null then r.status_code
      when r.recorded_attempts = r.attempt_number - 1 then d.last_status_code end,
    last_error = case when r.started_at is not null then r.error
      when r.recorded_attempts < r.attempt_number - 1 then 'worker_lost' else d.last_error end,
    dead_letter_reason = r.reason,
    updated_at = now(),
    completed_at = case when r.status <> 'retrying' then now() end
  when not matched and false then insert (tenant_id) values (r.tenant_id);
end $$;

-- Where the quota forbade an attempt, the one before was the last, and is marked so. It has a record unless it lost its worker.
create or replace function waybill.exhaust_last(tenants text[], deliveries uuid[], fences text[], finished uuid[], attempt_numbers int[],
  started timestamptz[])
returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  ids constant uuid[] := array(select id from unnest(deliveries, started) as u (id, at) where at is null order by id);
begin
  update waybill.attempts a set retry_state = 'exhausted', next_attempt_at = null
  from unnest(tenants, deliveries, fences, attempt_numbers, started) as r (tenant_id, delivery_id, fence, attempt_number, started_at)
  where r.started_at is null and (finished is null or r.fence is null or r.delivery_id = any(finished))
    and a.tenant_id = r.tenant_id and a.delivery_id = r.delivery_id and a.attempt_number = r.attempt_number - 1
    and a.delivery_id between ids[1] and ids[cardinality(ids)]
    and a.retry_state = 'will_retry';
end $$;

-- Records attempts that have lost their worker. `last`: no retry is left, and the deliveries are given up. `next_attempts`: when the
-- retries are due, if not now.
create or replace function waybill.record_lost(tenants text[], deliveries uuid[], endpoints uuid[], urls text[], attempt_numbers int[],
  recorded_attempts int[], old_statuses waybill.delivery_status[], last boolean, next_attempts timestamptz[] default null)
returns void language plpgsql
as $$
declare
  each constant int[] := array[cardinality(deliveries)];
begin
  perform waybill.record(tenants, deliveries, array_fill(null::text, each), endpoints, urls, attempt_numbers, recorded_attempts,
    old_statuses, array_fill(case when last then 'dead_lettered' else 'retrying' end::waybill.delivery_status, each),
    case when last then array_fill('worker_lost'::waybill.dead_letter_reason, each) end,
    case when not last then coalesce(next_attempts, array_fill(now(), each)) end, array_fill(now(), each), array_fill(0, each),
    array_fill(null::smallint, each), array_fill('worker_lost'::text, each), array_fill(waybill.lost_message(), each),
    array_fill(null::text, each), array_fill(false, each));
end $$;

create or replace function waybill.lost_message() returns text language sql immutable as $$
  select 'the worker was lost during this attempt; the request may have arrived'
$$;
