-- All held deliveries of the endpoint are from this id on, so that no day before it has to be looked at for them; null if that is not
-- known. Whoever releases some writes what it has seen (waybill.release_held).
alter table waybill.endpoint_stats add column held_from uuid;
