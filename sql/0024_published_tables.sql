-- A publication for all tables (change data capture, an upgrade by logical replication) forbids updating and deleting rows that
-- nothing identifies; these tables have no key, as they have one row each. In the order in which claims lock them.
alter table waybill.claim_marks replica identity full;
alter table waybill.queue_clock replica identity full;
alter table waybill.functions replica identity full;
