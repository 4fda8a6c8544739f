-- Counters instead of counts: what limits, usage, metrics and health read, kept in the transactions that change it.
-- Writers take rows of one table in key order, and tables in this order, so no two of them can wait for each other in a
-- circle: rate_windows, idempotency_keys, usage, deliveries, attempt_counts, endpoint_stats.

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

-- status_code 0 stands for no response.
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

create table waybill.endpoint_stats (
  tenant_id text not null,
  endpoint_id uuid not null,
  pending bigint not null default 0,
  retrying bigint not null default 0,
  delivered bigint not null default 0,
  dead_lettered bigint not null default 0,
  -- The last 20, newest first; null for no response.
  recent_status_codes smallint[] not null default '{}',
  last_success_at timestamptz,
  last_failure_at timestamptz,
  primary key (tenant_id, endpoint_id)
) with (fillfactor = 50);

-- Moves the counts of deliveries by status: each element of the arrays is one change of one endpoint's count.
create function waybill.count_deliveries(tenants text[], endpoints uuid[], statuses waybill.delivery_status[], changes int[])
returns void language sql as $$
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, dead_lettered)
  select tenant_id, endpoint_id,
    coalesce(sum(change) filter (where status = 'pending'), 0),
    coalesce(sum(change) filter (where status = 'retrying'), 0),
    coalesce(sum(change) filter (where status = 'delivered'), 0),
    coalesce(sum(change) filter (where status = 'dead_lettered'), 0)
  from unnest(tenants, endpoints, statuses, changes) as c (tenant_id, endpoint_id, status, change)
  group by tenant_id, endpoint_id
  order by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending,
    retrying = s.retrying + excluded.retrying,
    delivered = s.delivered + excluded.delivered,
    dead_lettered = s.dead_lettered + excluded.dead_lettered
$$;
