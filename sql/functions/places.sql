-- Where a job stands in the queue. First attempts stand at their tag, in fair order (waybill.queue_clock); retries behind all
-- of them, in the order in which they are due.

-- The highest priority that retries have: only first attempts are above it.
create or replace function waybill.first_retry() returns int language sql immutable parallel safe as $$ select -1400000000 $$;

-- One lower for each second later, which lasts for 23 years from 2026. How much of the worker retries get is up to the
-- dispatcher.
create or replace function waybill.retry_priority(due timestamptz) returns int language sql stable as $$
  select waybill.first_retry() - greatest(0, ceil(extract(epoch from due - '2026-01-01 00:00+00'::timestamptz)))::int
$$;

-- When a job at `tag` is taken to have been created: pg-boss goes by that among jobs of one priority, which is a whole turn. So they come
-- in fair order also within it. By the time at which they were published, who comes while thousands of tenants have a backlog
-- would have to wait for 64 deliveries of each.
create or replace function waybill.moment_in_turn(tag float8) returns timestamptz language sql immutable parallel safe as $$
  select to_timestamp(946684800 + tag - floor(tag))
$$;

-- The same for what comes before its turn: the oldest of these first. An id's time has a fraction of its millisecond, in its next 12 bits.
create or replace function waybill.moment_before_turn(job uuid) returns timestamptz language sql immutable parallel safe as $$
  select to_timestamp(extract(epoch from waybill.made_at(job)) + ('x' || substr(job::text, 16, 3))::bit(12)::int / 4.096e6 - 3e9)
$$;

-- The place for what was claimed from `priority` and comes back: where claiming has got to, before all that waits there
-- (waybill.moment_before_turn).
create or replace function waybill.place_again(priority int) returns int language sql stable as $$
  select case when priority > waybill.first_retry() then -floor(tag)::int else greatest(retry, waybill.retry_priority(now())) end
  from waybill.queue_clock, waybill.claim_marks
$$;

-- Priorities are int4, and the clock goes on for ever: at 5,000 deliveries a second it would reach the retries' priorities
-- after seven months. So all tags are lowered by the clock's: from `soft` on when there is little to move, from `hard` on in any
-- case. True when done.
--
-- Whoever publishes, releases or records is kept waiting meanwhile, since they go by the clock as they have read it. For that,
-- this locks the tables through which everything is written, but none of their daily partitions, where an index may be being
-- built. While it waits for these locks, everybody waits behind it, so it gives up soon, to try again in an hour.
create or replace function waybill.rebase_queue(soft float8 default 1e8, hard float8 default 1e9) returns boolean language plpgsql as $$
declare
  base float8;
begin
  select tag into base from waybill.queue_clock;
  if base < soft then return false; end if;
  if base < hard and 10000 < (select count(*) from (
    select from pgboss.job where name = 'deliveries' and state < 'active' and priority > waybill.first_retry() limit 10001) j)
  then
    return false;
  end if;
  begin
    perform set_config('lock_timeout', '200ms', true);
    lock table only waybill.events, only waybill.deliveries in share row exclusive mode;
    perform set_config('lock_timeout', '0', true);
  exception when lock_not_available then
    return false;
  end;
  select floor(tag) into base from waybill.queue_clock for update;
  -- Whoever has locked one of these jobs is claiming it, and may want the tables, so it is passed over. Should it come back to
  -- the queue, waybill.gather_strays finds it.
  with waiting as (
    select id from pgboss.job where name = 'deliveries' and state < 'active' and priority > waybill.first_retry() for update skip locked
  )
  update pgboss.job j set priority = least(0, priority + base::int),
    created_on = case when priority + base::int > 0 then waybill.moment_before_turn(j.id) else created_on end,
    data = case when data ? 'tag' then jsonb_set(data, '{tag}', to_jsonb(greatest(0, (data ->> 'tag')::float8 - base))) else data end
  from waiting w where j.name = 'deliveries' and j.id = w.id;
  with tagged as (
    select tenant_id, endpoint_id from waybill.endpoint_stats where tag > 0 order by tenant_id, endpoint_id for no key update
  )
  update waybill.endpoint_stats s set tag = greatest(0, tag - base) from tagged t
  where s.tenant_id = t.tenant_id and s.endpoint_id = t.endpoint_id;
  update waybill.queue_clock set tag = tag - base;
  return true;
end $$;

-- Whoever read the clock before it was set back, and wrote afterwards, has placed jobs and endpoints months ahead of everybody
-- else's. This brings them to where the clock is, and returns how many there were. They are as far ahead as the clock was set back, 1e8
-- at least; half of that would take 320,000 deliveries to one of 10,000 endpoints that have 64 waiting each (waybill.turn_step), or
-- 32,000 to one of 100,000, the most that there may be.
create or replace function waybill.gather_strays() returns int language plpgsql as $$
declare
  clock constant float8 := (select tag from waybill.queue_clock);
  jobs int;
  endpoints int;
begin
  with stray as (
    select id from pgboss.job
    where name = 'deliveries' and state < 'active' and not blocked
      and priority < -floor(clock + 5e7)::int and priority > waybill.first_retry()
    for update skip locked
  )
  -- As they come from many turns, the oldest come first, and not each where it stood in its own.
  update pgboss.job j set priority = -floor(clock)::int, created_on = waybill.moment_before_turn(j.id),
    data = case when data ? 'tag' then jsonb_set(data, '{tag}', to_jsonb(clock)) else data end
  from stray where j.name = 'deliveries' and j.id = stray.id;
  get diagnostics jobs = row_count;
  -- In the order in which publishing and recording lock them.
  with stray as (
    select tenant_id, endpoint_id from waybill.endpoint_stats where tag > clock + 5e7
    order by tenant_id, endpoint_id for no key update
  )
  update waybill.endpoint_stats s set tag = clock from stray
  where s.tenant_id = stray.tenant_id and s.endpoint_id = stray.endpoint_id;
  get diagnostics endpoints = row_count;
  return jobs + endpoints;
end $$;

-- How far apart the `coming` deliveries to an endpoint stand, in turns; the last one before them is `lead` turns ahead. A tenant gets
-- about 64 in a turn, so that where some wait for N `endpoints`, each gets one every N / 64 turns. But
-- - not beyond the turns that all that waits takes, `waiting` / 64 (counting up to 64 of each endpoint): those that would stand there
--   share what is left up to there instead, (waiting / 64 - lead) / coming;
-- - nor closer than waiting / 64 / 64, since only the few endpoints that have more than the others stand beyond there, nor than 1 / 64,
--   as for an endpoint alone.
-- What came when fewer waited keeps its closer places.
--
-- For example, 6,400 deliveries to one endpoint (1 waits, `waiting` is 64) stand 1 / 64 apart, over 100 turns; another tenant's,
-- published now, stands in the first, behind 64 of these at most. One each to 640 endpoints, in one go (`waiting` is 640), have steps of
-- 10 turns, and by their phases 64 of them stand in each.
create or replace function waybill.turn_step(endpoints bigint, waiting numeric, coming numeric, lead float8) returns float8
language sql immutable parallel safe as $$
  select greatest(1, waiting::float8 / 64, least(endpoints, (waiting::float8 - 64 * lead) / greatest(1, coming)::float8)) / 64
$$;

-- Where in its step a delivery stands, from 0 to 1: it is the `nth` of `many` endpoints that get one together, which would all
-- stand at one place otherwise. Where nothing of the endpoint waits, it begins behind one delivery of each of those for which
-- something does, `ahead` of them, unless that is more than a step.
create or replace function waybill.turn_phase(nth bigint, many bigint, ahead bigint, waits boolean, step float8) returns float8
language sql immutable parallel safe as $$
  select case when waits or ahead + many > 64 * step then nth::float8 / many else (ahead + nth) / (64 * step) end
$$;
