-- Lanes: what is held goes back to the queue here, and only here, so that what stands in the queue may be sent now.

-- What an endpoint still has to get, without what is queued for it: the next to be released is the first entry.
create index deliveries_held on waybill.deliveries (tenant_id, endpoint_id, delivery_id) where held;

-- Retries come after all first attempts, in the order in which they are due: a second later is one less, from 2026 on for
-- 23 years. How much of the worker they get is the dispatcher's business.
create function waybill.retry_priority(due timestamptz) returns int language sql stable as $$
  select -1400000000 - greatest(0, ceil(extract(epoch from due - '2026-01-01 00:00+00'::timestamptz)))::int
$$;

-- Queues held deliveries, oldest first, and says how many of each endpoint. `busy` is how many of its deliveries the
-- caller has in hand, `most` how many it can make use of.
--   inactive       none
--   ordered        one, when none is queued
--   breaker open   one, when a probe is due; the next is due after `lease`, unless the probe's outcome says otherwise
--   half open      up to twice its ramp: as many as may be under way, and as many to follow them without a pause
--   max_per_second as many as have a slot in the coming half second; each carries its slot
create function waybill.release_held(tenants text[], endpoints uuid[], busy int[], most int[], lease interval)
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
  from unnest(picked.ids, picked.retries) as r (id, retries) where j.name = 'deliveries' and j.id = r.id and r.retries > 0;
  perform pg_notify('waybill_due', '');
  return query select c.t, c.e, count(*)::int from unnest(picked.tenants, picked.endpoints) as c (t, e) group by c.t, c.e;
end $$;

-- Priorities are int4, and the clock goes on for ever: at 5,000 deliveries a second it would reach the retries' priorities
-- after seven months. So all tags are moved down by the clock's, when there is little to move, or when it is time. What
-- publishes, releases and records is kept waiting meanwhile, since it goes by the clock that it has read. True when done.
create function waybill.rebase_queue(soft float8 default 1e8, hard float8 default 1e9) returns boolean language plpgsql as $$
declare
  base float8;
begin
  select tag into base from waybill.queue_clock;
  if base < soft then return false; end if;
  if base < hard and (select count(*) from (select from pgboss.job where name = 'deliveries' and state < 'active' and priority > -1400000000 limit 10001) j) > 10000 then
    return false;
  end if;
  lock table waybill.events, waybill.deliveries in share row exclusive mode;
  select floor(tag) into base from waybill.queue_clock for update;
  update pgboss.job set priority = least(0, priority + base::int),
    data = case when data ? 'tag' then jsonb_set(data, '{tag}', to_jsonb(greatest(0, (data ->> 'tag')::float8 - base))) else data end
  where name = 'deliveries' and state < 'active' and priority > -1400000000;
  update waybill.endpoint_stats set tag = greatest(0, tag - base) where tag > 0;
  update waybill.queue_clock set tag = tag - base;
  return true;
end $$;

-- Tells a tenant what happened to its endpoints and deliveries, as an event like any other, delivered to its active
-- endpoints that name the type; `*` does not stand for these. Never to the endpoint that it is about.
create function waybill.announce(tenant text, about uuid, type text, payload text) returns void language plpgsql as $$
declare
  event constant uuid := waybill.make_id(clock_timestamp());
  receivers uuid[];
begin
  select array_agg(endpoint_id) into receivers from waybill.endpoints
  where tenant_id = tenant and is_active and endpoint_id <> about and subscribed_events @> array[type];
  if receivers is null then return; end if;
  insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) values (tenant, event, type, payload, cardinality(receivers));
  insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
  select tenant, waybill.make_delivery_id(event), event, r, type, true, now() from unnest(receivers) r;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held)
  select tenant, r, 1, 1 from unnest(receivers) r order by r
  on conflict (tenant_id, endpoint_id) do update set pending = s.pending + 1, held = s.held + 1;
  perform pg_notify('waybill_held', '');
end $$;
