-- Lanes: what is held goes back to the queue here, and only here, so that what stands in the queue may be sent now.

-- Retries come after all first attempts; how much of the worker they get is the dispatcher's business.
create function waybill.retry_priority() returns int language sql immutable as $$ select -2000000000 $$;

-- Queues held deliveries, oldest first, and says how many of each endpoint. `busy` is how many of its deliveries the
-- caller has in hand, `most` how many it can make use of. An endpoint that another caller is releasing is left to it.
--   inactive       none
--   breaker open   one, when a probe is due; the next is due after `lease`, unless the probe's outcome says otherwise
--   ordered        one, when none is queued
--   max_per_second as many as have a slot in the coming second; each carries its slot and is queued shortly before it
--   half open      up to its ramp
create function waybill.release_held(tenants text[], endpoints uuid[], busy int[], most int[], lease interval)
returns table (tenant_id text, endpoint_id uuid, released int) language plpgsql
set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
  chosen record;
begin
  with lanes as (
    select s.tenant_id, s.endpoint_id, s.breaker, e.max_per_second, greatest(s.next_slot, now()) as slot,
      case
        when not e.is_active then 0
        when s.breaker = 'open' then (s.next_probe_at <= now())::int
        when e.ordered then (s.pending + s.retrying = s.held)::int
        when e.max_per_second is not null then ceil(extract(epoch from now() + interval '1 second' - greatest(s.next_slot, now())) * e.max_per_second)::int
        when s.breaker = 'half_open' then least(s.ramp, a.most) - a.busy
        else a.most - a.busy
      end as room
    from unnest(tenants, endpoints, busy, most) as a (tenant_id, endpoint_id, busy, most)
    join waybill.endpoint_stats s on s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id
    join waybill.endpoints e on e.tenant_id = a.tenant_id and e.endpoint_id = a.endpoint_id
    where s.held > 0
    order by s.tenant_id, s.endpoint_id for no key update of s skip locked
  ), picked as materialized (
    select l.tenant_id, l.endpoint_id, l.breaker, d.delivery_id, d.spent_retries,
      case when l.max_per_second is not null then l.slot + (row_number() over (partition by l.tenant_id, l.endpoint_id order by d.delivery_id) - 1) * interval '1 second' / l.max_per_second end as slot,
      l.max_per_second
    from lanes l cross join lateral (
      select delivery_id, spent_retries from waybill.deliveries d
      where d.tenant_id = l.tenant_id and d.endpoint_id = l.endpoint_id and d.status in ('pending', 'retrying') and d.held
      order by d.delivery_id limit greatest(l.room, 0)) d
  ), unheld as (
    update waybill.deliveries d set held = false, spent_retries = 0, next_attempt_at = coalesce(p.slot, now()), updated_at = now()
    from picked p where d.tenant_id = p.tenant_id and d.delivery_id = p.delivery_id
  ), counted as (
    update waybill.endpoint_stats s set
      held = s.held - c.n,
      next_slot = coalesce(c.last_slot + interval '1 second' / c.max_per_second, s.next_slot),
      probing = case when s.breaker = 'open' then c.first_id end,
      next_probe_at = case when s.breaker = 'open' then now() + lease end
    from (select tenant_id, endpoint_id, count(*)::int as n, max(slot) as last_slot, max(max_per_second) as max_per_second,
            (array_agg(delivery_id order by delivery_id))[1] as first_id
          from picked group by 1, 2) c
    where s.tenant_id = c.tenant_id and s.endpoint_id = c.endpoint_id
  )
  select json_agg(json_build_object('id', delivery_id,
      'priority', case when spent_retries > 0 then waybill.retry_priority() else -floor(clock.tag)::int end,
      'startAfter', case when slot > now() + interval '1 second' then to_char((slot - interval '1 second') at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') end,
      'data', json_build_object('tenant_id', tenant_id, 'slot', extract(epoch from slot) * 1000)) order by delivery_id)::text as jobs,
    array_agg(tenant_id) as tenant_ids, array_agg(endpoint_id) as endpoint_ids,
    array_agg(delivery_id) as ids, array_agg(spent_retries) as retries
  into chosen from picked cross join waybill.queue_clock clock;
  if chosen.jobs is null then return; end if;
  perform waybill.enqueue(chosen.jobs);
  -- started_on is empty, so the next claim is this very retry and not one more.
  update pgboss.job j set retry_count = r.retries
  from unnest(chosen.ids, chosen.retries) as r (id, retries) where j.name = 'deliveries' and j.id = r.id and r.retries > 0;
  perform pg_notify('waybill_due', '');
  return query select c.t, c.e, count(*)::int from unnest(chosen.tenant_ids, chosen.endpoint_ids) as c (t, e) group by c.t, c.e;
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
