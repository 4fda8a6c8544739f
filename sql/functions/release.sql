-- Lanes: what is held goes back to the queue here, and only here, so that what stands in the queue may be sent now.

-- Queues held deliveries, oldest first, and returns how many of each endpoint. Each has a row of counters before: one that comes into
-- being meanwhile would not be locked. `busy` is how many of its deliveries the caller has in hand, `most` how many it can have in
-- hand.
--   inactive       none
--   ordered        one, when none is queued
--   breaker open   one, when a probe is due: the one that was asked for, if any; the next is due after `lease`, unless the probe's
--                  outcome says otherwise
--   half open      up to twice its ramp: as many as may be under way, and as many to follow them without a pause
--   max_per_second as many as have a slot in the time `ahead`; each carries its slot
-- What is urgent goes to the front of its tenant's turn, or if it is a retry, of all retries: probes, what follows them,
-- deliveries with a slot, and the one for which an ordered endpoint's others wait. At the end of the turn, behind up to 64
-- deliveries of every tenant with a backlog, their time would be over. They still use up their tenant's share.
-- A probe is queued as a retry, whether its delivery has been attempted or not: after an outage, probes of thousands of endpoints
-- may hang, and retries leave half of the worker to first attempts.
create or replace function waybill.release_held(tenants text[], endpoints uuid[], busy int[], most int[], lease interval,
  ahead interval default '500 milliseconds')
returns table (tenant_id text, endpoint_id uuid, released int) language plpgsql
-- Planning it takes longer than its work, so its plans are kept: rows are looked up by `lateral (… offset 0)`, one index look-up for
-- each. What reads or changes deliveries and jobs, of which there may be millions, is in functions of its own.
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  picked record;
  bundles uuid[];
  moment timestamptz;
  jobs text;
begin
  -- Before the counters' rows, as in waybill.rebase_queue.
  lock table only waybill.deliveries in row exclusive mode;
  -- A statement of its own: the next ones must see what whoever had the locks before has released. One by one, in order: a join would
  -- take its order from the index, and go through all endpoints that there are.
  perform from (select * from unnest(tenants, endpoints) as a (tenant_id, endpoint_id) order by tenant_id, endpoint_id) a
  cross join lateral (
    select from waybill.endpoint_stats s where s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id for no key update) s;
  -- Not the time of the transaction, which may have waited while what is released now was published.
  moment := clock_timestamp();

  with lanes as materialized (
    select s.tenant_id, s.endpoint_id, e.max_per_second, s.breaker = 'open' as is_probe,
      s.breaker <> 'closed' or e.ordered or e.max_per_second is not null as urgent,
      s.slot, greatest(s.tag, clock.tag) as tag, clock.tag as clock, s.held, s.held_from,
      -- A probe that somebody has asked for (waybill.replay), or for which there was no room before.
      case when s.breaker = 'open' and not e.ordered and s.next_probe_at <= now() then waybill.if_held(s.tenant_id, s.probing) end as wanted,
      -- Below 1 where there is none.
      case
        when not e.is_active then 0
        when e.ordered and s.pending + s.retrying > s.held then 0
        when s.breaker = 'open' then (s.next_probe_at <= now())::int
        when e.ordered then 1
        else least(a.most - a.busy, case when s.breaker = 'half_open' then 2 * s.ramp end - a.busy,
          ceil(extract(epoch from moment + ahead - s.slot) * e.max_per_second)::int)
      end as room
    from unnest(tenants, endpoints, busy, most) as a (tenant_id, endpoint_id, busy, most)
    cross join lateral (
      -- One that is further ahead is from before the clock was set back, and whoever claimed a delivery for it would wait for it.
      select *, case when s.next_slot < moment + interval '5 seconds' then greatest(s.next_slot, moment) else moment end as slot
      from waybill.endpoint_stats s where s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id offset 0
    ) s
    cross join lateral (
      select * from waybill.endpoints e where e.tenant_id = a.tenant_id and e.endpoint_id = a.endpoint_id offset 0
    ) e
    cross join waybill.queue_clock clock
    where s.held > 0
  ), sharing as materialized (
    -- A tenant's turn is shared by its endpoints, as in waybill.publish.
    select l.*, greatest(1, count(*) filter (where not is_probe) over tenant) / 64.0 as step,
      row_number() over tenant::float8 / count(*) over tenant as phase, row_number() over () as lane
    from lanes l where l.room > 0 window tenant as (partition by l.tenant_id)
  ), found as materialized (
    select f.* from (
      select array_agg(tenant_id order by lane) as tenants, array_agg(endpoint_id order by lane) as endpoints,
        array_agg(room order by lane) as rooms, array_agg(wanted order by lane) as wanted, array_agg(held_from order by lane) as froms
      from sharing
    ) s cross join lateral waybill.oldest_held(s.tenants, s.endpoints, s.rooms, s.wanted, s.froms, moment) f
  ), short as (
    -- Where there are fewer than are counted, some are not where they are looked for, as when somebody has held them by hand.
    select tenant_id, endpoint_id from sharing left join (select lane, count(*) as n from found group by lane) f using (lane)
    where coalesce(n, 0) < least(room, held) and (select count(*) < 2000 from found)
  ), chosen as (
    select l.tenant_id, l.endpoint_id, d.delivery_id, d.spent_retries, l.max_per_second, l.urgent, l.wanted is null as from_oldest,
      d.spent_retries = 0 and not l.is_probe as is_first,
      l.tag + l.step * (nth - 1 + l.phase) as tag, l.tag + l.step * nth as next_tag, l.clock,
      l.slot + (nth - 1) * interval '1 second' / l.max_per_second as slot
    from sharing l join found d using (lane) order by lane, nth
  )
  select count(*)::int as n, array_agg(tenant_id) as tenants, array_agg(endpoint_id) as endpoints, array_agg(delivery_id) as ids,
    array_agg(spent_retries) as retries, array_agg(is_first) as firsts, array_agg(urgent) as urgent,
    array_agg(is_first and not urgent) as usual, array_agg(from_oldest) as from_oldest,
    array_agg(max_per_second) as rates, array_agg(tag) as tags, array_agg(next_tag) as next_tags,
    -- A turn earlier if urgent: the clock does not tell where in a turn claiming is, so the tag may be in the next one already.
    array_agg(case when urgent then tag - 1 else tag end) as starts, array_agg(clock) as clocks, array_agg(slot) as slots,
    (select array_agg(tenant_id) from short) as short_tenants, (select array_agg(endpoint_id) from short) as short_endpoints
  into picked from chosen;
  if picked.short_endpoints is not null then
    perform waybill.forget_held_from(picked.short_tenants, picked.short_endpoints);
  end if;
  if picked.n = 0 then return; end if;

  -- Those that stand beside one another in a turn share jobs, as in waybill.publish, but never one that has been there before.
  bundles := array(
    select case when usual and count(*) over job > 1 then first_value(new_bundle) over job end
    from (
      -- Made here, since each row of a window would make another for its first one.
      select *, waybill.new_bundle_id(id) as new_bundle, (row_number() over (partition by tenant_id, usual, floor(tag) order by tag, i) - 1) / 16 as nth
      from unnest(picked.tenants, picked.ids, picked.usual, picked.tags) with ordinality as p (tenant_id, id, usual, tag, i)
    ) p
    window job as (partition by tenant_id, usual, floor(tag), nth order by tag, i rows between unbounded preceding and unbounded following)
    order by i);

  perform waybill.set_held(picked.tenants, picked.ids, false, bundles, array_fill(0, array[picked.n]),
    array(select coalesce(slot, moment) from unnest(picked.slots) with ordinality as p (slot, i) order by i), moment);

  -- Not an update, whose kept plan might go through all endpoints that there are: all of these are there.
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, held, held_from, tag, next_slot, probing)
  select tenant_id, endpoint_id, count(*),
    -- Those from before the clock was set back are not looked for once it is known.
    case when bool_and(from_oldest) and endpoint_id <> all(coalesce(picked.short_endpoints, '{}')) and min(delivery_id::text)::uuid < waybill.first_id(moment)
      then waybill.held_from(min(delivery_id::text)::uuid) end,
    coalesce(max(next_tag) filter (where is_first), '-infinity'), max(slot) + interval '1 second' / max(rate), min(delivery_id::text)::uuid
  from unnest(picked.tenants, picked.endpoints, picked.ids, picked.firsts, picked.rates, picked.next_tags, picked.slots, picked.from_oldest)
    as p (tenant_id, endpoint_id, delivery_id, is_first, rate, next_tag, slot, from_oldest) group by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    held = s.held - excluded.held,
    held_from = coalesce(excluded.held_from, s.held_from),
    tag = greatest(s.tag, excluded.tag),
    next_slot = coalesce(excluded.next_slot, s.next_slot),
    probing = case when s.breaker = 'open' then excluded.probing end,
    next_probe_at = case when s.breaker = 'open' then now() + lease end;

  -- Those in bundles, and then the others, of which one may have a job already: of a backup that combines two moments, for instance.
  perform waybill.enqueue_new(picked.tenants, picked.ids, picked.tags, array(select bundle is null from unnest(bundles) as b (bundle)), bundles);
  if array_position(bundles, null) is not null then
    select json_agg(json_build_object(
        'id', id,
        'priority', case
          when is_first then -floor(greatest(clock, start))::int
          when urgent then waybill.place_again(waybill.first_retry())
          else waybill.retry_priority(now())
        end,
        'data', json_build_object(
          'tenant_id', tenant_id, 'tag', case when is_first then start end, 'slot', extract(epoch from slot) * 1000)
      ) order by id)::text
    into jobs
    from unnest(picked.tenants, picked.ids, picked.firsts, picked.urgent, bundles, picked.starts, picked.clocks, picked.slots)
      as p (tenant_id, id, is_first, urgent, bundle, start, clock, slot)
    where bundle is null;
    perform waybill.enqueue(jobs);
    perform waybill.rank_released(picked.ids, picked.retries, picked.firsts, picked.urgent, picked.starts);
  end if;
  perform pg_notify('waybill_due', case when false = any(picked.firsts) then 'retry' else '' end);
  return query select c.t, c.e, count(*)::int from unnest(picked.tenants, picked.endpoints) as c (t, e) group by c.t, c.e;
end $$;

-- The oldest held deliveries of each endpoint, at most as many as it has room for: `lane` is its place in the arrays, `nth` the delivery's
-- among its own. `wanted`: where to start, if it is not the oldest. `froms`: endpoint_stats.held_from. Planned anew each time, for the days
-- at hand: a kept plan would open, or at least lock, each day that is kept. And in the order of the index, whatever the statistics
-- say: by those of a day when nothing was held, all that is held would be sorted for each endpoint; and beside an old day all that the
-- tenant has would be read for it, by the key, were `held` not named in the order as the index has it.
create or replace function waybill.oldest_held(tenants text[], endpoints uuid[], rooms int[], wanted uuid[], froms uuid[], moment timestamptz)
returns table (lane bigint, nth bigint, delivery_id uuid, spent_retries int) language plpgsql stable strict
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
#variable_conflict use_column
declare
  smallest constant uuid := '00000000-0000-0000-0000-000000000000';
  is_known constant boolean := array_position(froms, null) is null;
  first_id constant uuid := case when is_known then (select min(id::text)::uuid from unnest(froms) as f (id)) else smallest end;
  -- Later ones are from before the clock was set back.
  last_id constant uuid := case when is_known then waybill.first_id(moment + interval '1 hour') else 'ffffffff-ffff-ffff-ffff-ffffffffffff' end;
begin
  return query
  select lane, row_number() over (partition by lane order by d.delivery_id), d.delivery_id, d.spent_retries
  from unnest(tenants, endpoints, rooms, wanted, froms) with ordinality as l (tenant_id, endpoint_id, room, wanted, held_from, lane)
  cross join lateral (
    select delivery_id, spent_retries from waybill.deliveries d
    where d.tenant_id = l.tenant_id and d.endpoint_id = l.endpoint_id and d.status in ('pending', 'retrying') and d.held
      and d.delivery_id between first_id and last_id and d.delivery_id >= greatest(l.wanted, l.held_from, smallest)
    order by d.held, d.delivery_id limit l.room) d
  -- Whoever publishes to one of these endpoints waits for the whole release. The rest is left to the next look.
  limit 2000;
end $$;

-- Has the next release look on all days.
create or replace function waybill.forget_held_from(tenants text[], endpoints uuid[]) returns void language plpgsql
set plan_cache_mode = force_custom_plan
as $$
begin
  update waybill.endpoint_stats s set held_from = null from unnest(tenants, endpoints) as a (tenant_id, endpoint_id)
  where s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id and s.held_from is not null;
end $$;

-- Gives the jobs of released deliveries the retries that these have spent: started_on is empty, so the next claim is this very retry and not
-- one more. A first attempt gets its place within its turn: an urgent one before all others, of which each tenant with a backlog has up to 64.
create or replace function waybill.rank_released(ids uuid[], retries int[], firsts boolean[], urgent boolean[], tags float8[])
returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  update pgboss.job j set retry_count = r.retries,
    created_on = case when not r.is_first then j.created_on when r.urgent then waybill.moment_before_turn(j.id) else waybill.moment_in_turn(r.tag) end
  from unnest(ids, retries, firsts, urgent, tags) as r (id, retries, is_first, urgent, tag)
  where j.name = 'deliveries' and j.id = any(ids) and j.id = r.id and (r.retries > 0 or r.is_first);
end $$;

-- A delivery's id, if it is held. A function of its own, planned for the day at hand.
create or replace function waybill.if_held(tenant text, delivery uuid) returns uuid language plpgsql stable
set plan_cache_mode = force_custom_plan
as $$
begin
  return (select delivery_id from waybill.deliveries where tenant_id = tenant and delivery_id = delivery and held);
end $$;

-- Makes the one delivery of an ordered endpoint that waits for its retry, and for which all others wait, due now. One that is made
-- ordered may have many that do: of more than can be moved in the time of a request, the others keep their time.
create or replace function waybill.hurry_ordered(tenant text, endpoint uuid) returns void language plpgsql
set plan_cache_mode = force_custom_plan
as $$
begin
  perform waybill.hurry(tenant, array(
    select delivery_id from waybill.deliveries
    where tenant_id = tenant and endpoint_id = endpoint and not held and status in ('pending', 'retrying')
    order by held, delivery_id limit 10000));
end $$;

-- Makes those of a tenant's deliveries that wait for their retries due now, and returns them, or null if there are none. `ids` is in
-- order.
create or replace function waybill.hurry(tenant text, ids uuid[]) returns uuid[] language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  waiting constant uuid[] := array(
    -- Before the jobs, as in a replay. Whoever has one locked replays it, or records its attempt (and then catches up: src/flow/catch-up.ts).
    select delivery_id from waybill.deliveries
    where tenant_id = tenant and delivery_id = any(ids) and delivery_id between ids[1] and ids[cardinality(ids)]
    order by delivery_id for no key update skip locked);
  hurried uuid[];
  -- The time of the transaction may lie before an attempt whose record this has waited for.
  moment constant timestamptz := clock_timestamp();
begin
  -- By lists, not by joins: with the statistics of an emptier queue, a join would go through all of them for each.
  with moved as (
    update pgboss.job set start_after = now(), priority = greatest(priority, waybill.retry_priority(now()))
    where name = 'deliveries' and id = any(waiting) and state < 'active' and start_after > now() returning id
  )
  select array_agg(id order by id) into hurried from moved;
  if hurried is null then return null; end if;
  update waybill.deliveries set next_attempt_at = moment, updated_at = moment
  where tenant_id = tenant and delivery_id = any(hurried) and delivery_id between hurried[1] and hurried[cardinality(hurried)];
  perform pg_notify('waybill_due', 'retry');
  return hurried;
end $$;
