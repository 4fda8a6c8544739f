-- Claims at most `most` due jobs, first attempts or retries, and reads what their attempts need. Unless `thorough`, it starts
-- where claiming had got to a moment ago. Every one that may be sent is counted against its tenant's month here, before it is
-- sent, so that the quota holds however many workers claim at once; what goes beyond it (within_quota) is not an attempt and
-- is taken out again when it is recorded. `sendable` is not true where the endpoint takes nothing now; status is null where the
-- delivery is gone.
--
-- It is a function because planning it takes as long as the work itself. A plan that is kept must be right however the tables
-- grow: rows are looked up by `lateral (… offset 0)`, which leaves the planner no other way than one index look-up for each.
create or replace function waybill.claim(retries boolean, thorough boolean, most int, monthly_attempts bigint)
returns table (tenant_id text, delivery_id uuid, retry_count int, slot float8, status waybill.delivery_status, attempt_count int,
               earlier_attempts int, event_id uuid, event_type text, payload text, endpoint_id uuid, url text, signing_secret bytea,
               previous_secret bytea, at_once int, sendable boolean, within_quota boolean, now timestamptz)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  first_retry constant int := waybill.first_retry();
  tenants text[];
  ids uuid[];
  -- What the partitions that they are in are found by.
  first_id uuid;
  last_id uuid;
  tries int[];
  slots float8[];
  newest float8;
  lowest int;
  top int;
begin
  select case
      when thorough then case when retries then first_retry else 2147483647 end
      when retries then least(first_retry, greatest(old_retry, waybill.retry_priority(now())))
      -- The clock itself may have been set back (waybill.rebase_queue).
      else -floor(least(old_tag, tag))::int
    end
  into top from waybill.claim_marks, waybill.queue_clock;
  select array_agg(data ->> 'tenant_id' order by id), array_agg(id order by id), array_agg(retry_count order by id),
    array_agg((data ->> 'slot')::float8 order by id), max((data ->> 'tag')::float8), min(priority)
  into tenants, ids, tries, slots, newest, lowest
  from waybill.fetch_due(case when retries then waybill.retry_priority(now()) else first_retry + 1 end, top, most);
  if ids is null then return; end if;
  first_id := waybill.first_delivery_id(ids[1]);
  last_id := waybill.last_delivery_id(ids[cardinality(ids)]);

  return query
  with found as materialized (
    select j.*, d.status, d.attempt_count, d.earlier_attempts, d.event_id, d.event_type, e.payload, d.endpoint_id, p.url,
      p.signing_secret,
      case when p.previous_secret_expires_at > now() then p.previous_secret end as previous_secret,
      case when p.ordered then 1 when s.breaker = 'open' then 1 when s.breaker = 'half_open' then s.ramp end as at_once,
      d.status in ('pending', 'retrying') and p.is_active
        and (s.breaker is distinct from 'open' or s.probing = d.delivery_id)
        -- A slot is good for one attempt, and a worker that comes late to it must not crowd those of the next ones.
        and (p.max_per_second is null or coalesce(j.slot > extract(epoch from now()) * 1000 - 250, false))
        -- An endpoint that is ordered since a moment ago has more than one in the queue.
        and (not p.ordered or waybill.is_oldest(d.tenant_id, d.endpoint_id, d.delivery_id)) as sendable
    from unnest(tenants, ids, tries, slots) as j (tenant_id, delivery_id, retry_count, slot)
    left join lateral (
      select * from waybill.deliveries d where d.tenant_id = j.tenant_id and d.delivery_id = j.delivery_id
        and d.delivery_id between first_id and last_id offset 0
    ) d on true
    left join lateral (
      select payload from waybill.events e where e.tenant_id = d.tenant_id and e.event_id = d.event_id
        and e.event_id between first_id and last_id offset 0
    ) e on true
    left join lateral (
      select * from waybill.endpoints p where p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id offset 0
    ) p on true
    left join lateral (
      select * from waybill.endpoint_stats s where s.tenant_id = d.tenant_id and s.endpoint_id = d.endpoint_id offset 0
    ) s on true
  ), counted as (
    insert into waybill.usage as u (tenant_id, month, metric, count)
    select tenant_id, date_trunc('month', now() at time zone 'utc')::date, 'attempts', count(*)
    from found where sendable group by tenant_id order by tenant_id
    on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
    returning tenant_id, count
  ), metered as (
    -- How many of these are beyond the quota: the last ones.
    select tenant_id, c.count - coalesce((t.limits ->> 'monthly_attempts')::bigint, monthly_attempts) as beyond
    from counted c join waybill.tenants t using (tenant_id)
  )
  select f.*,
    case when m.beyond <= 0 then true
         else m.beyond <= (select count(*) from found l
           where l.tenant_id = f.tenant_id and l.sendable and l.delivery_id > f.delivery_id) end,
    clock_timestamp()
  from found f left join metered m using (tenant_id);

  -- A row that is locked is passed over: who has it sets it as we would. To wait for it, with jobs in hand, could be to wait for
  -- each other.
  if retries then
    -- Below what is due now, it is from before the database's clock was set back.
    update waybill.claim_marks set retry = lowest where ctid = (
      select ctid from waybill.claim_marks where retry > lowest or retry < waybill.retry_priority(now()) for update skip locked);
  else
    -- A tag from before the clock was set back (waybill.rebase_queue) is far ahead, and must not undo it.
    update waybill.queue_clock set tag = newest
    where ctid = (select ctid from waybill.queue_clock where tag < newest and tag > newest - 1e7 for update skip locked);
  end if;
  update waybill.claim_marks m
  -- By the time at which the clock was read: this may have waited for seconds.
  set since = clock_timestamp(), old_tag = m.next_tag, next_tag = c.tag, old_retry = m.next_retry, next_retry = m.retry
  from waybill.queue_clock c
  where m.ctid = (
    select ctid from waybill.claim_marks where since not between clock_timestamp() - interval '3 seconds' and clock_timestamp() for update skip locked);
end $$;

-- Whether an ordered endpoint has nothing older that is not finished. By index, whether that is held or not. A function of its
-- own, since within waybill.claim each claim would open the indexes of every day, which takes longer than the rest of it.
create or replace function waybill.is_oldest(tenant text, endpoint uuid, delivery uuid) returns boolean language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return not exists (
    select from waybill.deliveries where tenant_id = tenant and endpoint_id = endpoint
      and status in ('pending', 'retrying') and not held and delivery_id < delivery) and not exists (
    select from waybill.deliveries where tenant_id = tenant and endpoint_id = endpoint
      and status in ('pending', 'retrying') and held and delivery_id < delivery);
end $$;

-- Says of claims that their worker is alive. In the order of their ids, and without those that somebody settles at this
-- moment: to wait for them with others in hand could be to wait for each other.
create or replace function waybill.touch(ids uuid[], retry_counts int[]) returns void language sql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
  with claimed as (
    select j.id from pgboss.job j join unnest(ids, retry_counts) as u (id, retry_count) on j.id = u.id and j.retry_count = u.retry_count
    where j.name = 'deliveries' and j.id = any(ids) and j.state = 'active'
    order by j.id for no key update of j skip locked
  )
  update pgboss.job j set heartbeat_on = now() from claimed c where j.name = 'deliveries' and j.id = c.id
$$;
