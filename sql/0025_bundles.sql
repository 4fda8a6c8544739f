-- Deliveries that are published together share a job (sql/functions/bundles.sql): this is its id, until the delivery is attempted
-- or gets a job of its own. Null: the job has the delivery's id.
alter table waybill.deliveries add column bundle uuid;
