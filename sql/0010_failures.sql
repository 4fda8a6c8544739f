-- What follows attempts that failed, and claims that cannot be sent, in one call each. They are planned anew each time, and
-- name the ids of the jobs that they look for: a planner that knows nothing of the queue yet, or takes it for short, would
-- start from all of it for each batch, just when an outage makes it long.

-- Settles the jobs of failed attempts as pg-boss has it: a retry, or when none is left, the dead letter queue. A fence is
-- `job id:retry count`; where another worker has claimed the job meanwhile, nothing happens and nothing is answered. The
-- receiver's Retry-After (`not_before`, seconds) may only make the backoff longer. Retries stand behind first attempts.
-- next_attempt_at is null where there is none: the failed job goes then, because those that are left are how the
-- dead-letter worker knows the deliveries whose worker was lost.
create function waybill.settle_failed(deliveries uuid[], fences text[], not_before int[])
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

-- Takes claimed deliveries out of the queue: their rows wait, `held`, until waybill.release_held queues them again with the
-- retries that they have left. `counted`: they have places in the month, which they give back.
create function waybill.hold_claims(tenants text[], deliveries uuid[], endpoints uuid[], retry_counts int[], counted boolean)
returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  fences constant text[] := array(select id || ':' || n from unnest(deliveries, retry_counts) as c (id, n));
  finished constant uuid[] := (select ids from waybill.finish_jobs('deliveries', deliveries, fences));
  sorted constant uuid[] := array(select id from unnest(finished) as f (id) order by id);
  held_tenants text[];
  held_endpoints uuid[];
begin
  select array_agg(tenant_id), array_agg(endpoint_id) into held_tenants, held_endpoints
  from unnest(tenants, deliveries, endpoints) as c (tenant_id, id, endpoint_id) where id = any(finished);
  if held_tenants is null then return; end if;

  update waybill.deliveries d set held = true, spent_retries = c.n, next_attempt_at = null, updated_at = now()
  from unnest(tenants, deliveries, retry_counts) as c (tenant_id, id, n)
  where c.id = any(finished) and d.tenant_id = c.tenant_id and d.delivery_id = c.id
    and d.delivery_id between waybill.first_delivery_id(sorted[1]) and waybill.last_delivery_id(sorted[cardinality(sorted)]);
  perform waybill.count_held(held_tenants, held_endpoints, array_fill(1, array[cardinality(held_tenants)]));
  -- Last, as where attempts are recorded: in another order the two could wait for each other.
  if counted then perform waybill.refund_attempts(held_tenants); end if;
end $$;

-- Gives places in the month back for attempts that were counted and then not made. The rows are locked in the order in
-- which claims lock them.
create function waybill.refund_attempts(tenants text[]) returns void language sql as $$
  select from waybill.usage
  where tenant_id = any(tenants) and month = date_trunc('month', now() at time zone 'utc')::date and metric = 'attempts'
  order by tenant_id for no key update;
  update waybill.usage u set count = u.count - r.n
  from (select tenant_id, count(*) as n from unnest(tenants) as t (tenant_id) group by tenant_id) r
  where u.tenant_id = r.tenant_id and u.month = date_trunc('month', now() at time zone 'utc')::date and u.metric = 'attempts'
$$;

-- As it was, but by ids, and with the refund above: gives claims back as if they had not been made, due at once, no retry
-- spent, nothing counted. Only what is still claimed as it was is touched; answers with how many.
create or replace function waybill.unclaim(ids uuid[], retry_counts int[]) returns bigint language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  tenants text[];
begin
  with given as (
    -- started_on decides whether pg-boss's next fetch counts a retry.
    update pgboss.job j set state = 'created', started_on = null, heartbeat_on = null
    from unnest(ids, retry_counts) as u (id, retry_count)
    where j.name = 'deliveries' and j.id = any(ids) and j.id = u.id and j.retry_count = u.retry_count and j.state = 'active'
    returning j.data ->> 'tenant_id' as tenant_id
  )
  select coalesce(array_agg(tenant_id), '{}') into tenants from given;
  perform waybill.refund_attempts(tenants);
  return cardinality(tenants);
end $$;

-- As it was, but that its last update names the ids, and that retries are announced as such: queues held deliveries,
-- oldest first, and says how many of each endpoint. `busy` is how many of its deliveries the caller has in hand, `most`
-- how many it can make use of.
--   inactive       none
--   ordered        one, when none is queued
--   breaker open   one, when a probe is due; the next is due after `lease`, unless the probe's outcome says otherwise
--   half open      up to twice its ramp: as many as may be under way, and as many to follow them without a pause
--   max_per_second as many as have a slot in the coming half second; each carries its slot
create or replace function waybill.release_held(tenants text[], endpoints uuid[], busy int[], most int[], lease interval)
returns table (tenant_id text, endpoint_id uuid, released int) language plpgsql
set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
  picked record;
  jobs text;
begin
  -- A statement of its own: the next ones must see what whoever had the locks before has released.
  perform from waybill.endpoint_stats s
  join unnest(tenants, endpoints) as a (tenant_id, endpoint_id) on s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id
  order by s.tenant_id, s.endpoint_id for no key update of s;

  with lanes as (
    select s.tenant_id, s.endpoint_id, e.max_per_second, greatest(s.next_slot, now()) as slot, greatest(s.tag, clock.tag) as tag,
      case
        when not e.is_active then 0
        when e.ordered and s.pending + s.retrying > s.held then 0
        when s.breaker = 'open' then (s.next_probe_at <= now())::int
        when e.ordered then 1
        else least(a.most - a.busy, 2 * s.ramp - a.busy,
          ceil(extract(epoch from now() + interval '500 milliseconds' - greatest(s.next_slot, now())) * e.max_per_second)::int)
      end as room
    from unnest(tenants, endpoints, busy, most) as a (tenant_id, endpoint_id, busy, most)
    join waybill.endpoint_stats s on s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id
    join waybill.endpoints e on e.tenant_id = a.tenant_id and e.endpoint_id = a.endpoint_id
    cross join waybill.queue_clock clock
    where s.held > 0
  ), sharing as (
    -- A tenant's turn is shared by its endpoints, as in waybill.publish.
    select l.tenant_id, count(*) / 64.0 as step from lanes l where l.room > 0 group by l.tenant_id
  ), chosen as (
    select l.tenant_id, l.endpoint_id, d.delivery_id, d.spent_retries, l.max_per_second,
      l.tag + x.step * row_number() over lane as tag,
      l.slot + (row_number() over lane - 1) * interval '1 second' / l.max_per_second as slot
    from lanes l join sharing x using (tenant_id) cross join lateral (
      select delivery_id, spent_retries from waybill.deliveries d
      where d.tenant_id = l.tenant_id and d.endpoint_id = l.endpoint_id and d.held
      order by d.delivery_id limit greatest(l.room, 0)) d
    window lane as (partition by l.tenant_id, l.endpoint_id order by d.delivery_id)
  )
  select count(*)::int as n, array_agg(tenant_id) as tenants, array_agg(endpoint_id) as endpoints, array_agg(delivery_id) as ids,
    array_agg(spent_retries) as retries, array_agg(max_per_second) as rates, array_agg(tag) as tags, array_agg(slot) as slots,
    min(delivery_id::text)::uuid as first_id, max(delivery_id::text)::uuid as last_id
  into picked from chosen;
  if picked.n = 0 then return; end if;

  -- The bounds are for the planner, which then looks at the partitions between them only.
  update waybill.deliveries d set held = false, spent_retries = 0, next_attempt_at = coalesce(p.slot, now()), updated_at = now()
  from unnest(picked.tenants, picked.ids, picked.slots) as p (tenant_id, delivery_id, slot)
  where d.tenant_id = p.tenant_id and d.delivery_id = p.delivery_id and d.delivery_id between picked.first_id and picked.last_id;

  update waybill.endpoint_stats s set
    held = s.held - c.n,
    tag = greatest(s.tag, c.tag),
    next_slot = coalesce(c.last_slot + interval '1 second' / c.rate, s.next_slot),
    probing = case when s.breaker = 'open' then c.first_id end,
    next_probe_at = case when s.breaker = 'open' then now() + lease end
  from (select tenant_id, endpoint_id, count(*)::int as n, max(slot) as last_slot, max(rate) as rate,
          max(tag) filter (where retries = 0) as tag, min(delivery_id::text)::uuid as first_id
        from unnest(picked.tenants, picked.endpoints, picked.ids, picked.retries, picked.rates, picked.tags, picked.slots)
          as p (tenant_id, endpoint_id, delivery_id, retries, rate, tag, slot) group by 1, 2) c
  where s.tenant_id = c.tenant_id and s.endpoint_id = c.endpoint_id;

  select json_agg(json_build_object('id', id,
      'priority', case when retries > 0 then waybill.retry_priority(now()) else -floor(tag)::int end,
      'data', json_build_object('tenant_id', tenant_id, 'tag', case when retries = 0 then tag end, 'slot', extract(epoch from slot) * 1000)) order by id)::text
  into jobs from unnest(picked.tenants, picked.ids, picked.retries, picked.tags, picked.slots) as p (tenant_id, id, retries, tag, slot);
  perform waybill.enqueue(jobs);
  -- started_on is empty, so the next claim is this very retry and not one more.
  update pgboss.job j set retry_count = r.retries
  from unnest(picked.ids, picked.retries) as r (id, retries)
  where j.name = 'deliveries' and j.id = any(picked.ids) and j.id = r.id and r.retries > 0;
  perform pg_notify('waybill_due', case when 0 < any(picked.retries) then 'retry' else '' end);
  return query select c.t, c.e, count(*)::int from unnest(picked.tenants, picked.endpoints) as c (t, e) group by c.t, c.e;
end $$;
