-- For how many seconds a tenant's oldest due delivery has been due; 0 if none is. What is held is due unless its endpoint takes nothing
-- now: it is inactive, its breaker is open, or it is ordered and an earlier delivery waits for its retry.
--
-- Of each endpoint a thousand in the queue and a thousand held are looked at: the oldest may wait for retries, and not be due, or have
-- been replayed only now. Where Postgres thinks that an endpoint has few, it would sort all that it has.
create or replace function waybill.queue_age(tenant text) returns float8 language plpgsql stable
set plan_cache_mode = force_custom_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
begin
  return (
    select coalesce(max(greatest(0, extract(epoch from now() - least(queued.due, held.due)))), 0)
    from waybill.endpoints e
    join waybill.endpoint_stats s using (tenant_id, endpoint_id)
    left join lateral (
      select min(next_attempt_at) as due from (
        (select next_attempt_at from waybill.deliveries d
         where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id and d.status in ('pending', 'retrying') and not d.held
         order by delivery_id limit 500)
        union all
        (select next_attempt_at from waybill.deliveries d
         where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id and d.status in ('pending', 'retrying') and not d.held
         order by delivery_id desc limit 500)
      ) ends
    ) queued on true
    left join lateral (
      -- Of those never attempted the first is the oldest.
      select least(waybill.made_at((array_agg(delivery_id order by delivery_id) filter (where is_new))[1]),
        min(updated_at) filter (where not is_new)) as due
      from (
        select delivery_id, updated_at, status = 'pending' and earlier_attempts = 0 as is_new from waybill.deliveries d
        where d.tenant_id = e.tenant_id and d.endpoint_id = e.endpoint_id and d.status in ('pending', 'retrying') and d.held
          and e.is_active and s.breaker <> 'open' and not (e.ordered and coalesce(queued.due > now(), false))
        order by delivery_id limit 1000) oldest
    ) held on true
    -- Where nothing waits, each day's index would be asked in vain.
    where e.tenant_id = tenant and s.pending + s.retrying > 0);
end $$;
