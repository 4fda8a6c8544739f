-- What waits, held or not, is found by deliveries_live; an index of its own for what is held was one more entry for each hold.
drop index if exists waybill.deliveries_held;

-- This held nothing else and is gone. A program from before, started on a new database, is not to make it again.
insert into waybill.migrations (file) values ('0006_lanes.sql') on conflict do nothing;
