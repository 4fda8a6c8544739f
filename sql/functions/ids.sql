-- Ids are UUIDv7 (RFC 9562, 5.7) made here, so that one clock, the database's, orders everything: 48 bits of milliseconds,
-- then 12 bits of the millisecond's fraction (method 3), then 62 random bits. created_at is read back from the id.

-- `us` are microseconds since 1970. A single expression, so that Postgres can inline it.
create or replace function waybill.make_id(us bigint) returns uuid language sql volatile parallel safe as $$
  select (lpad(to_hex(us / 1000), 12, '0') || '7' || lpad(to_hex(us % 1000 * 4096 / 1000), 3, '0')
    || substr(gen_random_uuid()::text, 20))::uuid
$$;

create or replace function waybill.make_id(at timestamptz) returns uuid language sql volatile parallel safe as $$
  select waybill.make_id((extract(epoch from at) * 1000000)::bigint)
$$;

-- A delivery's id starts with the same 64 bits as its event's: all deliveries of one event stand side by side in the
-- primary key, in the event's own partition, and need no index on event_id.
create or replace function waybill.make_delivery_id(event_id uuid) returns uuid language sql volatile parallel safe as $$
  select (substr(event_id::text, 1, 18) || substr(gen_random_uuid()::text, 19))::uuid
$$;

create or replace function waybill.first_delivery_id(event_id uuid) returns uuid language sql immutable parallel safe as $$
  select (substr(event_id::text, 1, 18) || '-0000-000000000000')::uuid
$$;

create or replace function waybill.last_delivery_id(event_id uuid) returns uuid language sql immutable parallel safe as $$
  select (substr(event_id::text, 1, 18) || '-ffff-ffffffffffff')::uuid
$$;

-- The smallest id of a moment, to the millisecond: ids from then on are greater or equal.
create or replace function waybill.first_id(at timestamptz) returns uuid language sql immutable parallel safe as $$
  select (lpad(to_hex(floor(extract(epoch from at) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
$$;

-- The moment an id was made, to the millisecond.
create or replace function waybill.made_at(id uuid) returns timestamptz language sql immutable parallel safe as $$
  select to_timestamp(('x' || translate(substr(id::text, 1, 13), '-', ''))::bit(48)::bigint / 1000.0)
$$;
