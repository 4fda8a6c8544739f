-- Makes the daily partitions from yesterday to `days` ahead that are missing, each day's three together or not at all:
-- retention drops them together. Each is built aside and attached, because attaching takes a lock that reads and writes
-- pass, where `create table … partition of` would stop them. But it also locks the default partition, which every query without
-- bounds on ids opens. A long reader, such as pg_dump, would hold up the attaching, and that all queries behind it, so it waits for
-- this lock only briefly. A day that cannot be made is said in a warning and costs no other day; its rows stand in the default
-- partition, where everything works but that retention deletes them row by row.
create or replace function waybill.make_partitions(days int) returns void language plpgsql as $$
declare
  kind text;
  day date;
  part text;
  today constant date := now() at time zone 'utc';
begin
  perform pg_advisory_xact_lock(hashtext('waybill.make_partitions'));
  perform set_config('lock_timeout', '200ms', true);
  for day in select today + n from generate_series(-1, days) n loop
    begin
      foreach kind in array array['events', 'deliveries', 'attempts'] loop
        part := format('%s_%s', kind, to_char(day, 'YYYYMMDD'));
        continue when to_regclass('waybill.' || part) is not null;
        execute format('create table waybill.%I (like waybill.%I including all)', part, kind);
        if kind = 'deliveries' then
          -- Every delivery is updated at least once: room in the page keeps the new version beside the old one, and its place in the
          -- index beside the old one's, or each full page of that would be cleaned and split.
          execute format('alter table waybill.%I set (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05)', part);
          execute format('alter index %s set (fillfactor = 50)', (
            select indexrelid::regclass from pg_index where indrelid = format('waybill.%I', part)::regclass and indisprimary));
        end if;
        execute format('alter table waybill.%I attach partition waybill.%I for values from (%L) to (%L)', kind, part,
          waybill.first_id(day::timestamp at time zone 'utc'), waybill.first_id((day + 1)::timestamp at time zone 'utc'));
      end loop;
    exception
      when check_violation then
        raise warning 'no partitions for %: the default partition has rows of that day', day;
      -- Retention, which waits to have the default partition for itself, may be what it would wait for.
      when lock_not_available or deadlock_detected then
        raise warning 'no partitions from % on yet: another transaction reads the default partition', day;
        -- It would make the next day wait as well.
        exit;
    end;
  end loop;
end $$;
