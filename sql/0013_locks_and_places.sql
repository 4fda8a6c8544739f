-- What waits for each other no more, and who stands before whom.

-- An endpoint that was made active again with nothing held kept the ramp of one that recovers.
update waybill.endpoint_stats set ramp = null, breaker_since = null where breaker = 'closed' and ramp is not null;

-- Says of claims that their worker is alive. In the order of their ids, and without those that somebody settles at this
-- moment: to wait for them with others in hand could be to wait for each other.
create function waybill.touch(ids uuid[], retry_counts int[]) returns void language sql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
  with claimed as (
    select j.id from pgboss.job j join unnest(ids, retry_counts) as u (id, retry_count) on j.id = u.id and j.retry_count = u.retry_count
    where j.name = 'deliveries' and j.id = any(ids) and j.state = 'active'
    order by j.id for no key update of j skip locked
  )
  update pgboss.job j set heartbeat_on = now() from claimed c where j.name = 'deliveries' and j.id = c.id
$$;

-- What tenants are to be told. It waits here for a transaction of its own, since whoever finds out has locked the counters of
-- some endpoints, and may not ask for those of others afterwards.
create table waybill.announcements (
  tenant_id text not null,
  announcement_id uuid not null,
  about uuid not null,
  event_type text not null,
  payload text not null,
  primary key (tenant_id, announcement_id)
);

-- Tells a tenant what happened to its endpoints and deliveries, soon (waybill.publish_announcements).
create or replace function waybill.announce(tenant text, about uuid, type text, payload text) returns void language sql as $$
  insert into waybill.announcements (tenant_id, announcement_id, about, event_type, payload)
  select tenant, waybill.make_id(clock_timestamp()), about, type, payload
  -- Where nobody has asked for them, there are none.
  where exists (select from waybill.endpoints e where e.tenant_id = tenant and e.is_active and e.endpoint_id <> about and e.subscribed_events @> array[type])
$$;

-- Makes events of at most `most` announcements, delivered to the tenants' active endpoints that name the type; `*` does not
-- stand for these. Never to the endpoint that it is about. Answers how many there were.
create function waybill.publish_announcements(most int) returns bigint language plpgsql as $$
declare
  told bigint;
begin
  with taken as (
    delete from waybill.announcements where (tenant_id, announcement_id) in (
      select tenant_id, announcement_id from waybill.announcements order by announcement_id limit most for update skip locked)
    returning *
  ), received as materialized (
    select a.*, e.endpoint_id from taken a
    join waybill.endpoints e on e.tenant_id = a.tenant_id and e.is_active and e.endpoint_id <> a.about and e.subscribed_events @> array[a.event_type]
  ), stored as (
    insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
    select tenant_id, announcement_id, event_type, payload, count(*)::int from received group by tenant_id, announcement_id, event_type, payload
  ), delivering as (
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select tenant_id, waybill.make_delivery_id(announcement_id), announcement_id, endpoint_id, event_type, true, now() from received
  ), counted as (
    insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held)
    select tenant_id, endpoint_id, count(*), count(*) from received group by tenant_id, endpoint_id order by tenant_id, endpoint_id
    on conflict (tenant_id, endpoint_id) do update set pending = s.pending + excluded.pending, held = s.held + excluded.held
  )
  select count(*) into told from taken;
  if told > 0 then perform pg_notify('waybill_held', ''); end if;
  return told;
end $$;

-- As it was, but for the places of probes, of what follows them, and of slots: those are few, their time is short, and behind a
-- backlog of retries it would be over. Queues held deliveries, oldest first, and says how many of each endpoint. `busy` is
-- how many of its deliveries the caller has in hand, `most` how many it can make use of.
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
    select s.tenant_id, s.endpoint_id, e.max_per_second, s.breaker <> 'closed' or e.max_per_second is not null as urgent, greatest(s.next_slot, now()) as slot, greatest(s.tag, clock.tag) as tag,
      case
        when not e.is_active then 0
        when e.ordered and s.pending + s.retrying > s.held then 0
        when s.breaker = 'open' then (s.next_probe_at <= now())::int
        when e.ordered then 1
        else least(a.most - a.busy, case when s.breaker = 'half_open' then 2 * s.ramp end - a.busy,
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
    select l.tenant_id, l.endpoint_id, d.delivery_id, d.spent_retries, l.max_per_second, l.urgent,
      l.tag + x.step * row_number() over lane as tag,
      l.slot + (row_number() over lane - 1) * interval '1 second' / l.max_per_second as slot
    from lanes l join sharing x using (tenant_id) cross join lateral (
      select delivery_id, spent_retries from waybill.deliveries d
      where d.tenant_id = l.tenant_id and d.endpoint_id = l.endpoint_id and d.held
      order by d.delivery_id limit greatest(l.room, 0)) d
    window lane as (partition by l.tenant_id, l.endpoint_id order by d.delivery_id)
  )
  select count(*)::int as n, array_agg(tenant_id) as tenants, array_agg(endpoint_id) as endpoints, array_agg(delivery_id) as ids,
    array_agg(spent_retries) as retries, array_agg(urgent) as urgent, array_agg(max_per_second) as rates, array_agg(tag) as tags, array_agg(slot) as slots,
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
      'priority', case when retries = 0 then -floor(tag)::int when urgent then waybill.place_again(-1400000000) else waybill.retry_priority(now()) end,
      'data', json_build_object('tenant_id', tenant_id, 'tag', case when retries = 0 then tag end, 'slot', extract(epoch from slot) * 1000)) order by id)::text
  into jobs from unnest(picked.tenants, picked.ids, picked.retries, picked.urgent, picked.tags, picked.slots) as p (tenant_id, id, retries, urgent, tag, slot);
  perform waybill.enqueue(jobs);
  -- started_on is empty, so the next claim is this very retry and not one more.
  update pgboss.job j set retry_count = r.retries
  from unnest(picked.ids, picked.retries) as r (id, retries)
  where j.name = 'deliveries' and j.id = any(picked.ids) and j.id = r.id and r.retries > 0;
  perform pg_notify('waybill_due', case when 0 < any(picked.retries) then 'retry' else '' end);
  return query select c.t, c.e, count(*)::int from unnest(picked.tenants, picked.endpoints) as c (t, e) group by c.t, c.e;
end $$;
