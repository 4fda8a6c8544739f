-- A bundle is one job for the first attempts of up to 16 deliveries of one tenant that were published or released together and stand
-- beside one another in a turn; its place is the last one's. Its `ids` are those that are not settled yet. It is claimed as a whole: a delivery that has to come
-- again (after a failure, or because its worker stopped or was lost) gets a job of its own first. So a delivery costs a sixteenth of a
-- job as long as all goes well.

-- The job's id, made of its first delivery's: UUIDv8 (RFC 9562, 5.8), so never that of a delivery's own job.
create or replace function waybill.bundle_id(first_delivery uuid) returns uuid language sql immutable parallel safe as $$
  select overlay(first_delivery::text placing '8' from 15)::uuid
$$;

-- The same for deliveries some of which may still be in the bundle that they were in before they were held.
create or replace function waybill.new_bundle_id(first_delivery uuid) returns uuid language sql volatile parallel safe as $$
  select overlay(waybill.bundle_id(first_delivery)::text placing right(gen_random_uuid()::text, 12) from 25)::uuid
$$;

-- How many of the due jobs, from priority `top` down to `bottom`, together hold at most `most` deliveries, but always one job if
-- any is due; and whether more may be due than these. In the order of the index, as they are fetched.
create or replace function waybill.fit_jobs(bottom int, top int, most int, out jobs int, out more boolean) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
declare
  size int;
  total int := 0;
begin
  jobs := 0;
  more := false;
  for size in
    select coalesce(jsonb_array_length(j.data -> 'ids'), 1) from pgboss.job j
    where j.name = 'deliveries' and j.state < 'active' and not j.blocked and j.start_after <= pgboss.job_now()
      and j.priority >= bottom and j.priority <= top
    order by j.priority desc, j.created_on limit most
  loop
    more := jobs > 0 and total + size > most;
    exit when more;
    jobs := jobs + 1;
    total := total + size;
    more := total >= most;
    exit when more;
  end loop;
end $$;

-- Takes deliveries out of their bundles, and returns those that were in them. A bundle with nothing left in it is finished; one
-- that was not touched for a while, perhaps because it was locked here, is touched now, as its worker is alive. Bundles are
-- locked in the order of their ids, and then changed by a merge, although nothing is ever inserted: its plan has to start from the
-- given rows. An update's need not, and would go through all of the queue by the statistics of an emptier one.
create or replace function waybill.leave_bundles(bundles uuid[], deliveries uuid[]) returns uuid[] language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off
set enable_mergejoin = off set enable_material = off set enable_memoize = off
as $$
declare
  its record;
begin
  with leaving as materialized (
    select bundle, array_agg(id) as ids from unnest(bundles, deliveries) as u (bundle, id) group by bundle order by bundle
  ), found as materialized (
    select l.bundle, l.ids, j.data -> 'ids' as members from leaving l cross join lateral (
      select data from pgboss.job j where j.name = 'deliveries' and j.id = l.bundle and j.state = 'active'
      for no key update offset 0) j
  )
  select array_agg(bundle) as bundles, array_agg(members - ids::text[]) as staying,
    (select array_agg(id) from found, unnest(ids) id where members ? id::text) as present
  into its from found;
  merge into pgboss.job j using unnest(its.bundles, its.staying) as s (bundle, ids) on j.name = 'deliveries' and j.id = s.bundle
  when matched and s.ids = '[]' then delete
  when matched and s.ids <> '[]' then update set data = jsonb_set(j.data, '{ids}', s.ids),
    heartbeat_on = case when j.heartbeat_on < now() - interval '3 seconds' then now() else j.heartbeat_on end
  when not matched and false then insert (id) values (s.bundle);
  return coalesce(its.present, '{}');
end $$;

-- Finishes the jobs of those deliveries that are still claimed, or their part in bundles, and returns these deliveries. A fence
-- is `job id:retry count`.
create or replace function waybill.finish_claims(deliveries uuid[], fences text[]) returns uuid[] language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
declare
  jobs constant uuid[] := array(select left(fence, 36)::uuid from unnest(fences) as u (fence));
  -- Those of them that are a delivery's own.
  own constant uuid[] := array(select id from unnest(deliveries, jobs) as u (id, job) where id = job);
  finished uuid[] := '{}';
begin
  if own <> '{}' then
    select ids into finished
    from waybill.finish_jobs('deliveries', own, array(select fence from unnest(deliveries, fences, jobs) as u (id, fence, job) where id = job));
  end if;
  if cardinality(own) < cardinality(deliveries) then
    finished := finished || (
      select waybill.leave_bundles(array_agg(job), array_agg(id)) from unnest(deliveries, jobs) as u (id, job) where id <> job);
  end if;
  return finished;
end $$;

-- Gives deliveries that are in claimed bundles jobs of their own, which count as claimed as well or, unless `claimed`, wait at
-- the bundle's place. Deliveries that are in none are left alone. One that is listed in a bundle but was taken out of it by hand
-- merely leaves it.
create or replace function waybill.unbundle(tenants text[], bundles uuid[], deliveries uuid[], claimed boolean) returns void language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  sorted constant uuid[] := array(select id from unnest(deliveries) as u (id) order by id);
  -- Each once: the list is gone through for each delivery.
  jobs constant uuid[] := array(select distinct bundle from unnest(bundles) as u (bundle));
begin
  perform from pgboss.job where name = 'deliveries' and id = any(jobs) and state = 'active' order by id for no key update;
  with leaving as (
    update waybill.deliveries d set bundle = null
    from unnest(tenants, bundles, deliveries) as u (tenant_id, bundle, id) join pgboss.job j on j.id = u.bundle
    where j.name = 'deliveries' and j.id = any(jobs) and j.state = 'active' and j.data -> 'ids' ? u.id::text
      and d.tenant_id = u.tenant_id and d.delivery_id = u.id and d.bundle = u.bundle and not d.held and d.delivery_id = any(sorted)
      and d.delivery_id between sorted[1] and sorted[cardinality(sorted)]
    returning u.id, u.bundle
  )
  insert into pgboss.job (id, name, data, priority, state, start_after, created_on, started_on, heartbeat_on, keep_until, expire_seconds,
    deletion_seconds, retry_limit, retry_count, retry_delay, retry_backoff, retry_delay_max, policy, dead_letter, heartbeat_seconds)
  select l.id, j.name, j.data - 'ids', j.priority, case when claimed then j.state else 'created' end, j.start_after, j.created_on,
    case when claimed then j.started_on end, case when claimed then j.heartbeat_on end, j.keep_until, j.expire_seconds,
    j.deletion_seconds, j.retry_limit, j.retry_count, j.retry_delay, j.retry_backoff, j.retry_delay_max, j.policy, j.dead_letter, j.heartbeat_seconds
  from leaving l join pgboss.job j on j.id = l.bundle
  where j.name = 'deliveries' and j.id = any(jobs)
  on conflict do nothing;
  perform waybill.leave_bundles(bundles, deliveries);
end $$;
