-- For how many seconds a tenant's oldest due delivery has been due; 0 if none is. What is held is due unless its endpoint takes nothing
-- now: it is inactive, its breaker is open, or it is ordered and an earlier delivery waits for its retry.
--
-- Of each endpoint a thousand in the queue and a thousand held are looked at: the oldest may wait for retries, and not be due, or have
-- been replayed only now. Where Postgres thinks that an endpoint has few, it would sort all that it has. The order names `held`, as the index
-- deliveries_live has it: ordered by their ids alone, all deliveries of the tenant might be read for each endpoint.
--
-- The days of the last week are opened, and those that held ones are known to be of; and all if there is less on these than is counted, as
-- their plan takes longer than all the rest.
create or replace function waybill.queue_age(tenant text) returns float8 language plpgsql stable
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
declare
  smallest constant uuid := '00000000-0000-0000-0000-000000000000';
  first_queued uuid := waybill.first_id(now() - interval '7 days');
  first_held uuid := (
    select coalesce(min(coalesce(held_from, smallest)::text)::uuid, first_queued) from waybill.endpoint_stats where tenant_id = tenant and held > 0);
  last_id uuid := waybill.first_id(now() + interval '1 hour');
  seen record;
begin
  loop
    select coalesce(max(greatest(0, extract(epoch from now() - least(queued.due, held.due)))), 0) as age,
      coalesce(bool_and(queued.n = s.pending + s.retrying - s.held and (not takes or held.n = least(s.held, 1000))), true) as is_whole
    into seen
    from waybill.endpoint_stats s
    join waybill.endpoints e using (tenant_id, endpoint_id)
    left join lateral (
      select min(next_attempt_at) as due, count(*) filter (where is_old) as n from (
        (select next_attempt_at, true as is_old from waybill.deliveries d
         where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id and d.status in ('pending', 'retrying') and not d.held
           and d.delivery_id between first_queued and last_id
         order by d.held, delivery_id limit 500)
        union all
        (select next_attempt_at, false from waybill.deliveries d
         where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id and d.status in ('pending', 'retrying') and not d.held
           and d.delivery_id between first_queued and last_id
         order by d.held desc, delivery_id desc limit 500)
      ) ends
    ) queued on true
    cross join lateral (
      select e.is_active and s.breaker <> 'open' and not (e.ordered and coalesce(queued.due > now(), false)) as takes
    ) t
    left join lateral (
      -- Of those never attempted the first is the oldest.
      select count(*) as n, least(waybill.made_at((array_agg(delivery_id order by delivery_id) filter (where is_new))[1]),
        min(updated_at) filter (where not is_new)) as due
      from (
        select delivery_id, updated_at, status = 'pending' and earlier_attempts = 0 as is_new from waybill.deliveries d
        where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id and d.status in ('pending', 'retrying') and d.held
          and takes and d.delivery_id between first_held and last_id
        order by d.held, delivery_id limit 1000) oldest
    ) held on true
    -- Where nothing waits, each day's index would be asked in vain.
    where s.tenant_id = tenant and s.pending + s.retrying > 0;
    exit when seen.is_whole or last_id = 'ffffffff-ffff-ffff-ffff-ffffffffffff';
    first_queued := smallest;
    first_held := smallest;
    last_id := 'ffffffff-ffff-ffff-ffff-ffffffffffff';
  end loop;
  return seen.age;
end $$;
