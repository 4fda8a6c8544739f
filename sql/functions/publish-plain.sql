-- Accepts events of one tenant, as lone ones and those of a busy tenant are, in two thirds of the time that waybill.publish takes.
-- Only the plain case: if one of the events may reach a limit, has an idempotency key that is taken, or goes to an endpoint whose
-- deliveries are held, no row comes back and nothing is stored, and waybill.publish has to do it. What this stores, its order of
-- locks and the numbers of its steps are as there.
--
-- All come back in one row, which costs a third of a row each: event_ids in the order of the events; delivery_ids with the number
-- of the event of each in `items`, in no order; rate_count as it is for the last of them.
create or replace function waybill.publish_plain(tenant text, types text[], payloads text[], keys text[], defaults jsonb)
returns table (event_ids uuid[], delivery_ids uuid[], items int[], rate_limit int, rate_count int, window_start timestamptz, window_left int)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  moment constant timestamptz := clock_timestamp();
  this_month constant date := date_trunc('month', moment at time zone 'utc')::date;
  window_length constant interval := make_interval(secs => (defaults ->> 'window_seconds')::int);
  moment_us constant bigint := extract(epoch from moment) * 1000000;
  n constant int := cardinality(types);
  ids constant uuid[] := array(select waybill.make_id(moment_us + i) from generate_series(1, n) i);
  its record;
  match record;
  taken int;
  -- The deliveries.
  new_items int[];
  new_ids uuid[];
  new_endpoints uuid[];
  new_tags float8[];
  new_steps float8[];
  new_bundles uuid[];
  published bigint;
begin
  -- 1. Limits.
  select *, rate > 0 and count + n > rate or published + n > per_month or tried >= attempts_per_month as is_near into its
  from (
    select coalesce((l ->> 'events_write_rate')::int, (defaults ->> 'rate')::int) as rate,
      coalesce((l ->> 'max_fanout_endpoints')::int, (defaults ->> 'fanout')::int) as fanout,
      coalesce((l ->> 'monthly_events')::bigint, (defaults ->> 'monthly_events')::bigint) as per_month,
      coalesce((l ->> 'monthly_attempts')::bigint, (defaults ->> 'monthly_attempts')::bigint) as attempts_per_month,
      coalesce((select w.count from waybill.rate_windows w where w.tenant_id = tenant and w.action = 'events:write'
        and w.window_start >= date_bin(window_length, moment, 'epoch')), 0) as count,
      coalesce((select u.count from waybill.usage u
        where u.tenant_id = tenant and u.month = this_month and u.metric = 'events'), 0) as published,
      coalesce((select u.count from waybill.usage u
        where u.tenant_id = tenant and u.month = this_month and u.metric = 'attempts'), 0) as tried
    -- Pulled up, each count would be read once for each use of it.
    from (select limits as l from waybill.tenants where tenant_id = tenant) t offset 0
  ) t;
  if its.is_near is not false then return; end if;

  -- 2. Idempotency keys. Before matching, as this may have to wait for another's key.
  if array_remove(keys, null) <> '{}' then
    insert into waybill.idempotency_keys (tenant_id, key, event_id)
    select tenant, key, id from unnest(keys, ids) as u (key, id) where key is not null order by key, id on conflict do nothing;
    get diagnostics taken = row_count;
    taken := cardinality(array_remove(keys, null)) - taken;
  end if;

  -- 3. Match. `turn` as in waybill.publish; in the join, it would be worked out for each endpoint.
  with clock as materialized (
    select tag as clock from waybill.queue_clock
  ), turn as materialized (
    select count(*) as ahead, coalesce(sum(least(64, pending - held)), 0) as waiting
    from waybill.endpoint_stats where tenant_id = tenant and pending > held and tag > (select clock from clock)
  )
  select array_agg(event_type) as types, array_agg(endpoint_id) as endpoints, array_agg(tag) as tags, array_agg(step) as steps,
    array_agg(waybill.turn_phase(nth, many, ahead, tag > clock, step)) as phases, bool_or(is_held) as holds, max(clock) as clock
  into match
  from (
    select types, endpoint_id, is_held, greatest(tag, clock) as tag, clock, ahead, row_number() over () as nth, count(*) over () as many,
      waybill.turn_step(ahead + count(*) filter (where has = 0) over (), waiting + sum(share - has) over (), coming, greatest(0, tag - clock)) as step
    -- Each kind once: Postgres compares each of them with each type that an endpoint lists.
    from (
      select array_agg(event_type) as kinds, array_agg(many) as counts, array_agg(event_type) || '*'::text as wanted
      from (select event_type, count(*)::int as many from unnest(types) as u (event_type) group by event_type) kind
    ) t
    cross join turn
    cross join lateral (
      select * from waybill.endpoints where tenant_id = tenant and is_active and subscribed_events && wanted offset 0
    ) e
    cross join lateral (
      select array_agg(event_type) as types, sum(many) as coming from unnest(kinds, counts) as kind (event_type, many)
      where '*' = any(subscribed_events) or event_type in (select unnest(subscribed_events)) offset 0
    ) k
    left join lateral (
      select * from waybill.endpoint_stats s where s.tenant_id = tenant and s.endpoint_id = e.endpoint_id offset 0
    ) s using (endpoint_id)
    cross join clock
    cross join lateral (
      select ordered or max_per_second is not null or coalesce(s.held > 0 or breaker <> 'closed', false) as is_held,
        case when pending > s.held and tag > clock then least(64, pending - s.held) else 0 end as has
    ) h
    cross join lateral (select least(64, has + coming) as share) c
  ) m, unnest(types) as event_type;
  if taken > 0 or match.holds or cardinality(match.endpoints) > its.fanout then
    delete from waybill.idempotency_keys where tenant_id = tenant and key = any(keys) and event_id = any(ids);
    return;
  end if;

  -- 6. Store, and 7. queue.
  if n = 1 and cardinality(match.endpoints) = 1 then
    -- By values instead of arrays, which takes half as long.
    new_items := '{1}';
    new_ids := array[waybill.make_delivery_id(ids[1])];
    new_endpoints := match.endpoints;
    new_steps := match.steps;
    insert into waybill.events (tenant_id, event_id, event_type, payload, idempotency_key, delivery_count)
    values (tenant, ids[1], types[1], payloads[1], keys[1], 1);
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, next_attempt_at, updated_at)
    values (tenant, new_ids[1], ids[1], match.endpoints[1], types[1], false, moment, moment);
    perform waybill.enqueue_one(tenant, new_ids[1], match.tags[1] + match.steps[1] * match.phases[1]);
  else
    insert into waybill.events (tenant_id, event_id, event_type, payload, idempotency_key, delivery_count)
    select tenant, id, event_type, payload, key, coalesce(m.fanout, 0)
    from unnest(ids, types, payloads, keys) as u (id, event_type, payload, key)
    left join (select event_type, count(*)::int as fanout from unnest(match.types) as u (event_type) group by event_type) m
      using (event_type);
    with due as materialized (
      select i::int as i, id as event_id, event_type, endpoint_id, waybill.make_delivery_id(id) as delivery_id,
        tag + step * (row_number() over (partition by endpoint_id order by i) - 1 + phase) as tag, step
      from unnest(ids, types) with ordinality as u (id, event_type, i)
      join unnest(match.types, match.endpoints, match.tags, match.steps, match.phases) as m (event_type, endpoint_id, tag, step, phase)
        using (event_type)
    ), bundled as materialized (
      select *, case when count(*) over job > 1 then waybill.bundle_id(first_value(delivery_id) over job) end as bundle
      from (select *, (row_number() over (partition by floor(tag) order by tag, i, delivery_id) - 1) / 16 as nth from due) d
      window job as (partition by floor(tag), nth order by tag, i, delivery_id rows between unbounded preceding and unbounded following)
    ), delivering as (
      insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, next_attempt_at, updated_at, bundle)
      select tenant, delivery_id, event_id, endpoint_id, event_type, false, moment, moment, bundle from bundled
    )
    select array_agg(i), array_agg(delivery_id), array_agg(endpoint_id), array_agg(tag), array_agg(step), array_agg(bundle)
    into new_items, new_ids, new_endpoints, new_tags, new_steps, new_bundles from bundled;
    if new_ids is not null then
      perform waybill.enqueue_new(array_fill(tenant, array[cardinality(new_ids)]), new_ids, new_tags,
        array_fill(false, array[cardinality(new_ids)]), new_bundles);
    end if;
  end if;
  if new_ids is not null then perform pg_notify('waybill_due', ''); end if;

  -- 8. Count.
  rate_limit := its.rate;
  window_start := date_bin(window_length, moment, 'epoch');
  if rate_limit > 0 then
    insert into waybill.rate_windows as w (tenant_id, action, window_start, count) values (tenant, 'events:write', window_start, n)
    on conflict (tenant_id, action) do update set
      count = case when w.window_start < excluded.window_start then excluded.count else w.count + excluded.count end,
      window_start = greatest(w.window_start, excluded.window_start)
    returning w.window_start, w.count into window_start, rate_count;
  end if;
  insert into waybill.usage as u (tenant_id, month, metric, count) values (tenant, this_month, 'events', n)
  on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
  returning u.count into published;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held, tag)
  select tenant, endpoint_id, count(*), 0, match.clock + sum(step) from unnest(new_endpoints, new_steps) as u (endpoint_id, step)
  group by endpoint_id order by endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending, tag = greatest(s.tag, match.clock) + excluded.tag - match.clock;
  if rate_count > rate_limit or published > its.per_month then
    raise serialization_failure using message = 'others have reached a limit meanwhile';
  end if;

  event_ids := ids;
  delivery_ids := coalesce(new_ids, '{}');
  items := coalesce(new_items, '{}');
  rate_count := coalesce(rate_count, 0);
  window_left := ceil(extract(epoch from window_start + window_length - moment));
  return next;
end $$;
