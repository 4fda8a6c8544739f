-- Takes claims back from workers that were lost: up to `most` deliveries that nobody has touched for `lapse` become due at once, before
-- all that wait. The next claim counts as a retry, which is pg-boss's fence against the worker that was only thought lost.
-- `crashes` is how many attempts in a row have lost their worker. From `suspect` of them on, or with no retry left, the job does not
-- become due: the caller has to fail it, and from `poison` on that leaves it no retry. Unless `thorough`, only what was touched
-- within the last minute is looked at. Bundles are taken apart first.
create or replace function waybill.take_back(lapse interval, suspect int, poison int, most int, thorough boolean)
returns table (tenant_id text, delivery_id uuid, retry_count int, crashes int, due_now boolean) language plpgsql
-- By index alone, whatever the statistics say of a queue that changes faster than they do.
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  tenants text[];
  bundles uuid[];
  ids uuid[];
  lapsed record;
begin
  with lapsed as materialized (
    -- What somebody settles at this moment is not lost.
    select id, data from pgboss.job
    where name = 'deliveries' and state = 'active' and heartbeat_on < now() - lapse
      and heartbeat_on > case when thorough then '-infinity' else now() - interval '1 minute' end and data ? 'ids'
    -- Each holds up to sixteen.
    limit (most + 15) / 16 for update skip locked
  )
  select array_agg(data ->> 'tenant_id'), array_agg(l.id), array_agg(m.id::uuid) into tenants, bundles, ids
  from lapsed l, jsonb_array_elements_text(data -> 'ids') as m (id);
  if ids is not null then perform waybill.unbundle(tenants, bundles, ids, true); end if;

  -- In two statements, so that the second one has the bounds of their partitions.
  select array_agg(id order by id) as ids, array_agg(data ->> 'tenant_id' order by id) as tenants, array_agg(retry_count order by id) as counts,
    array_agg(retry_limit order by id) as limits
  into lapsed
  from (
    select id, data, retry_count, retry_limit from pgboss.job
    where name = 'deliveries' and state = 'active' and heartbeat_on < now() - lapse
      and heartbeat_on > case when thorough then '-infinity' else now() - interval '1 minute' end and not data ? 'ids'
    limit most for update skip locked
  ) j;
  if lapsed.ids is null then return; end if;

  return query
  with judged as (
    select l.*, coalesce(d.earlier_attempts + l.retry_count + 1 - greatest(d.earlier_attempts, a.last_ended), 1) as crashes
    from unnest(lapsed.ids, lapsed.tenants, lapsed.counts, lapsed.limits) as l (id, tenant_id, retry_count, retry_limit)
    left join waybill.deliveries d on d.tenant_id = l.tenant_id and d.delivery_id = l.id
      and d.delivery_id between lapsed.ids[1] and lapsed.ids[cardinality(lapsed.ids)]
    left join lateral (
      -- Those since then have lost their worker: most have no record yet, unless the delivery was held.
      select max(attempt_number) as last_ended from waybill.attempts a
      where a.tenant_id = l.tenant_id and a.delivery_id = l.id and a.error is distinct from 'worker_lost'
        and a.delivery_id between lapsed.ids[1] and lapsed.ids[cardinality(lapsed.ids)]
    ) a on true
  ), decided as (
    select *, crashes < suspect and retry_count < retry_limit as due_now from judged
  )
  update pgboss.job j set
    state = case when due_now then 'retry' else j.state end,
    start_after = case when due_now then now() else j.start_after end,
    priority = case when due_now then waybill.place_again(j.priority) else j.priority end,
    created_on = case when due_now then waybill.moment_before_turn(j.id) else j.created_on end,
    retry_limit = case when crashes >= poison then j.retry_count else j.retry_limit end
  from decided d where j.name = 'deliveries' and j.id = any(lapsed.ids) and j.id = d.id
  returning d.tenant_id, d.id, d.retry_count, d.crashes, d.due_now;
end $$;
