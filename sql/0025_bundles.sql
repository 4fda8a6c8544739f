-- Deliveries that are published together share a job (sql/functions/bundles.sql): this is it, until a delivery is attempted or gets
-- a job of its own. Null: its job has the delivery's id. This waits for whoever reads deliveries, and everybody waits behind it, so it
-- gives up soon, and the start with it.
set local lock_timeout = '1s';
alter table waybill.deliveries add column bundle uuid;
set local lock_timeout = 0;
