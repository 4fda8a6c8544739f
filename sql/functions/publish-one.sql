-- Accepts a lone event, as most are while there is no rush: by values instead of arrays, which takes half as long. Only the plain
-- case: if the event may reach a limit, has an idempotency key that is taken, or goes to other than one endpoint, or to one whose
-- deliveries are held, no row comes back and nothing is stored, and waybill.publish has to do it. What this stores, its order of
-- locks, the columns of its row and the numbers of its steps are as there.
create or replace function waybill.publish_one(tenant text, type text, body text, key text, defaults jsonb)
returns table (event_id uuid, delivery_ids uuid[], rate_limit int, rate_count int, window_start timestamptz, window_left int)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  moment constant timestamptz := clock_timestamp();
  this_month constant date := date_trunc('month', moment at time zone 'utc')::date;
  window_length constant interval := make_interval(secs => (defaults ->> 'window_seconds')::int);
  event constant uuid := waybill.make_id(moment);
  delivery constant uuid := waybill.make_delivery_id(event);
  its record;
  match record;
  published bigint;
begin
  -- 1. Limits.
  select *, rate > 0 and count >= rate or fanout < 1 or published >= per_month or tried >= attempts_per_month as is_near into its
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

  -- 3. Match.
  select endpoint_id, ordered or max_per_second is not null or coalesce(held > 0 or breaker <> 'closed', false) as holds,
    greatest(s.tag, clock.tag) as tag, clock.tag as clock, count(*) over () as fanout,
    (select greatest(1, sum(least(64, b.pending + b.retrying - b.held)) / 64.0) / 64.0 from waybill.endpoint_stats b
      where b.tenant_id = tenant and b.pending + b.retrying > b.held) as step
  into match
  from (select * from waybill.endpoints where tenant_id = tenant and is_active and subscribed_events && array[type, '*'] offset 0) e
  left join lateral (
    select * from waybill.endpoint_stats s where s.tenant_id = tenant and s.endpoint_id = e.endpoint_id offset 0
  ) s using (endpoint_id)
  cross join waybill.queue_clock clock;
  if match.fanout is distinct from 1 or match.holds then return; end if;

  -- 2. Its idempotency key. This late it has nothing to undo.
  if key is not null then
    insert into waybill.idempotency_keys (tenant_id, key, event_id) values (tenant, key, event) on conflict do nothing;
    if not found then return; end if;
  end if;

  -- 6. Store.
  insert into waybill.events (tenant_id, event_id, event_type, payload, idempotency_key, delivery_count)
  values (tenant, event, type, body, key, 1);
  insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, next_attempt_at, updated_at)
  values (tenant, delivery, event, match.endpoint_id, type, false, moment, moment);

  -- 7. Queue.
  perform waybill.enqueue_one(tenant, delivery, match.tag + match.step);
  perform pg_notify('waybill_due', '');

  -- 8. Count.
  rate_limit := its.rate;
  window_start := date_bin(window_length, moment, 'epoch');
  if rate_limit > 0 then
    insert into waybill.rate_windows as w (tenant_id, action, window_start, count) values (tenant, 'events:write', window_start, 1)
    on conflict (tenant_id, action) do update set
      count = case when w.window_start < excluded.window_start then excluded.count else w.count + excluded.count end,
      window_start = greatest(w.window_start, excluded.window_start)
    returning w.window_start, w.count into window_start, rate_count;
  end if;
  insert into waybill.usage as u (tenant_id, month, metric, count) values (tenant, this_month, 'events', 1)
  on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
  returning u.count into published;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held, tag)
  values (tenant, match.endpoint_id, 1, 0, match.clock + match.step)
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + 1, tag = greatest(s.tag, match.clock) + match.step;
  if rate_count > rate_limit or published > its.per_month then
    raise serialization_failure using message = 'others have reached a limit meanwhile';
  end if;

  event_id := event;
  delivery_ids := array[delivery];
  rate_count := coalesce(rate_count, 0);
  window_left := ceil(extract(epoch from window_start + window_length - moment));
  return next;
end $$;
