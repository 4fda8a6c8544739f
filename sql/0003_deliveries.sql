-- What happened: events, one delivery per (event, endpoint), and every attempt. Partitioned by id, which carries its time,
-- a day each: a look-up by id reads one partition, a time filter becomes id bounds, retention drops whole partitions.
-- Payloads and response bodies are text, never jsonb: jsonb reorders keys, drops duplicates and refuses \u0000.

create type waybill.delivery_status as enum ('pending', 'retrying', 'delivered', 'dead_lettered');
create type waybill.dead_letter_reason as enum ('retries_exhausted', 'endpoint_gone', 'worker_lost', 'monthly_attempt_limit');
create type waybill.retry_state as enum ('succeeded', 'will_retry', 'exhausted');

create table waybill.events (
  tenant_id text not null,
  event_id uuid not null,
  event_type text not null,
  payload text not null,
  idempotency_key text,
  delivery_count int not null,
  primary key (tenant_id, event_id)
) partition by range (event_id);

create table waybill.deliveries (
  tenant_id text not null,
  delivery_id uuid not null,
  event_id uuid not null,
  endpoint_id uuid not null,
  event_type text not null,
  status waybill.delivery_status not null default 'pending',
  -- True while the delivery waits as a row and not as a job: its endpoint takes nothing now, or not this much at once.
  held boolean not null default false,
  attempt_count int not null default 0,
  -- Attempts before the last replay: retries are counted from there, attempt numbers from the start.
  earlier_attempts int not null default 0,
  -- While held: how many retries have been spent since that replay or, without one, since the event was published.
  spent_retries int not null default 0,
  next_attempt_at timestamptz,
  last_attempt_at timestamptz,
  last_status_code smallint,
  last_error text,
  dead_letter_reason waybill.dead_letter_reason,
  updated_at timestamptz not null,
  completed_at timestamptz,
  primary key (tenant_id, delivery_id)
) partition by range (delivery_id);

-- Only what is not finished, with what is held apart from what is queued: a million held deliveries cost nobody else a look.
create index deliveries_live on waybill.deliveries (tenant_id, endpoint_id, held, delivery_id)
  where status in ('pending', 'retrying');
create index deliveries_dead on waybill.deliveries (tenant_id, delivery_id) where status = 'dead_lettered';

create table waybill.attempts (
  tenant_id text not null,
  delivery_id uuid not null,
  attempt_number int not null,
  endpoint_id uuid not null,
  url text not null,
  status_code smallint,
  error text,
  error_message text,
  response_body text,
  response_truncated boolean not null,
  duration_ms int not null,
  retry_state waybill.retry_state not null,
  next_attempt_at timestamptz,
  started_at timestamptz not null,
  primary key (tenant_id, delivery_id, attempt_number)
) partition by range (delivery_id);

-- The net below the daily partitions: a row whose day has none is kept, not refused.
create table waybill.events_default partition of waybill.events default;
create table waybill.deliveries_default partition of waybill.deliveries default;
create table waybill.attempts_default partition of waybill.attempts default;
