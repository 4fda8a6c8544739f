-- An endpoint that was made active again with nothing held kept the ramp of one that recovers.
update waybill.endpoint_stats set ramp = null, breaker_since = null where breaker = 'closed' and ramp is not null;

-- What tenants are to be told. It waits here for a transaction of its own, since whoever finds out has locked the counters of
-- some endpoints, and may not lock those of others afterwards.
create table waybill.announcements (
  tenant_id text not null,
  announcement_id uuid not null,
  about uuid not null,
  event_type text not null,
  payload text not null,
  primary key (tenant_id, announcement_id)
);
