-- Tells a tenant what happened to its endpoints and deliveries, soon (waybill.publish_announcements).
create or replace function waybill.announce(tenant text, about uuid, type text, payload text) returns void language sql as $$
  insert into waybill.announcements (tenant_id, announcement_id, about, event_type, payload)
  select tenant, waybill.make_id(clock_timestamp()), about, type, payload
  -- Only if an endpoint has asked to be told. All three types are named as the index endpoints_told names them.
  where exists (select from waybill.endpoints e
    where e.tenant_id = tenant and e.is_active and e.endpoint_id <> about and e.subscribed_events @> array[type]
      and e.subscribed_events && '{endpoint.disabled,endpoint.recovered,delivery.dead_lettered}'::text[])
$$;

-- Makes events of at most `most` announcements, delivered to the tenants' active endpoints that name the type; `*` does not stand
-- for these. An announcement never goes to the endpoint that it is about, nor to more than 10,000, as many as an event goes to at most:
-- one that took too long would keep all others waiting for ever. Returns how many there were.
create or replace function waybill.publish_announcements(most int) returns bigint language plpgsql as $$
declare
  told bigint;
begin
  with taken as (
    delete from waybill.announcements where (tenant_id, announcement_id) in (
      select tenant_id, announcement_id from waybill.announcements order by announcement_id limit most for update skip locked)
    returning *
  ), received as materialized (
    select a.*, told.endpoint_id from taken a cross join lateral (
      select endpoint_id from waybill.endpoints e
      where e.tenant_id = a.tenant_id and e.is_active and e.endpoint_id <> a.about and e.subscribed_events @> array[a.event_type]
        and e.subscribed_events && '{endpoint.disabled,endpoint.recovered,delivery.dead_lettered}'::text[]
      order by endpoint_id limit 10000
    ) told
  ), stored as (
    insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
    select tenant_id, announcement_id, event_type, payload, count(*)::int from received
    group by tenant_id, announcement_id, event_type, payload
  ), delivering as (
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select tenant_id, waybill.make_delivery_id(announcement_id), announcement_id, endpoint_id, event_type, true, now() from received
  ), counted as (
    insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held, held_from)
    -- They may have waited for long.
    select tenant_id, endpoint_id, count(*), count(*), waybill.held_from(min(announcement_id::text)::uuid) from received
    group by tenant_id, endpoint_id order by tenant_id, endpoint_id
    on conflict (tenant_id, endpoint_id) do update set pending = s.pending + excluded.pending, held = s.held + excluded.held,
      held_from = waybill.held_from_with(s.held, s.held_from, excluded.held_from)
  )
  select count(*) into told from taken;
  if told > 0 then perform pg_notify('waybill_held', ''); end if;
  return told;
end $$;
