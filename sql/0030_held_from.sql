-- All held deliveries of the endpoint that are counted are from this id on, so that no day before it has to be looked at for them; null if
-- that is not known. Whoever holds or releases some writes what it has seen (waybill.held_from_with, waybill.release_held).
alter table waybill.endpoint_stats add column held_from uuid;
