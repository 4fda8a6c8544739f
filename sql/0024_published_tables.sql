-- A publication for all tables (change data capture, an upgrade by logical replication) forbids updating and deleting rows that
-- nothing identifies; these tables have no key, as they have one row. This waits for whoever reads them, and all claims wait behind
-- it, so it gives up soon, and the start with it.
set local lock_timeout = '3s';
alter table waybill.queue_clock replica identity full;
alter table waybill.claim_marks replica identity full;
alter table waybill.functions replica identity full;
set local lock_timeout = 0;
