-- Settles the jobs of failed attempts as pg-boss does: a retry or, when none is left, the dead letter queue. A fence is
-- `job id:retry count`; if another worker has claimed the job meanwhile, nothing happens and no row is returned. `not_before`
-- (seconds from now, because of Retry-After or to spread failures out) may only make the backoff longer. Retries stand behind
-- first attempts. next_attempt_at is null where no retry follows: then the failed job is deleted, since the dead-letter worker
-- takes every failed job that is left for one whose worker was lost. This is planned anew each time and lists the ids that it
-- looks for, like waybill.unclaim.
create or replace function waybill.settle_failed(deliveries uuid[], fences text[], not_before int[])
returns table (delivery_id uuid, next_attempt_at timestamptz) language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  settled constant uuid[] := (select ids from waybill.fail_jobs('deliveries', deliveries, null, fences));
begin
  return query
  with retried as (
    update pgboss.job j set start_after = greatest(j.start_after, now() + f.not_before * interval '1 second'),
      priority = waybill.retry_priority(greatest(j.start_after, now() + f.not_before * interval '1 second'))
    from unnest(deliveries, not_before) as f (id, not_before)
    where j.name = 'deliveries' and j.id = any(settled) and j.id = f.id and j.state = 'retry'
    returning j.id, j.start_after
  ), exhausted as (
    delete from pgboss.job where name = 'deliveries' and id = any(settled) and state = 'failed' returning id
  )
  select id, start_after from retried union all select id, null from exhausted;
end $$;

-- Records attempts of which some were not delivered (waybill.record) and settles their jobs. `verdicts` says what each came to:
-- 'delivered'; 'failed', to be tried again but not before the backoff and `not_before`; 'gone'; or 'over_quota', where nothing was sent.
-- Those whose claim does not hold any more are left out. Returns in each row which these are, by their places among all that were given,
-- and which of the endpoint's are tried again, and when.
create or replace function waybill.settle(tenants text[], deliveries uuid[], bundles uuid[], retry_counts int[], claimed_ms float8[],
  verdicts text[], not_before int[], endpoints uuid[], urls text[], attempt_numbers int[], recorded_attempts int[],
  old_statuses waybill.delivery_status[], started timestamptz[], durations_ms int[], status_codes smallint[], errors text[],
  error_messages text[], response_bodies text[], truncated boolean[])
returns table (tenant_id text, endpoint_id uuid, settled uuid[], held float8, failure_streak int, failing_seconds float8,
               breaker waybill.breaker, ramp int, failed_probes int, probing uuid, left_out int[], retried uuid[],
               next_attempts timestamptz[])
language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  valid int[];
  moved int[];
  dues timestamptz[];
  tried uuid[];
  its record;
begin
  -- All jobs are locked here.
  valid := array(
    select i from waybill.claims_that_hold(tenants, deliveries, endpoints, bundles, retry_counts, claimed_ms,
      array(select verdict = 'over_quota' from unnest(verdicts) with ordinality as u (verdict, i) order by i)));
  if 'gone' = any(verdicts) then
    -- A 410 from a URL that the endpoint no longer has says nothing about the one that it has now: the attempt has merely failed.
    moved := array(
      select i::int from unnest(tenants, endpoints, urls, verdicts) with ordinality as u (tenant_id, endpoint_id, url, verdict, i)
      cross join lateral (
        select e.url from waybill.endpoints e where e.tenant_id = u.tenant_id and e.endpoint_id = u.endpoint_id offset 0) e
      where verdict = 'gone' and e.url <> u.url);
  end if;
  verdicts := array(
    select case when i = any(valid) then case when i = any(moved) then 'failed' else verdict end end
    from unnest(verdicts) with ordinality as u (verdict, i) order by i);

  -- pg-boss decides on retries and their backoff.
  select array_agg(tenant_id) filter (where bundle is not null) as tenants, array_agg(bundle) filter (where bundle is not null) as bundles,
    array_agg(id) filter (where bundle is not null) as bundled, array_agg(id) as ids, array_agg(id || ':' || n) as fences,
    array_agg(wait) as waits
  into its
  from unnest(tenants, deliveries, bundles, retry_counts, verdicts, not_before) as u (tenant_id, id, bundle, n, verdict, wait)
  where verdict = 'failed';
  if its.bundled is not null then perform waybill.unbundle(its.tenants, its.bundles, its.bundled, true); end if;
  if its.ids is not null then
    select array_agg(delivery_id), array_agg(next_attempt_at) into tried, dues from waybill.settle_failed(its.ids, its.fences, its.waits);
  end if;
  perform waybill.finish_claims(array_agg(id), array_agg(coalesce(bundle, id) || ':' || n))
  from unnest(deliveries, bundles, retry_counts, verdicts) as u (id, bundle, n, verdict)
  where verdict <> 'failed' having count(*) > 0;

  select array_agg(case when verdict is null then u.id || ':-1' end order by i) as fences,
    array_agg(case when verdict = 'delivered' then 'delivered' when due is null then 'dead_lettered' else 'retrying' end::waybill.delivery_status
      order by i) as statuses,
    array_agg(case verdict when 'gone' then 'endpoint_gone' when 'over_quota' then 'monthly_attempt_limit'
      when 'failed' then case when due is null then 'retries_exhausted' end end::waybill.dead_letter_reason order by i) as reasons,
    array_agg(due order by i) as dues,
    coalesce(array_agg(i::int) filter (where verdict is null), '{}') as left_out,
    json_agg(json_build_object('data', json_build_object('tenant_id', tenant_id, 'delivery_id', u.id)))
      filter (where verdict in ('gone', 'over_quota')) as dead_letters,
    array_agg(tenant_id) filter (where verdict = 'over_quota') as unmade
  into its
  from unnest(tenants, deliveries, verdicts) with ordinality as u (tenant_id, id, verdict, i)
  left join unnest(tried, dues) as t (id, due) on verdict = 'failed' and t.id = u.id;

  return query
  select r.*, its.left_out, coalesce(t.ids, '{}'), coalesce(t.dues, '{}')
  -- What is left out has a fence that fits no job.
  from waybill.record(tenants, deliveries, its.fences, endpoints, urls, attempt_numbers, recorded_attempts, old_statuses, its.statuses,
    its.reasons, its.dues, started, durations_ms, status_codes, errors, error_messages, response_bodies, truncated) r
  left join (
    select tenant_id, endpoint_id, array_agg(id) as ids, array_agg(due) as dues
    from unnest(tenants, endpoints, deliveries, its.dues) as u (tenant_id, endpoint_id, id, due) where due is not null group by 1, 2
  ) t using (tenant_id, endpoint_id);

  -- Every dead letter goes through the dead letter queue. pg-boss puts those without a retry left there; this puts the others.
  if its.dead_letters is not null then perform waybill.enqueue_dead_letters(its.dead_letters::text); end if;
  if its.unmade is not null then perform waybill.refund_attempts(its.unmade); end if;
end $$;
