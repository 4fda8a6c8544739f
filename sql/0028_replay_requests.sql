-- Replays that were asked for while the delivery was being attempted: if that attempt fails, they are carried out after it
-- (src/flow/catch-up.ts). Not a column of the delivery, which whoever records the attempt is about to change.
create table waybill.replay_requests (
  tenant_id text not null,
  delivery_id uuid not null,
  asked_at timestamptz not null,
  primary key (tenant_id, delivery_id)
);
