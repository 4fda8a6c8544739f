-- Who uses the service and where their events go.
--
-- Every table that a tenant owns has tenant_id as the first column of its primary key: a query that forgets the tenant
-- cannot use the index, another tenant's row is simply not found, and the tables can be distributed by tenant.

create table waybill.tenants (
  tenant_id text primary key,
  tenant_slug text not null unique,
  -- This tenant's own limits, above or below the service's; an absent key means the service's limit.
  limits jsonb not null default '{}',
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now()
);

-- A key is 256 random bits, so its plain SHA-256 is enough to look it up by and tells nothing about it.
create table waybill.api_keys (
  tenant_id text not null references waybill.tenants,
  api_key_id uuid not null,
  name text not null,
  key_hash bytea not null unique,
  primary key (tenant_id, api_key_id)
);

create table waybill.endpoints (
  tenant_id text not null references waybill.tenants,
  endpoint_id uuid not null,
  url text not null,
  description text,
  subscribed_events text[] not null,
  is_active boolean not null default true,
  -- Why and since when it is not active; null while it is.
  inactive_reason text,
  inactive_since timestamptz,
  -- At most this many attempts a second; null for no limit.
  max_per_second int,
  -- Strictly one delivery at a time, in publish order.
  ordered boolean not null default false,
  -- AES-256-GCM, the key's id in front (src/secrets.ts).
  signing_secret bytea not null,
  previous_secret bytea,
  previous_secret_expires_at timestamptz,
  updated_at timestamptz not null default now(),
  primary key (tenant_id, endpoint_id)
);
