-- What an endpoint still has to get, without what is queued for it: the next to be released (waybill.release_held) is the
-- first entry.
create index deliveries_held on waybill.deliveries (tenant_id, endpoint_id, delivery_id) where held;
