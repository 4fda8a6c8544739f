-- Endpoints that ask to be told what the service has to tell (waybill.announce). Without it, all of a tenant's endpoints would be read for
-- each of its dead letters, to find that none has asked.
create index endpoints_told on waybill.endpoints (tenant_id, endpoint_id)
  where is_active and subscribed_events && '{endpoint.disabled,endpoint.recovered,delivery.dead_lettered}'::text[];
