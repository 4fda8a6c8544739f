-- Accepting events: a batch of requests, one transaction, one round trip. It is a function because each step decides what
-- the next may do, and because the tenant's counters stay locked from the first step to the commit.
--
-- Element i of the arrays is request i. A null type marks a request that was refused before (bad body): it counts against
-- the rate limit and nothing else. `limits` holds the service's own: rate, window_seconds, fanout, monthly_events,
-- monthly_attempts. One row comes back per request:
--   accepted          stored with its deliveries and jobs
--   counted           a null type, within the rate limit
--   key_taken         event_id is the event that has the key; same_text tells whether it is the same text,
--                     else original_type and original_payload are for comparing as JSON
--   try_again         lost its key to a request that was then refused: publish it again
--   rate_limited, fanout, monthly_events, monthly_attempts    refused; details say why
-- The last columns are where the request stands in its rate window (a rate_limit of 0 means there is none); window_left is in seconds.
create function waybill.publish(tenants text[], types text[], payloads text[], keys text[], limits jsonb)
returns table (item int, outcome text, event_id uuid, delivery_ids uuid[], details jsonb,
               same_text boolean, original_type text, original_payload text,
               rate_limit int, rate_count int, window_start timestamptz, window_left int)
language plpgsql
-- The same plan serves every batch; making one anew costs more than the batch itself.
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  moment constant timestamptz := clock_timestamp();
  this_month constant date := date_trunc('month', moment at time zone 'utc')::date;
  window_length constant interval := make_interval(secs => (limits ->> 'window_seconds')::int);
  this_window constant timestamptz := date_bin(window_length, moment, 'epoch');
  -- A microsecond apart, so that the order within the batch is the order of the ids.
  moment_us constant bigint := extract(epoch from moment) * 1000000;
  ids constant uuid[] := array(select waybill.make_id(moment_us + i) from generate_subscripts(tenants, 1) i order by i);
  outcomes text[];
  reasons jsonb[];
  rates int[];
  places int[];
  windows timestamptz[];
  jobs text;
  their_tenants text[];
  their_endpoints uuid[];
  holds boolean[];
  tags float8[];
begin
  -- 1. Rate limit. Requests that are refused count as well. This locks the tenants' rows, in order, until the commit.
  with asked as (
    select tenant_id, count(*)::int as n, coalesce((t.limits ->> 'events_write_rate')::int, (publish.limits ->> 'rate')::int) as most
    from unnest(tenants) as u (tenant_id) join waybill.tenants t using (tenant_id) group by tenant_id, t.limits
  ), counted as (
    insert into waybill.rate_windows as w (tenant_id, action, window_start, count)
    select tenant_id, 'events:write', this_window, n from asked where most > 0 order by tenant_id
    on conflict (tenant_id, action) do update set
      count = case when w.window_start < excluded.window_start then excluded.count else w.count + excluded.count end,
      window_start = greatest(w.window_start, excluded.window_start)
    returning tenant_id, window_start, count
  ), judged as (
    select i, most, coalesce(window_start, this_window) as window_start,
      coalesce(count - n + row_number() over (partition by tenant_id order by i), 0) as nth
    from unnest(tenants) with ordinality as u (tenant_id, i) join asked using (tenant_id) left join counted using (tenant_id)
  )
  select array_agg(case when nth > most then 'rate_limited' when types[i] is null then 'counted' end order by i),
         array_agg(most order by i), array_agg(nth order by i), array_agg(window_start order by i)
  into outcomes, rates, places, windows from judged;

  -- 2. Idempotency keys. A concurrent batch with the same key is waited for; its event is visible afterwards.
  if exists (select from unnest(keys, outcomes) as k (key, out) where key is not null and out is null) then
    with claimed as (
      insert into waybill.idempotency_keys (tenant_id, key, event_id)
      select tenants[i], keys[i], ids[i] from generate_subscripts(tenants, 1) i
      where keys[i] is not null and outcomes[i] is null order by tenants[i], keys[i], i
      on conflict do nothing
      returning event_id
    )
    select array_agg(case when outcomes[i] is null and keys[i] is not null and c.event_id is null then 'key_taken' else outcomes[i] end order by i)
    into outcomes from generate_subscripts(tenants, 1) i left join claimed c on c.event_id = ids[i];
  end if;

  -- 3. Match, judge by fan-out and quota, store. The month's count includes what the quota refuses until step 4.
  with wanted as (
    select i, tenants[i] as tenant_id, types[i] as event_type from generate_subscripts(tenants, 1) i where outcomes[i] is null
  ), matched as (
    -- Where deliveries are held, or paced, new ones stand in line behind them.
    select k.tenant_id, k.event_type, array_agg(e.endpoint_id) as endpoint_ids,
      array_agg(coalesce(s.held > 0 or s.breaker <> 'closed', false) or e.ordered or e.max_per_second is not null) as held,
      array_agg(greatest(s.tag, clock.tag)) as tags
    from (select distinct tenant_id, event_type from wanted) k
    join waybill.endpoints e on e.tenant_id = k.tenant_id and e.is_active and e.subscribed_events && array[k.event_type, '*']
    left join waybill.endpoint_stats s on s.tenant_id = e.tenant_id and s.endpoint_id = e.endpoint_id
    cross join waybill.queue_clock clock
    group by k.tenant_id, k.event_type
  ), busy as (
    -- A tenant's turn is shared by its endpoints that have a backlog.
    select s.tenant_id, greatest(1, count(*)) / 64.0 as step from waybill.endpoint_stats s
    where s.tenant_id in (select tenant_id from wanted) and s.pending + s.retrying - s.held > 64 group by s.tenant_id
  ), sized as (
    select w.*, m.endpoint_ids, m.held, m.tags, coalesce(b.step, 1 / 64.0) as step, coalesce(cardinality(m.endpoint_ids), 0) as fanout,
      coalesce((t.limits ->> 'max_fanout_endpoints')::int, (publish.limits ->> 'fanout')::int) as most_fanout,
      coalesce((t.limits ->> 'monthly_events')::bigint, (publish.limits ->> 'monthly_events')::bigint) as most_events,
      coalesce((t.limits ->> 'monthly_attempts')::bigint, (publish.limits ->> 'monthly_attempts')::bigint) as most_attempts,
      coalesce(a.count, 0) as attempts
    from wanted w
    join waybill.tenants t using (tenant_id)
    left join matched m using (tenant_id, event_type)
    left join busy b using (tenant_id)
    left join waybill.usage a on a.tenant_id = w.tenant_id and a.month = this_month and a.metric = 'attempts'
  ), fitting as (
    select *, row_number() over (partition by tenant_id order by i) as nth, count(*) over (partition by tenant_id) as n
    from sized where fanout <= most_fanout and attempts < most_attempts
  ), used as (
    insert into waybill.usage as u (tenant_id, month, metric, count)
    select tenant_id, this_month, 'events', count(*) from fitting group by tenant_id order by tenant_id
    on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
    returning tenant_id, count
  ), accepted as (
    select f.* from fitting f join used u using (tenant_id) where u.count - f.n + f.nth <= f.most_events
  ), stored as (
    insert into waybill.events (tenant_id, event_id, event_type, payload, idempotency_key, delivery_count)
    select tenant_id, ids[i], event_type, payloads[i], keys[i], fanout from accepted
  ), due as materialized (
    select a.tenant_id, a.i, a.event_type, m.endpoint_id, m.held, waybill.make_delivery_id(ids[a.i]) as delivery_id,
      m.tag + a.step * row_number() over (partition by a.tenant_id, m.endpoint_id order by a.i) as tag
    from accepted a cross join lateral unnest(a.endpoint_ids, a.held, a.tags) as m (endpoint_id, held, tag)
  ), delivering as (
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, next_attempt_at, updated_at)
    select tenant_id, delivery_id, ids[i], endpoint_id, event_type, held, case when not held then moment end, moment from due
  ), queued as (
    select json_agg(json_build_object('id', delivery_id, 'priority', -floor(tag)::int, 'data', json_build_object('tenant_id', tenant_id, 'tag', tag))
                    order by tag) filter (where not held) as jobs,
      array_agg(tenant_id) as tenant_ids, array_agg(endpoint_id) as endpoint_ids, array_agg(held) as holds, array_agg(tag) as tags
    from due
  ), per_event as (
    select ids[i] as event_id, array_agg(delivery_id order by delivery_id) as delivery_ids from due group by i
  ), verdicts as (
    select s.i,
      case when s.fanout > s.most_fanout then 'fanout' when s.attempts >= s.most_attempts then 'monthly_attempts'
           when a.i is null then 'monthly_events' else 'accepted' end as verdict,
      case when s.fanout > s.most_fanout then jsonb_build_object('limit', s.most_fanout, 'current', s.fanout)
           when s.attempts >= s.most_attempts then jsonb_build_object('limit', s.most_attempts, 'current', s.attempts)
           when a.i is null then jsonb_build_object('limit', s.most_events, 'current', greatest(u.count - f.n, least(u.count - f.n + f.nth - 1, s.most_events)))
           else coalesce(to_jsonb(d.delivery_ids), '[]') end as detail
    from sized s left join fitting f using (i) left join used u on u.tenant_id = s.tenant_id left join accepted a using (i)
    left join per_event d on d.event_id = ids[s.i]
  )
  select array_agg(coalesce(v.verdict, outcomes[i]) order by i), array_agg(v.detail order by i),
    max(q.jobs::text), max(q.tenant_ids), max(q.endpoint_ids), max(q.holds), max(q.tags)
  into outcomes, reasons, jobs, their_tenants, their_endpoints, holds, tags
  from generate_subscripts(tenants, 1) i left join verdicts v using (i) cross join queued q;

  -- 4. What was refused gives its key and its place in the month back.
  if outcomes && array['fanout', 'monthly_events', 'monthly_attempts'] then
    delete from waybill.idempotency_keys k using generate_subscripts(tenants, 1) i
    where k.tenant_id = tenants[i] and k.key = keys[i] and k.event_id = ids[i]
      and outcomes[i] in ('fanout', 'monthly_events', 'monthly_attempts');
    update waybill.usage u set count = u.count - refused.n
    from (select tenants[i] as tenant_id, count(*) as n from generate_subscripts(tenants, 1) i where outcomes[i] = 'monthly_events' group by 1) refused
    where u.tenant_id = refused.tenant_id and u.month = this_month and u.metric = 'events';
  end if;

  -- 5. Queue what is not held and count it all; the endpoints' rows are taken last, because they are the busiest. One
  -- notification a batch, since it takes a global lock at commit.
  if jobs is not null then
    perform waybill.enqueue(jobs);
    perform pg_notify('waybill_due', '');
  end if;
  if holds @> array[true] then perform pg_notify('waybill_held', ''); end if;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held, tag)
  select d.tenant_id, d.endpoint_id, count(*), count(*) filter (where d.held), coalesce(max(d.tag) filter (where not d.held), 0)
  from unnest(their_tenants, their_endpoints, holds, tags) as d (tenant_id, endpoint_id, held, tag)
  group by d.tenant_id, d.endpoint_id order by d.tenant_id, d.endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending, held = s.held + excluded.held, tag = greatest(s.tag, excluded.tag);

  -- 6. Answer. Only a taken key needs a look at what was there before.
  if not outcomes @> array['key_taken'] then
    return query select i, outcomes[i], ids[i],
      case when outcomes[i] = 'accepted' then array(select d::uuid from jsonb_array_elements_text(reasons[i]) d) end,
      case when outcomes[i] <> 'accepted' then reasons[i] end, null::boolean, null::text, null::text,
      rates[i], places[i], windows[i], ceil(extract(epoch from windows[i] + window_length - moment))::int
    from generate_subscripts(tenants, 1) i order by i;
    return;
  end if;
  return query
  select i, case when outcomes[i] = 'key_taken' and o.event_id is null then 'try_again' else outcomes[i] end,
    coalesce(o.event_id, ids[i]),
    case when outcomes[i] = 'accepted' then array(select d::uuid from jsonb_array_elements_text(reasons[i]) d)
         when o.event_id is not null then array(select d.delivery_id from waybill.deliveries d
           where d.tenant_id = tenants[i] and d.event_id = o.event_id
             and d.delivery_id between waybill.first_delivery_id(o.event_id) and waybill.last_delivery_id(o.event_id) order by 1) end,
    case when outcomes[i] <> 'accepted' then reasons[i] end,
    o.same_text, case when not o.same_text then o.event_type end, case when not o.same_text then o.payload end,
    rates[i], places[i], windows[i], ceil(extract(epoch from windows[i] + window_length - moment))::int
  from generate_subscripts(tenants, 1) i
  left join lateral (
    select e.event_id, e.event_type, e.payload, e.event_type = types[i] and e.payload = payloads[i] as same_text
    from waybill.idempotency_keys k join waybill.events e on e.tenant_id = k.tenant_id and e.event_id = k.event_id
    where outcomes[i] = 'key_taken' and k.tenant_id = tenants[i] and k.key = keys[i]
  ) o on true
  order by i;
end $$;
