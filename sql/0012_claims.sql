-- Claiming goes on from where it has got to. What has gone through the queue stays in its index until it is vacuumed, which an
-- old snapshot (a dump, a long report) puts off by hours; a claim that starts at the head of the queue steps over all of it:
-- 0.4 us a job, every time. So claims start at the clock, what comes back to the queue comes back there, and only now and
-- then does one start at the head, for what should have been left behind. Likewise with claims that have lapsed.

-- How far claiming has got: among first attempts waybill.queue_clock says it, among retries `retry`, the lowest priority that
-- was claimed. And how far it had got 3 to 6 seconds ago (`old_…`), where claims start: no transaction that queues by what it
-- has read lasts longer. A table of its own, since adding columns to waybill.queue_clock would wait for a dump that is
-- running, and claims would wait for that.
create table waybill.claim_marks (
  retry int not null,
  since timestamptz not null,
  old_tag float8 not null,
  old_retry int not null,
  next_tag float8 not null,
  next_retry int not null
) with (fillfactor = 50);
insert into waybill.claim_marks values (-1400000000, '-infinity', 0, -1400000000, 0, -1400000000);

-- Claims at most `most` due jobs, first attempts or retries, and reads what their attempts need. Unless `thorough`, it starts
-- where claiming had got to a moment ago. Every one that may be sent is counted against its tenant's month here, before it is
-- sent, so that the quota holds however many workers claim at once; what goes beyond it (within_quota) is not an attempt and
-- is taken out again when it is recorded. `sendable` is false where the endpoint takes nothing now; status is null where
-- the delivery is gone.
create function waybill.claim(retries boolean, thorough boolean, most int, monthly_attempts bigint)
returns table (tenant_id text, delivery_id uuid, retry_count int, slot float8, status waybill.delivery_status, attempt_count int,
               earlier_attempts int, event_id uuid, event_type text, payload text, endpoint_id uuid, url text, signing_secret bytea,
               previous_secret bytea, at_once int, sendable boolean, within_quota boolean, now timestamptz)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  -- Retries stand below every first attempt (waybill.retry_priority).
  last_first constant int := -1399999999;
  tenants text[];
  ids uuid[];
  tries int[];
  slots float8[];
  newest float8;
  lowest int;
  top int;
begin
  select case
      when thorough then case when retries then last_first - 1 else 2147483647 end
      when retries then least(last_first - 1, greatest(old_retry, waybill.retry_priority(now())))
      -- The clock itself may have been set back (waybill.rebase_queue).
      else -floor(least(old_tag, tag))::int
    end
  into top from waybill.claim_marks, waybill.queue_clock;
  select array_agg(data ->> 'tenant_id' order by id), array_agg(id order by id), array_agg(retry_count order by id),
    array_agg((data ->> 'slot')::float8 order by id), max((data ->> 'tag')::float8), min(priority)
  into tenants, ids, tries, slots, newest, lowest
  from waybill.fetch_due(case when retries then waybill.retry_priority(now()) else last_first end, top, most);
  if ids is null then return; end if;

  return query
  with found as (
    select j.*, d.status, d.attempt_count, d.earlier_attempts, d.event_id, d.event_type, e.payload, d.endpoint_id, p.url, p.signing_secret,
      case when p.previous_secret_expires_at > now() then p.previous_secret end as previous_secret,
      case when p.ordered then 1 when s.breaker = 'open' then 1 when s.breaker = 'half_open' then s.ramp end as at_once,
      d.status in ('pending', 'retrying') and p.is_active
        and (s.breaker is distinct from 'open' or s.probing = d.delivery_id)
        -- A slot is good for one attempt, and a worker that comes late to it must not crowd those of the next ones.
        and (p.max_per_second is null or coalesce(j.slot > extract(epoch from now()) * 1000 - 250, false)) as sendable
    from unnest(tenants, ids, tries, slots) as j (tenant_id, delivery_id, retry_count, slot)
    left join lateral (
      select * from waybill.deliveries d where d.tenant_id = j.tenant_id and d.delivery_id = j.delivery_id
        and d.delivery_id between waybill.first_delivery_id(ids[1]) and waybill.last_delivery_id(ids[cardinality(ids)]) offset 0
    ) d on true
    left join lateral (
      select payload from waybill.events e where e.tenant_id = d.tenant_id and e.event_id = d.event_id
        and e.event_id between waybill.first_delivery_id(ids[1]) and waybill.last_delivery_id(ids[cardinality(ids)]) offset 0
    ) e on true
    left join lateral (
      select * from waybill.endpoints p where p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id offset 0
    ) p on true
    left join lateral (
      select * from waybill.endpoint_stats s where s.tenant_id = d.tenant_id and s.endpoint_id = d.endpoint_id offset 0
    ) s on true
  ), metered as (
    insert into waybill.usage as u (tenant_id, month, metric, count)
    select tenant_id, date_trunc('month', now() at time zone 'utc')::date, 'attempts', count(*)
    from found where sendable group by tenant_id order by tenant_id
    on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
    returning tenant_id, count
  )
  select f.*,
    m.count - count(*) filter (where f.sendable) over (partition by f.tenant_id)
      + count(*) filter (where f.sendable) over (partition by f.tenant_id order by f.delivery_id)
      <= coalesce((t.limits ->> 'monthly_attempts')::bigint, monthly_attempts),
    clock_timestamp()
  from found f left join waybill.tenants t using (tenant_id) left join metered m using (tenant_id);

  -- Whoever holds one of these rows sets it at this moment: to wait for them, with jobs in hand, could be to wait for each
  -- other.
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
  set since = now(), old_tag = m.next_tag, next_tag = c.tag, old_retry = m.next_retry, next_retry = m.retry
  from waybill.queue_clock c
  where m.ctid = (select ctid from waybill.claim_marks where since not between now() - interval '3 seconds' and now() for update skip locked);
end $$;

-- The place in the queue for what was claimed from `priority` and comes back: where claiming has got to, before all that waits.
create function waybill.place_again(priority int) returns int language sql stable as $$
  select case when priority > -1400000000 then -floor(tag)::int else greatest(retry, waybill.retry_priority(now())) end
  from waybill.queue_clock, waybill.claim_marks
$$;

-- Of workers that were lost: what nobody has touched for `lapse`, at most `most` of it, is due at once, before all that waits. The
-- next claim counts as a retry, which is pg-boss's fence against the worker that was only thought lost. `crashes` is how many
-- attempts in a row have no record. From `suspect` of them on, or with no retry left, the job is not due: it is for the caller
-- to fail it, which from `poison` on leaves it no retry. Unless `thorough`, what was touched within the last minute is all that
-- is looked at.
create function waybill.take_back(lapse interval, suspect int, poison int, most int, thorough boolean)
returns table (tenant_id text, delivery_id uuid, retry_count int, crashes int, due_now boolean) language sql
-- By index alone, whatever the statistics say of a queue that changes faster than they do.
set enable_seqscan = off set enable_bitmapscan = off
as $$
  with lapsed as (
    -- What somebody settles at this moment is not lost.
    select id, data ->> 'tenant_id' as tenant_id, retry_count, retry_limit from pgboss.job
    where name = 'deliveries' and state = 'active' and heartbeat_on < now() - lapse
      and heartbeat_on > case when thorough then '-infinity' else now() - interval '1 minute' end
    limit most for update skip locked
  ), judged as (
    select l.*, coalesce(l.retry_count + 1 - (d.attempt_count - d.earlier_attempts), 1) as crashes
    from lapsed l left join waybill.deliveries d on d.tenant_id = l.tenant_id and d.delivery_id = l.id
  ), decided as (
    select *, crashes < suspect and retry_count < retry_limit as due_now from judged
  )
  update pgboss.job j set
    state = case when due_now then 'retry' else j.state end,
    start_after = case when due_now then now() else j.start_after end,
    priority = case when due_now then waybill.place_again(j.priority) else j.priority end,
    heartbeat_on = case when due_now then null else j.heartbeat_on end,
    retry_limit = case when crashes >= poison then j.retry_count else j.retry_limit end
  from decided d where j.name = 'deliveries' and j.id = d.id
  returning d.tenant_id, d.id, d.retry_count, d.crashes, d.due_now
$$;

-- As it was, but for the place: gives claims back as if they had not been made, due at once, no retry spent, nothing
-- counted. Only what is still claimed as it was is touched; answers with how many.
create or replace function waybill.unclaim(ids uuid[], retry_counts int[]) returns bigint language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  tenants text[];
begin
  with given as (
    -- started_on decides whether pg-boss's next fetch counts a retry.
    update pgboss.job j set state = 'created', started_on = null, heartbeat_on = null, priority = waybill.place_again(j.priority)
    from unnest(ids, retry_counts) as u (id, retry_count)
    where j.name = 'deliveries' and j.id = any(ids) and j.id = u.id and j.retry_count = u.retry_count and j.state = 'active'
    returning j.data ->> 'tenant_id' as tenant_id
  )
  select coalesce(array_agg(tenant_id), '{}') into tenants from given;
  perform waybill.refund_attempts(tenants);
  return cardinality(tenants);
end $$;
