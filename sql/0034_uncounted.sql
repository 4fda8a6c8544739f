-- Deliveries that went with their day and are still among their endpoints' counts. They are taken off a few endpoints at a time
-- (src/upkeep/drop-day.ts): whoever publishes to one of them waits for as long as that takes.
create table waybill.uncounted (
  tenant_id text not null,
  endpoint_id uuid not null,
  status waybill.delivery_status not null,
  count int not null,
  primary key (tenant_id, endpoint_id, status)
);
