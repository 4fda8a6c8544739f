-- Moves the counts of deliveries by status: each element of the arrays is one change of one endpoint's count.
create or replace function waybill.count_deliveries(tenants text[], endpoints uuid[], statuses waybill.delivery_status[], changes int[])
returns void language sql as $$
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, dead_lettered)
  select tenant_id, endpoint_id,
    coalesce(sum(change) filter (where status = 'pending'), 0),
    coalesce(sum(change) filter (where status = 'retrying'), 0),
    coalesce(sum(change) filter (where status = 'delivered'), 0),
    coalesce(sum(change) filter (where status = 'dead_lettered'), 0)
  from unnest(tenants, endpoints, statuses, changes) as c (tenant_id, endpoint_id, status, change)
  group by tenant_id, endpoint_id
  order by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending,
    retrying = s.retrying + excluded.retrying,
    delivered = s.delivered + excluded.delivered,
    dead_lettered = s.dead_lettered + excluded.dead_lettered
$$;

-- Where to look for held deliveries from (endpoint_stats.held_from), if this is the oldest: an hour earlier, since what was published before
-- it may be stored after it.
create or replace function waybill.held_from(oldest uuid) returns uuid language sql immutable parallel safe as $$
  select waybill.first_id(waybill.made_at(oldest) - interval '1 hour')
$$;

-- The same once some are added to those that an endpoint has: `added` is where these are, null if there are none. What is not known of those
-- that it has stays so.
create or replace function waybill.held_from_with(held bigint, known uuid, added uuid) returns uuid language sql immutable parallel safe as $$
  select case when added is null then known when held = 0 then added when known is not null then least(known, added) end
$$;

-- Counts deliveries that are held from now on, though they were published before.
create or replace function waybill.count_held(tenants text[], endpoints uuid[], deliveries uuid[]) returns void language sql as $$
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, held, held_from)
  -- As text: Postgres has had the least of uuids only since 18.
  select tenant_id, endpoint_id, count(*), waybill.held_from(min(id::text)::uuid) from unnest(tenants, endpoints, deliveries) as c (tenant_id, endpoint_id, id)
  group by tenant_id, endpoint_id order by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    held = s.held + excluded.held, held_from = waybill.held_from_with(s.held, s.held_from, excluded.held_from)
$$;

-- Counts a batch's requests against its tenants' rate windows, and what will be stored of it against their month. Returns, for each
-- of `batch_tenants`, which are in order, where its window stands, when that began, and how many events its month has. Only waybill.publish
-- calls it, whose planner's settings hold here, too.
create or replace function waybill.count_publishes(batch_tenants text[], request_counts int[], rates int[], this_window timestamptz,
  this_month date, tenants text[], outcomes text[], out rate_counts int[], out window_starts timestamptz[], out events_so_far bigint[])
language plpgsql
as $$
begin
  with tallied as (
    insert into waybill.rate_windows as w (tenant_id, action, window_start, count)
    select tenant_id, 'events:write', this_window, n from unnest(batch_tenants, request_counts, rates) as a (tenant_id, n, rate)
    where rate > 0 order by tenant_id
    on conflict (tenant_id, action) do update set
      count = case when w.window_start < excluded.window_start then excluded.count else w.count + excluded.count end,
      window_start = greatest(w.window_start, excluded.window_start)
    returning tenant_id, window_start, count
  )
  select array_agg(coalesce(count, 0) order by tenant_id), array_agg(coalesce(window_start, this_window) order by tenant_id)
  into rate_counts, window_starts
  from unnest(batch_tenants) as b (tenant_id) left join tallied using (tenant_id);
  with used as (
    insert into waybill.usage as u (tenant_id, month, metric, count)
    select tenant_id, this_month, 'events', count(*) from unnest(tenants, outcomes) as r (tenant_id, outcome)
    where outcome is null group by tenant_id order by tenant_id
    on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
    returning tenant_id, count
  )
  select array_agg(coalesce(count, 0) order by tenant_id) into events_so_far
  from unnest(batch_tenants) as b (tenant_id) left join used using (tenant_id);
end $$;
