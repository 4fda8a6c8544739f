-- Accepts events: a batch of requests, one transaction, one round trip. It is a function because each step decides what the
-- next may do.
--
-- Element i of the arrays is request i. A null type marks a request without an event (its body was refused, or has not been read
-- yet): it counts against the rate limit and nothing else. `limits` holds the service's own: rate, window_seconds, fanout,
-- monthly_events, monthly_attempts. One row comes back per request:
--   accepted          stored with its deliveries and jobs
--   counted           a null type, within the rate limit
--   key_taken         event_id is the event that has the key; same_text tells whether it is the same text,
--                     else original_type and original_payload are for comparing as JSON
--   try_again         the event that had its key is gone (refused in this batch, or removed by retention), or the full window
--                     that it met has ended: publish it again
--   rate_limited      refused: the last columns say why
--   fanout, monthly_events, monthly_attempts    refused; details say why
-- The last columns are where the request stands in its rate window (a rate_limit of 0 means there is none); window_left is in
-- seconds.
--
-- A tenant's counters are locked as briefly as possible: where no limit is near, they are read first and counted last. If others
-- have reached a limit in between, the batch fails with serialization_failure, stores nothing, and is to run again. Tables are
-- locked before rows of counters, and rows in this order: idempotency_keys, rate_windows, the month's events (usage), deliveries,
-- endpoint_stats, attempt_counts. All other functions keep to it, with two exceptions: the month's attempts come last, and a
-- release locks endpoints before the deliveries held for them.
--
-- Elements are read by unnest, since a subscript walks a text array from its start. What is decided about each request is
-- worked out only when a batch meets a limit.
create or replace function waybill.publish(tenants text[], types text[], payloads text[], keys text[], limits jsonb)
returns table (item int, outcome text, event_id uuid, delivery_ids uuid[], details jsonb,
               same_text boolean, original_type text, original_payload text,
               rate_limit int, rate_count int, window_start timestamptz, window_left int)
language plpgsql
-- The same plan serves every batch; making one anew costs more than the batch itself. So it must be right however the
-- tables grow: rows are looked up by `lateral (… offset 0)`, one index look-up for each.
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  moment constant timestamptz := clock_timestamp();
  this_month constant date := date_trunc('month', moment at time zone 'utc')::date;
  window_length constant interval := make_interval(secs => (limits ->> 'window_seconds')::int);
  this_window constant timestamptz := date_bin(window_length, moment, 'epoch');
  -- A microsecond apart, so that the order within the batch is the order of the ids.
  moment_us constant bigint := extract(epoch from moment) * 1000000;
  ids constant uuid[] := array(select waybill.make_id(moment_us + i) from generate_series(1, cardinality(tenants)) i);
  -- Of each tenant in the batch: how many requests it has here, its limits, and its counts, which include these once counted.
  batch_tenants text[];
  request_counts int[];
  rates int[];
  max_fanout int[];
  max_events bigint[];
  max_attempts bigint[];
  attempts_so_far bigint[];
  rate_counts int[];
  window_starts timestamptz[];
  events_so_far bigint[];
  -- Whether this batch may reach a limit, and whether one has been reached.
  near_limit boolean;
  over_limit boolean;
  counted_early boolean;
  -- Null as long as nothing speaks against the request.
  outcomes text[] := array_fill(null::text, array[cardinality(tenants)]);
  verdicts text[];
  -- Of those that lost their key to another of this batch: what holds if that one is refused.
  second_verdicts text[];
  reasons jsonb[];
  taken int := 0;
  clock_tag float8;
  -- For each kind of event in the batch, each endpoint that it goes to.
  match_tenants text[];
  match_types text[];
  match_endpoints uuid[];
  match_held boolean[];
  match_tags float8[];
  match_steps float8[];
  match_phases float8[];
  -- The deliveries.
  new_items int[];
  new_tenants text[];
  new_ids uuid[];
  new_endpoints uuid[];
  new_held boolean[];
  new_tags float8[];
  new_steps float8[];
  new_bundles uuid[];
begin
  -- 1. Limits as they stand. A tenant that has used up its rate needs no further look.
  select array_agg(tenant_id), array_agg(n), array_agg(rate), array_agg(fanout), array_agg(per_month), array_agg(attempts_per_month),
    array_agg(tried), array_agg(count), array_agg(window_start), array_agg(published),
    bool_or(rate > 0 and count + n > rate or published + n > per_month or tried >= attempts_per_month),
    bool_or(rate > 0 and count >= rate)
  into batch_tenants, request_counts, rates, max_fanout, max_events, max_attempts, attempts_so_far, rate_counts, window_starts,
    events_so_far, near_limit, over_limit
  from (
    select a.tenant_id, n, coalesce((l ->> 'events_write_rate')::int, (limits ->> 'rate')::int) as rate,
      coalesce((l ->> 'max_fanout_endpoints')::int, (limits ->> 'fanout')::int) as fanout,
      coalesce((l ->> 'monthly_events')::bigint, (limits ->> 'monthly_events')::bigint) as per_month,
      coalesce((l ->> 'monthly_attempts')::bigint, (limits ->> 'monthly_attempts')::bigint) as attempts_per_month,
      coalesce(m.tried, 0) as tried, coalesce(m.published, 0) as published,
      case when w.window_start >= this_window then w.count else 0 end as count, greatest(w.window_start, this_window) as window_start
    from (select tenant_id, count(*)::int as n from unnest(tenants) as u (tenant_id) group by tenant_id order by tenant_id) a
    cross join lateral (select t.limits as l from waybill.tenants t where t.tenant_id = a.tenant_id offset 0) t
    left join lateral (
      select * from waybill.rate_windows w where w.tenant_id = a.tenant_id and w.action = 'events:write' offset 0
    ) w on true
    left join lateral (
      select max(count) filter (where metric = 'events') as published, max(count) filter (where metric = 'attempts') as tried
      from waybill.usage u where u.tenant_id = a.tenant_id and u.month = this_month offset 0
    ) m on true
  ) t;
  if over_limit or array_position(types, null) is not null then
    select array_agg(case when rate > 0 and count >= rate then 'rate_limited' when event_type is null then 'counted' end order by i)
    into outcomes
    from unnest(tenants, types) with ordinality as u (tenant_id, event_type, i)
    join unnest(batch_tenants, rates, rate_counts) as w (tenant_id, rate, count) using (tenant_id);
  end if;

  -- 2. Idempotency keys. A concurrent batch with the same key is waited for; its event is visible afterwards.
  if array_remove(keys, null) <> '{}' then
    with keyed as (
      select * from unnest(tenants, keys, ids, outcomes) as u (tenant_id, key, id, out) where key is not null and out is null
    ), claimed as (
      insert into waybill.idempotency_keys (tenant_id, key, event_id) select tenant_id, key, id from keyed order by tenant_id, key, id
      on conflict do nothing returning 1
    )
    select (select count(*) from keyed) - (select count(*) from claimed) into taken;
  end if;
  if taken > 0 then
    select array_agg(
      case when out is not null or u.key is null or k.event_id = id then out
        when k.event_id = any(ids) then 'key_lost' else 'key_taken' end order by i)
    into outcomes
    from unnest(tenants, keys, ids, outcomes) with ordinality as u (tenant_id, key, id, out, i)
    left join lateral (
      select event_id from waybill.idempotency_keys k where k.tenant_id = u.tenant_id and k.key = u.key offset 0
    ) k on true;
  end if;

  loop
    -- 3. Match. Where deliveries are held, paced or ordered, new ones are held too, behind them. Once more, if something is refused:
    -- it may be much, and then all else would stand far back for it.
    select array_agg(tenant_id), array_agg(event_type), array_agg(endpoint_id), array_agg(is_held),
      array_agg(tag), array_agg(step), array_agg(waybill.turn_phase(nth, many, ahead, tag > clock, step)), max(clock)
    into match_tenants, match_types, match_endpoints, match_held, match_tags, match_steps, match_phases, clock_tag
    from (
      select t.tenant_id, types, e.endpoint_id, is_held, greatest(tag, clock) as tag, clock, ahead, row_number() over tenant as nth,
        count(*) over tenant as many,
        waybill.turn_step(ahead + count(*) filter (where is_new) over tenant,
          waiting + coalesce(sum(share - has) filter (where not is_kept) over tenant, 0), coming, greatest(0, tag - clock)) as step
      from (
        -- In one piece, or a planner that takes the clock for a long table, as it does until that is analyzed, would do all of this anew
        -- for each endpoint.
        select t.*, clock, ahead, waiting
        from (
          select tenant_id, array_agg(event_type) as kinds, array_agg(many) as counts, array_agg(event_type) || '*'::text as wanted
          from (
            -- What has lost its key makes no deliveries.
            select tenant_id, event_type, count(*) filter (where out is null) as many
            from unnest(tenants, types, outcomes) as u (tenant_id, event_type, out) where out is null or out = 'key_lost'
            group by tenant_id, event_type
          ) kind group by tenant_id
        ) t
        cross join lateral (select tag as clock from waybill.queue_clock offset 0) clock
        -- The tenant's endpoints with deliveries in the queue, ahead of the clock, and what these count as (waybill.turn_step). What is
        -- under way, held or waits for a retry is not there.
        cross join lateral (
          select count(*) as ahead, coalesce(sum(least(64, b.pending - b.held)), 0) as waiting
          from waybill.endpoint_stats b where b.tenant_id = t.tenant_id and b.pending > b.held and b.tag > clock offset 0
        ) turn
        offset 0
      ) t
      -- Each endpoint once, and not once for each kind: a long list of event types is stored apart, and fetching it takes longest.
      cross join lateral (
        select * from waybill.endpoints e
        where e.tenant_id = t.tenant_id and e.is_active and e.subscribed_events && t.wanted offset 0
      ) e
      cross join lateral (
        select array_agg(event_type) as types, sum(many) as coming from unnest(t.kinds, t.counts) as kind (event_type, many)
        where '*' = any(e.subscribed_events) or event_type in (select unnest(e.subscribed_events)) offset 0
      ) k
      left join lateral (
        select * from waybill.endpoint_stats s where s.tenant_id = e.tenant_id and s.endpoint_id = e.endpoint_id offset 0
      ) s on true
      -- What is held because of others may have been released by the time it is stored (5.), so it counts as if it had.
      cross join lateral (
        select coalesce(breaker <> 'closed', false) or ordered or max_per_second is not null as is_kept,
          case when pending > held and tag > clock then least(64, pending - held) else 0 end as has
      ) h
      cross join lateral (
        select is_kept or coalesce(held > 0, false) as is_held, least(64, has + coming) as share,
          has = 0 and coming > 0 and not is_kept as is_new
      ) c
      window tenant as (partition by t.tenant_id)
    ) m, unnest(types) as event_type;
    exit when verdicts is not null;

    -- 4. If something may be refused, or the endpoints' rows are wanted early (5.), count now; then take what is refused off the
    -- month's count.
    if cardinality(match_endpoints) > any(max_fanout) then
      near_limit := true;
    end if;
    counted_early := near_limit or coalesce(match_held @> array[true], false);
    if counted_early then
      -- Before the counters' rows, as when those are counted last: this may have to wait behind somebody who waits for a whole
      -- table, and then must not have any of the rows.
      lock table only waybill.events, only waybill.deliveries in row exclusive mode;
      select * into rate_counts, window_starts, events_so_far
      from waybill.count_publishes(batch_tenants, request_counts, rates, this_window, this_month, tenants, outcomes);

      with matched as (
        select tenant_id, event_type, count(*) as fanout from unnest(match_tenants, match_types) as u (tenant_id, event_type)
        group by tenant_id, event_type
      ), sized as (
        select i, tenant_id, out, coalesce(fanout, 0) as fanout, max_fanout, tried, max_attempts, max_events,
          rate > 0 and w.count - n + row_number() over (partition by tenant_id order by i) > rate as is_late,
          published - count(*) filter (where out is null) over (partition by tenant_id) as before
        from unnest(tenants, types, outcomes) with ordinality as u (tenant_id, event_type, out, i)
        join unnest(batch_tenants, request_counts, rates, rate_counts, max_fanout, attempts_so_far, max_attempts, events_so_far,
            max_events) as w (tenant_id, n, rate, count, max_fanout, tried, max_attempts, published, max_events) using (tenant_id)
        left join matched using (tenant_id, event_type)
      ), placed as (
        select *, count(*) filter (where out is null and fanout <= max_fanout) over (partition by tenant_id order by i) as nth
        from sized
      ), judged as (
        select i, out = 'key_lost' and not is_late as is_lost, case
            when is_late then array['rate_limited', null]
            -- The window that was full has ended meanwhile.
            when out = 'rate_limited' then array['try_again', null]
            when out in ('counted', 'key_taken') then array[out, null]
            when fanout > max_fanout then array['fanout', jsonb_build_object('limit', max_fanout, 'current', fanout)::text]
            when tried >= max_attempts then array['monthly_attempts',
              jsonb_build_object('limit', max_attempts, 'current', tried, 'month', this_month)::text]
            when before + nth > max_events then array['monthly_events', jsonb_build_object('limit', max_events,
              'current', greatest(before, least(before + nth - 1, max_events)), 'month', this_month)::text] end as verdict
        from placed
      )
      select array_agg(case when is_lost then 'key_lost' else verdict[1] end order by i), array_agg(verdict[1] order by i),
        array_agg(verdict[2]::jsonb order by i)
      into verdicts, second_verdicts, reasons from judged;
      update waybill.usage u set count = u.count - refused.n
      from (select tenant_id, count(*) as n from unnest(tenants, outcomes, verdicts) as u (tenant_id, out, verdict)
            where out is null and verdict is not null group by tenant_id) refused
      where u.tenant_id = refused.tenant_id and u.month = this_month and u.metric = 'events';
      delete from waybill.idempotency_keys k using unnest(tenants, keys, ids, verdicts) as u (tenant_id, key, id, verdict)
      where k.tenant_id = u.tenant_id and k.key = u.key and k.event_id = u.id and verdict is not null;
      outcomes := verdicts;
    end if;
    exit when verdicts is null or not verdicts && array['fanout', 'monthly_events', 'monthly_attempts'];
  end loop;

  -- 5. What is to be held is checked again with the endpoints locked: their held deliveries may have been released by now.
  -- Otherwise each batch of a busy tenant would be held because the one before was, although that is released all the time.
  if match_held @> array[true] then
    -- All endpoints, or the others would be locked out of order when their deliveries are counted.
    perform from waybill.endpoint_stats s
    join unnest(match_tenants, match_endpoints) as m (tenant_id, endpoint_id)
      on s.tenant_id = m.tenant_id and s.endpoint_id = m.endpoint_id
    order by s.tenant_id, s.endpoint_id for no key update of s;
    select array_agg(
      m.held and (coalesce(s.held > 0 or s.breaker <> 'closed', false) or e.ordered or e.max_per_second is not null) order by i),
      -- Or it would stand before what has been released.
      array_agg(greatest(m.tag, s.tag) order by i)
    into match_held, match_tags
    from unnest(match_tenants, match_endpoints, match_held, match_tags) with ordinality as m (tenant_id, endpoint_id, held, tag, i)
    left join lateral (
      select * from waybill.endpoints e where e.tenant_id = m.tenant_id and e.endpoint_id = m.endpoint_id offset 0
    ) e on true
    left join lateral (
      select * from waybill.endpoint_stats s where s.tenant_id = m.tenant_id and s.endpoint_id = m.endpoint_id offset 0
    ) s on true;
  end if;

  -- 6. Store.
  insert into waybill.events (tenant_id, event_id, event_type, payload, idempotency_key, delivery_count)
  select tenant_id, id, event_type, payload, key, coalesce(m.fanout, 0)
  from unnest(tenants, ids, types, payloads, keys, outcomes) as u (tenant_id, id, event_type, payload, key, out)
  left join (select tenant_id, event_type, count(*)::int as fanout from unnest(match_tenants, match_types) as u (tenant_id, event_type)
             group by tenant_id, event_type) m using (tenant_id, event_type)
  where out is null;
  with due as materialized (
    select i::int as i, tenant_id, id as event_id, event_type, endpoint_id, held, waybill.make_delivery_id(id) as delivery_id,
      tag + step * (row_number() over (partition by tenant_id, endpoint_id order by i) - 1 + phase) as tag, step
    from unnest(tenants, ids, types, outcomes) with ordinality as u (tenant_id, id, event_type, out, i)
    join unnest(match_tenants, match_types, match_endpoints, match_held, match_tags, match_steps, match_phases)
      as m (tenant_id, event_type, endpoint_id, held, tag, step, phase)
      using (tenant_id, event_type)
    where out is null
  ), bundled as materialized (
    -- Deliveries that stand beside one another in a turn share jobs, up to sixteen each.
    select *, case when not held and count(*) over job > 1 then waybill.bundle_id(first_value(delivery_id) over job) end as bundle
    from (select *, (row_number() over (partition by tenant_id, held, floor(tag) order by tag, i, delivery_id) - 1) / 16 as nth from due) d
    window job as (partition by tenant_id, held, floor(tag), nth order by tag, i, delivery_id
      rows between unbounded preceding and unbounded following)
  ), delivering as (
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, next_attempt_at, updated_at, bundle)
    select tenant_id, delivery_id, event_id, endpoint_id, event_type, held, case when not held then moment end, moment, bundle
    from bundled
  )
  select array_agg(i), array_agg(tenant_id), array_agg(delivery_id), array_agg(endpoint_id), array_agg(held), array_agg(tag),
    array_agg(step), array_agg(bundle)
  into new_items, new_tenants, new_ids, new_endpoints, new_held, new_tags, new_steps, new_bundles from bundled;

  -- 7. Queue what is not held. One notification for each batch, since it takes a global lock at commit.
  if new_held @> array[false] then
    perform waybill.enqueue_new(new_tenants, new_ids, new_tags, new_held, new_bundles);
    perform pg_notify('waybill_due', '');
  end if;
  if new_held @> array[true] then perform pg_notify('waybill_held', ''); end if;

  -- 8. Count what has not been counted, and the deliveries, tenants' rows before the endpoints': from here on other batches of the same
  -- tenants wait. An endpoint's tag moves on by what has been queued for it here, even if another batch has queued at these tags.
  if not counted_early then
    select * into rate_counts, window_starts, events_so_far
    from waybill.count_publishes(batch_tenants, request_counts, rates, this_window, this_month, tenants, outcomes);
    if exists (select from unnest(rates, rate_counts, max_events, events_so_far) as w (rate, count, most, published)
               where rate > 0 and count > rate or published > most) then
      raise serialization_failure using message = 'others have reached a limit meanwhile';
    end if;
  end if;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held, held_from, tag)
  select d.tenant_id, d.endpoint_id, count(*), count(*) filter (where d.held), case when bool_or(d.held) then waybill.held_from(ids[1]) end,
    coalesce(clock_tag + sum(d.step) filter (where not d.held), 0)
  from unnest(new_tenants, new_endpoints, new_held, new_steps) as d (tenant_id, endpoint_id, held, step)
  group by d.tenant_id, d.endpoint_id order by d.tenant_id, d.endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending, held = s.held + excluded.held,
    held_from = waybill.held_from_with(s.held, s.held_from, excluded.held_from),
    tag = case when excluded.tag > 0 then greatest(s.tag, clock_tag) + excluded.tag - clock_tag else s.tag end;

  -- 9. Answer. Only a taken key needs a look at what was there before.
  if taken = 0 then
    return query
    select i::int, coalesce(out, 'accepted'), id, case when out is null then coalesce(d.ids, '{}') end, reason,
      null::boolean, null::text, null::text,
      rates[w], case when rates[w] > 0 then rate_counts[w] - request_counts[w] + nth else 0 end::int, window_starts[w],
      ceil(extract(epoch from window_starts[w] + window_length - moment))::int
    from (
      select *, array_position(batch_tenants, tenant_id) as w, row_number() over (partition by tenant_id order by i) as nth
      from unnest(tenants, outcomes, ids, reasons) with ordinality as u (tenant_id, out, id, reason, i)
    ) u
    left join (select i, array_agg(id order by id) as ids from unnest(new_items, new_ids) as d (i, id) group by i) d using (i)
    order by i;
    return;
  end if;
  return query
  select i::int,
    case when out = 'key_lost' and o.event_id is null then coalesce(second, 'try_again')
      when out in ('key_taken', 'key_lost') then case when o.event_id is null then 'try_again' else 'key_taken' end
      else coalesce(out, 'accepted') end,
    coalesce(o.event_id, id),
    case when out is null then array(select d.id from unnest(new_items, new_ids) as d (i, id) where d.i = u.i order by 1)
         when o.event_id is not null then array(select d.delivery_id from waybill.deliveries d
           where d.tenant_id = u.tenant_id and d.event_id = o.event_id
             and d.delivery_id between waybill.first_delivery_id(o.event_id) and waybill.last_delivery_id(o.event_id) order by 1) end,
    u.reason, o.same_text, case when not o.same_text then o.event_type end, case when not o.same_text then o.payload end,
    rates[w], case when rates[w] > 0 then rate_counts[w] - request_counts[w] + nth else 0 end::int, window_starts[w],
    ceil(extract(epoch from window_starts[w] + window_length - moment))::int
  from (
    select *, array_position(batch_tenants, tenant_id) as w, row_number() over (partition by tenant_id order by i) as nth
    from unnest(tenants, types, payloads, keys, outcomes, ids, reasons, second_verdicts) with ordinality
      as u (tenant_id, event_type, payload, key, out, id, reason, second, i)
  ) u
  left join lateral (
    select e.event_id, e.event_type, e.payload, e.event_type = u.event_type and e.payload = u.payload as same_text
    from waybill.idempotency_keys k
    cross join lateral (select * from waybill.events e where e.tenant_id = k.tenant_id and e.event_id = k.event_id offset 0) e
    where out in ('key_taken', 'key_lost') and k.tenant_id = u.tenant_id and k.key = u.key
  ) o on true
  order by i;
end $$;
