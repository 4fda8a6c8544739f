-- Deliveries that are published together share a job (sql/functions/bundles.sql): this is it, until a delivery is attempted or gets
-- a job of its own. Null: its job has the delivery's id.
alter table waybill.deliveries add column bundle uuid;
