-- Counters instead of counts: what limits, usage, metrics and health read, kept up to date by the transactions that change it.
-- Writers take rows of one table in key order, and tables in one order (sql/functions/publish.sql), so no two of them can wait
-- for each other in a circle.

-- Unlogged: a window lasts a minute, and a crash of the database may forget the current one.
create unlogged table waybill.rate_windows (
  tenant_id text not null,
  action text not null,
  window_start timestamptz not null,
  count int not null,
  primary key (tenant_id, action)
) with (fillfactor = 50);

create table waybill.idempotency_keys (
  tenant_id text not null,
  key text not null,
  event_id uuid not null,
  primary key (tenant_id, key)
);
-- Retention deletes by age, and an id carries its time; the rows come in that order, so a few pages are enough.
create index idempotency_keys_age on waybill.idempotency_keys using brin (event_id);

create type waybill.metered as enum ('events', 'attempts');

create table waybill.usage (
  tenant_id text not null,
  month date not null,
  metric waybill.metered not null,
  count bigint not null,
  primary key (tenant_id, month, metric)
) with (fillfactor = 50);

-- status_code 0 stands for no response; a 2xx that broke off has its code negated.
create table waybill.attempt_counts (
  tenant_id text not null,
  endpoint_id uuid not null,
  hour timestamptz not null,
  status_code smallint not null,
  attempts bigint not null,
  retries bigint not null,
  duration_ms bigint not null,
  primary key (tenant_id, endpoint_id, hour, status_code)
) with (fillfactor = 70);

-- The breaker of an endpoint: closed lets deliveries through, open lets one probe through at a time, half_open as many as
-- `ramp` says.
create type waybill.breaker as enum ('closed', 'open', 'half_open');

create table waybill.endpoint_stats (
  tenant_id text not null,
  endpoint_id uuid not null,
  pending bigint not null default 0,
  retrying bigint not null default 0,
  delivered bigint not null default 0,
  dead_lettered bigint not null default 0,
  -- How many of the pending and retrying ones are held.
  held bigint not null default 0,
  -- Where the endpoint stands in fair order (waybill.queue_clock): where the step of its next delivery begins.
  tag float8 not null default 0,
  -- The last 20, newest first; null for no response.
  recent_status_codes smallint[] not null default '{}',
  last_success_at timestamptz,
  last_failure_at timestamptz,
  -- Failed attempts since the last success, and when the first of them was.
  failure_streak int not null default 0,
  failing_since timestamptz,
  breaker waybill.breaker not null default 'closed',
  breaker_since timestamptz,
  -- While half open: how many attempts may be under way at once.
  ramp int,
  -- While open: the delivery that may be sent all the same, when the next one may, and how many have failed.
  probing uuid,
  next_probe_at timestamptz,
  failed_probes int not null default 0,
  -- For endpoints with max_per_second: when the next attempt may start.
  next_slot timestamptz,
  primary key (tenant_id, endpoint_id)
) with (fillfactor = 50);
create index endpoint_stats_held on waybill.endpoint_stats (tenant_id, endpoint_id) where held > 0;

-- Fair order between tenants, as start-time fair queueing has it: each queued delivery gets a tag a step behind its endpoint's last
-- one, but never before the clock, which shows the tag of what was claimed last. The more of its tenant's endpoints have some waiting,
-- the longer the step (waybill.turn_step). A job's priority is its tag, negated; so a tenant with a million waiting deliveries and
-- one with a single one take turns.
create table waybill.queue_clock (tag float8 not null);
insert into waybill.queue_clock values (0);
