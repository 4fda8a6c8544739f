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

-- The same for the deliveries that are held.
create or replace function waybill.count_held(tenants text[], endpoints uuid[], changes int[]) returns void language sql as $$
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, held)
  select tenant_id, endpoint_id, sum(change) from unnest(tenants, endpoints, changes) as c (tenant_id, endpoint_id, change)
  group by tenant_id, endpoint_id order by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set held = s.held + excluded.held
$$;
