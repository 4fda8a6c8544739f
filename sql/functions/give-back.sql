-- Puts away claims that are not to be sent now. A planner that knows nothing of the queue yet, or believes it short, would go through
-- all of it for each batch, just when an outage has made it long. So jobs are looked up one by one by `lateral (… offset 0)`, or the
-- ids are listed and the plan is made anew each time.

-- Those of these claims that still hold; `i` is their place among them. The id and retry count of a job do not tell, since after a
-- release or a replay a delivery's new job may have the same; the time of the claim does. Their jobs are locked, so that nobody takes
-- them back before the transaction has put them away: bundles in order, which others of their deliveries may be leaving, and then what was
-- not sent first. If that was taken back while this waits for the others, an attempt would seem lost that was never made.
create or replace function waybill.claims_that_hold(tenants text[], deliveries uuid[], endpoints uuid[], bundles uuid[], retry_counts int[],
  claimed_ms float8[], unsent boolean[] default '{}')
returns table (tenant_id text, id uuid, endpoint_id uuid, bundle uuid, n int, i int) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
begin
  return query
  select u.tenant_id, u.id, u.endpoint_id, u.bundle, u.n, u.i::int
  from (
    select * from unnest(tenants, deliveries, endpoints, bundles, retry_counts, claimed_ms, unsent)
      with ordinality as u (tenant_id, id, endpoint_id, bundle, n, claimed_ms, is_unsent, i)
    order by bundle, is_unsent is not true, id) u
  cross join lateral (
    select j.data from pgboss.job j
    where j.name = 'deliveries' and j.id = coalesce(u.bundle, u.id) and j.state = 'active' and j.retry_count = u.n
      and j.started_on <= to_timestamp(u.claimed_ms / 1000)
    for no key update offset 0) j
  where u.bundle is null or j.data -> 'ids' ? u.id::text;
end $$;

-- Gives claims back: no retry spent, nothing counted. They are due at once, as if they had not been made, or if `seconds` are given, as
-- retries, at a random moment of the last of these. Claims that have lapsed are left alone. Returns how many were given back.
-- `counted`: they have been counted against the month, and are taken off again.
create or replace function waybill.unclaim(ids uuid[], retry_counts int[], seconds int default null, counted boolean default true)
returns bigint language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  given record;
begin
  with given as (
    -- started_on decides whether pg-boss's next fetch counts a retry. What is due later has the state of retries and the time of now,
    -- or it would be taken for due before the database's clock was set back (upkeep/clock-set-back.ts).
    update pgboss.job j set state = case when due is null then 'created' else 'retry' end::pgboss.job_state, started_on = null,
      heartbeat_on = case when due is not null then now() end, start_after = coalesce(due, j.start_after),
      priority = case when due is null then waybill.place_again(j.priority) else waybill.retry_priority(due) end,
      created_on = case when due is null then waybill.moment_before_turn(j.id) else j.created_on end
    from (
      select id, retry_count, now() + (seconds - random()) * interval '1 second' as due from unnest(ids, retry_counts) as c (id, retry_count)
    ) u
    where j.name = 'deliveries' and j.id = any(ids) and j.id = u.id and j.retry_count = u.retry_count and j.state = 'active'
    returning j.data ->> 'tenant_id' as tenant_id, j.id, due
  )
  select coalesce(array_agg(tenant_id order by id), '{}') as tenants, array_agg(id order by id) as ids, array_agg(due order by id) as dues
  into given from given;
  if seconds is not null then
    update waybill.deliveries d set next_attempt_at = due, updated_at = now() from unnest(given.tenants, given.ids, given.dues) as g (tenant_id, id, due)
    where d.tenant_id = g.tenant_id and d.delivery_id = g.id and d.delivery_id = any(given.ids)
      and d.delivery_id between given.ids[1] and given.ids[cardinality(given.ids)];
  end if;
  if counted then perform waybill.refund_attempts(given.tenants); end if;
  return cardinality(given.tenants);
end $$;

-- Takes claimed deliveries out of the queue: their rows wait, `held`, until waybill.release_held queues them again with the
-- retries that they have left. `bundles`: the jobs of those that have none of their own. `counted`: they have been counted
-- against the month, and are taken off again.
create or replace function waybill.hold_claims(tenants text[], deliveries uuid[], endpoints uuid[], bundles uuid[], retry_counts int[], counted boolean)
returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  fences constant text[] := array(select coalesce(bundle, id)::text || ':' || n::text from unnest(deliveries, bundles, retry_counts) as c (id, bundle, n));
  finished constant uuid[] := waybill.finish_claims(deliveries, fences);
  sorted constant uuid[] := array(select id from unnest(finished) as f (id) order by id);
  held_tenants text[];
  held_endpoints uuid[];
  held_ids uuid[];
  lost record;
begin
  select array_agg(tenant_id), array_agg(endpoint_id), array_agg(id) into held_tenants, held_endpoints, held_ids
  from unnest(tenants, deliveries, endpoints) as c (tenant_id, id, endpoint_id) where id = any(finished);
  if held_tenants is null then return; end if;

  -- Attempts before this claim that lost their worker are recorded now: what is held may have its next one days later.
  if 0 < any(retry_counts) then
    select count(*)::int as n, array_agg(d.tenant_id) as tenants, array_agg(d.delivery_id) as ids, array_agg(d.endpoint_id) as endpoints,
      array_agg(p.url) as urls, array_agg(d.earlier_attempts + c.n) as made, array_agg(d.attempt_count) as recorded,
      array_agg(d.status) as statuses
    into lost
    from (select * from unnest(tenants, deliveries, retry_counts) as c (tenant_id, id, n) where n > 0 and id = any(finished)) c
    join waybill.deliveries d on d.tenant_id = c.tenant_id and d.delivery_id = c.id and d.delivery_id = any(sorted)
      and d.delivery_id between sorted[1] and sorted[cardinality(sorted)]
    join waybill.endpoints p on p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id
    where d.status in ('pending', 'retrying') and d.earlier_attempts + c.n > d.attempt_count;
    if lost.n > 0 then
      -- All deliveries are locked before the counters' rows.
      perform from waybill.deliveries d join unnest(tenants, deliveries) as c (tenant_id, id)
        on d.tenant_id = c.tenant_id and d.delivery_id = c.id
      where c.id = any(finished) and d.delivery_id = any(sorted)
        and d.delivery_id between sorted[1] and sorted[cardinality(sorted)]
      order by d.delivery_id for no key update of d;
      -- All endpoints, or those without a lost attempt would be locked out of order when what is held is counted: every deadlock
      -- keeps whoever publishes to them waiting for a second. The table before the counters' rows, as in waybill.rebase_queue.
      lock table only waybill.deliveries in row exclusive mode;
      perform from waybill.endpoint_stats s
      join unnest(held_tenants, held_endpoints) as h (tenant_id, endpoint_id) on s.tenant_id = h.tenant_id and s.endpoint_id = h.endpoint_id
      order by s.tenant_id, s.endpoint_id for no key update of s;
      perform waybill.record_lost(lost.tenants, lost.ids, lost.endpoints, lost.urls, lost.made, lost.recorded, lost.statuses, false);
    end if;
  end if;

  perform waybill.set_held(array_agg(tenant_id), array_agg(id), true, null, array_agg(n), null, now())
  from unnest(tenants, deliveries, retry_counts) as c (tenant_id, id, n) where id = any(finished);
  perform waybill.count_held(held_tenants, held_endpoints, held_ids);
  -- A probe for which there was no room is due again soon, not when its lease ends, and remains the next one.
  update waybill.endpoint_stats s set next_probe_at = now() + interval '1 second'
  from unnest(held_tenants, held_endpoints) as h (tenant_id, endpoint_id)
  where s.tenant_id = h.tenant_id and s.endpoint_id = h.endpoint_id and s.breaker = 'open' and s.probing = any(finished);
  -- Last, as where attempts are recorded: in another order the two could wait for each other.
  if counted then perform waybill.refund_attempts(held_tenants); end if;
end $$;

-- Marks deliveries as held, or as released. A merge, although nothing is ever inserted: its plan has to start from the given rows. An
-- update's need not: a planner that believes the deliveries between the first and the last to be few, as it does of any that lie close
-- together, would go through all of these, and for each through all that are given.
create or replace function waybill.set_held(tenants text[], deliveries uuid[], is_held boolean, bundles uuid[], spent int[],
  nexts timestamptz[], moment timestamptz) returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_material = off set enable_memoize = off
as $$
declare
  sorted constant uuid[] := array(select id from unnest(deliveries) as u (id) order by id);
begin
  merge into waybill.deliveries d
  using (select * from unnest(tenants, deliveries, bundles, spent, nexts) as u (tenant_id, id, bundle, spent, next) order by id) c
  -- The bounds are for the planner, which then looks at the partitions between them only.
  on d.tenant_id = c.tenant_id and d.delivery_id = c.id and d.delivery_id between sorted[1] and sorted[cardinality(sorted)]
  when matched then update set
    held = is_held, bundle = c.bundle, spent_retries = c.spent, next_attempt_at = c.next, updated_at = moment
  when not matched and false then insert (tenant_id) values (c.tenant_id);
end $$;

-- Takes attempts that were counted and then not made off the month's count. One that was counted in one month and is put away in
-- the next is taken off the next month's count, which does not fall below zero. The rows are locked in the order in which claims
-- lock them.
create or replace function waybill.refund_attempts(tenants text[]) returns void language sql as $$
  select from waybill.usage
  where tenant_id = any(tenants) and month = date_trunc('month', now() at time zone 'utc')::date and metric = 'attempts'
  order by tenant_id for no key update;
  update waybill.usage u set count = greatest(0, u.count - r.n)
  from (select tenant_id, count(*) as n from unnest(tenants) as t (tenant_id) group by tenant_id) r
  where u.tenant_id = r.tenant_id and u.month = date_trunc('month', now() at time zone 'utc')::date and u.metric = 'attempts'
$$;
