-- Claims at most `most` due deliveries, first attempts or retries, and reads what their attempts need. Unless `thorough`, it starts
-- where claiming had got to a moment ago. Every one that may be sent is counted against its tenant's month here, before it is
-- sent, so that the quota holds however many workers claim at once; what goes beyond it (not within_quota) is not attempted, and
-- is taken off the count when that is recorded. `sendable` is not true where the endpoint takes nothing now, and `standing`
-- is what is known of it (waybill.standing); status is null where the delivery is gone, or no longer in its bundle. `bundle`
-- is the job that a delivery shares, null if it has its own; `probed` is true where the endpoint's breaker is not closed. `leads`
-- marks the first delivery of each endpoint, and `more` tells whether further ones may be due. Of the tenants `crowding`, only those whose
-- endpoint is well or takes a few at a time may start. The caller puts the others off, and they are not counted (within_quota is null): as
-- they come again all the time, their month would seem to be used up too early.
--
-- It is a function because planning it takes as long as the work itself. A plan that is kept must be right however the tables
-- grow: rows are looked up by `lateral (… offset 0)`, which leaves the planner no other way than one index look-up for each.
create or replace function waybill.claim_due(retries boolean, thorough boolean, most int, monthly_attempts bigint, crowding text[] default '{}')
returns table (tenant_id text, delivery_id uuid, retry_count int, slot float8, bundle uuid, status waybill.delivery_status, attempt_count int,
               earlier_attempts int, event_id uuid, event_type text, payload text, endpoint_id uuid, leads boolean, url text,
               signing_secret bytea, previous_secret bytea, at_once int, probed boolean, standing text, sendable boolean, within_quota boolean,
               now timestamptz, more boolean)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  first_retry constant int := waybill.first_retry();
  tenants text[];
  ids uuid[];
  -- The bounds by which their partitions are found.
  first_id uuid;
  last_id uuid;
  tries int[];
  slots float8[];
  bundles uuid[];
  priorities int[];
  newest float8;
  lowest int;
  top int;
  bottom int;
  fit record;
  surplus uuid[];
  unclaimed uuid[];
begin
  select case
      when thorough then case when retries then first_retry else 2147483647 end
      when retries then least(first_retry, greatest(old_retry, waybill.retry_priority(now())))
      -- The clock itself may have been set back (waybill.rebase_queue).
      else -floor(least(old_tag, tag))::int
    end
  into top from waybill.claim_marks, waybill.queue_clock;
  bottom := case when retries then waybill.retry_priority(now()) else first_retry + 1 end;
  select * into fit from waybill.fit_jobs(bottom, top, most);
  if fit.jobs = 0 then return; end if;
  select array_agg(tenant_id), array_agg(id), array_agg(retry_count), array_agg(slot), array_agg(bundle), array_agg(priority), max(tag),
    min(priority)
  into tenants, ids, tries, slots, bundles, priorities, newest, lowest
  from (
    select j.data ->> 'tenant_id' as tenant_id, coalesce(m.id::uuid, j.id) as id, j.retry_count, (j.data ->> 'slot')::float8 as slot,
      case when m.id is not null then j.id end as bundle, j.priority, (j.data ->> 'tag')::float8 as tag
    from waybill.fetch_due(bottom, top, fit.jobs) j left join lateral jsonb_array_elements_text(j.data -> 'ids') as m (id) on true
    order by 2
  ) claimed;
  if ids is null then return; end if;
  if cardinality(ids) > most then
    -- The first bundle alone holds more, or others have claimed jobs that were counted above, and larger ones came in their
    -- place. What is too much goes back to its place: whole bundles as they were, and part of one as jobs of their own.
    surplus := array(select id from unnest(ids, bundles, priorities) as u (id, bundle, priority) where bundle is not null
      order by priority, bundle desc, id desc limit cardinality(ids) - most);
    unclaimed := array(select bundle from unnest(ids, bundles) as u (id, bundle) where bundle is not null
      group by bundle having bool_and(id = any(surplus)));
    update pgboss.job set state = 'created', started_on = null, heartbeat_on = null where name = 'deliveries' and id = any(unclaimed);
    perform waybill.unbundle(array_agg(tenant_id), array_agg(bundle), array_agg(id), false)
    from unnest(tenants, bundles, ids) as u (tenant_id, bundle, id) where id = any(surplus) and bundle <> all(unclaimed) having count(*) > 0;
    select array_agg(tenant_id), array_agg(id), array_agg(retry_count), array_agg(slot), array_agg(bundle)
    into tenants, ids, tries, slots, bundles
    from unnest(tenants, ids, tries, slots, bundles) as u (tenant_id, id, retry_count, slot, bundle) where id <> all(surplus);
  end if;
  first_id := waybill.first_delivery_id(ids[1]);
  last_id := waybill.last_delivery_id(ids[cardinality(ids)]);

  return query
  with found as materialized (
    select j.*, d.status, d.held, d.attempt_count, d.earlier_attempts, d.event_id, d.event_type, e.payload, d.endpoint_id
    from unnest(tenants, ids, tries, slots, bundles) as j (tenant_id, delivery_id, retry_count, slot, bundle)
    left join lateral (
      select * from waybill.deliveries d where d.tenant_id = j.tenant_id and d.delivery_id = j.delivery_id
        and d.delivery_id between first_id and last_id offset 0
    -- A delivery that was taken out of its bundle by hand has or gets a job of its own.
    ) d on j.bundle is null or d.bundle = j.bundle and not d.held
    left join lateral (
      select payload from waybill.events e where e.tenant_id = d.tenant_id and e.event_id = d.event_id
        and e.event_id between first_id and last_id offset 0
    ) e on true
  ), targets as materialized (
    -- Each endpoint is looked up once.
    select t.*, p.is_active, p.url, p.signing_secret, p.ordered, p.max_per_second, s.breaker, s.probing,
      case when p.previous_secret_expires_at > now() then p.previous_secret end as previous_secret,
      waybill.standing(s.failure_streak, s.last_success_at) as standing,
      case when p.ordered then 1 when s.breaker = 'open' then 1 when s.breaker = 'half_open' then s.ramp end as at_once,
      s.breaker in ('open', 'half_open') as probed
    from (select distinct on (tenant_id, endpoint_id) tenant_id, endpoint_id, delivery_id as first_delivery from found
          where endpoint_id is not null order by tenant_id, endpoint_id, delivery_id) t
    left join lateral (
      select * from waybill.endpoints p where p.tenant_id = t.tenant_id and p.endpoint_id = t.endpoint_id offset 0
    ) p on true
    left join lateral (
      select * from waybill.endpoint_stats s where s.tenant_id = t.tenant_id and s.endpoint_id = t.endpoint_id offset 0
    ) s on true
  ), behind as materialized (
    select waybill.behind(array_agg(tenant_id), array_agg(endpoint_id), array_agg(f.delivery_id), array_agg(f.held)) as ids
    from found f join targets t using (tenant_id, endpoint_id) where t.ordered
  ), judged as materialized (
    select *, sendable and (standing = 'good' or at_once is not null or slot is not null or tenant_id <> all(crowding)) as counts
    from (select f.*, t.first_delivery = f.delivery_id as leads, t.url, t.signing_secret, t.previous_secret, t.at_once, t.probed,
      t.standing,
      f.status in ('pending', 'retrying') and t.is_active
        and (t.breaker is distinct from 'open' or t.probing = f.delivery_id)
        -- A slot is good for one attempt, and a worker that is late for it must not crowd into the slots of the next ones. Nor is one
        -- waited for that is from before the clock was set back.
        and coalesce(f.slot - extract(epoch from now()) * 1000 between -250 and 5000, t.max_per_second is null)
        -- An endpoint that became ordered only a moment ago may have more than one in the queue.
        and (not t.ordered or f.delivery_id <> all(b.ids)) as sendable
    from found f left join targets t using (tenant_id, endpoint_id) cross join behind b offset 0) j
  ), counted as (
    insert into waybill.usage as u (tenant_id, month, metric, count)
    select tenant_id, date_trunc('month', now() at time zone 'utc')::date, 'attempts', count(*)
    from judged where counts group by tenant_id order by tenant_id
    on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
    returning tenant_id, count
  ), metered as (
    -- How many of these are beyond the quota: the last ones.
    select tenant_id, c.count - coalesce((t.limits ->> 'monthly_attempts')::bigint, monthly_attempts) as beyond
    from counted c cross join lateral (select limits from waybill.tenants t where t.tenant_id = c.tenant_id offset 0) t
  )
  select j.tenant_id, j.delivery_id, j.retry_count, j.slot, j.bundle, j.status, j.attempt_count, j.earlier_attempts, j.event_id,
    j.event_type, j.payload, j.endpoint_id, j.leads, j.url, j.signing_secret, j.previous_secret, j.at_once, j.probed, j.standing, j.sendable,
    case when not j.counts then null
         when m.beyond <= 0 then true
         else m.beyond <= (select count(*) from judged l
           where l.tenant_id = j.tenant_id and l.counts and l.delivery_id > j.delivery_id) end,
    clock_timestamp(), fit.more
  from judged j left join metered m using (tenant_id)
  order by j.delivery_id;

  -- A row that is locked is passed over: whoever has locked it sets it as we would, and waiting for it with jobs locked could
  -- deadlock.
  if retries then
    -- A mark below what is due now is from before the database's clock was set back.
    update waybill.claim_marks set retry = lowest where ctid = (
      select ctid from waybill.claim_marks where retry > lowest or retry < waybill.retry_priority(now()) for update skip locked);
  else
    -- A tag from before the clock was set back (waybill.rebase_queue) is far ahead, and must not undo that.
    update waybill.queue_clock set tag = newest
    where ctid = (select ctid from waybill.queue_clock where tag < newest and tag > newest - 5e7 for update skip locked);
  end if;
  update waybill.claim_marks m
  -- The time at which the clock is read, not the transaction's, which may have waited for seconds.
  set since = clock_timestamp(), old_tag = m.next_tag, next_tag = c.tag, old_retry = m.next_retry, next_retry = m.retry
  from waybill.queue_clock c
  where m.ctid = (
    select ctid from waybill.claim_marks where since not between clock_timestamp() - interval '3 seconds' and clock_timestamp() for update skip locked);
end $$;

-- How an endpoint has done lately, for a worker to know whom to leave slots (flow/lanes/lanes.ts).
create or replace function waybill.standing(failure_streak int, last_success_at timestamptz) returns text language sql stable as $$
  select case when failure_streak > 0 then 'failing' when last_success_at > now() - interval '30 seconds' then 'good' else 'unsure' end
$$;

-- Those of these deliveries that are not the oldest unfinished ones of their endpoints, which are ordered; `are_held` tells of each whether it
-- is held, as one may be that has a job all the same. Planned anew each time, for the days at hand: a kept plan would open, or at least
-- lock, each day that is kept.
create or replace function waybill.behind(tenants text[], endpoints uuid[], deliveries uuid[], are_held boolean[]) returns uuid[]
language plpgsql stable strict
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  smallest constant uuid := '00000000-0000-0000-0000-000000000000';
  last_id constant uuid := (select max(id::text)::uuid from unnest(deliveries) as d (id));
  beside record;
  found uuid[] := '{}';
begin
  -- Where a single one is in the queue, it is this one, unless this one is held.
  select bool_or(is_held or queued is distinct from 1) as has_queued, bool_or(held > 0) as has_held,
    min(coalesce(held_from, smallest)::text)::uuid as first_held
  into beside
  from unnest(tenants, endpoints, are_held) as d (tenant_id, endpoint_id, is_held)
  left join lateral (
    select pending + retrying - held as queued, held, case when held > 0 then held_from else last_id end as held_from
    from waybill.endpoint_stats s where s.tenant_id = d.tenant_id and s.endpoint_id = d.endpoint_id offset 0
  ) s on true;
  if beside.has_queued then
    found := array(
      select id from unnest(tenants, endpoints, deliveries) as d (tenant_id, endpoint_id, id) cross join lateral (
        select from waybill.deliveries o where o.tenant_id = d.tenant_id and o.endpoint_id = d.endpoint_id
          and o.status in ('pending', 'retrying') and not o.held and o.delivery_id < d.id and o.delivery_id < last_id limit 1) o);
  end if;
  if beside.has_held then
    found := found || array(
      select id from unnest(tenants, endpoints, deliveries) as d (tenant_id, endpoint_id, id) cross join lateral (
        select from waybill.deliveries o where o.tenant_id = d.tenant_id and o.endpoint_id = d.endpoint_id
          and o.status in ('pending', 'retrying') and o.held and o.delivery_id < d.id and o.delivery_id between beside.first_held and last_id limit 1) o);
  end if;
  return found;
end $$;

-- Notes that the worker that has these claims is alive, but for those that somebody settles at this moment: waiting for them with
-- others locked could be a deadlock.
create or replace function waybill.touch(ids uuid[], retry_counts int[]) returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  -- One look-up for each: with a list of all ids, each look-up would go through the list.
  claimed constant uuid[] := array(
    select j.id from unnest(ids, retry_counts) as u (id, retry_count) cross join lateral (
      select j.id from pgboss.job j
      where j.name = 'deliveries' and j.id = u.id and j.retry_count = u.retry_count and j.state = 'active'
      for no key update skip locked offset 0) j);
begin
  -- By a list, not by a join: if the queue was empty when it was last analyzed, a join would go through all claims for each job.
  update pgboss.job set heartbeat_on = now() where name = 'deliveries' and id = any(claimed);
end $$;
