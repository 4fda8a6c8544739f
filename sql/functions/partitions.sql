-- Makes the daily partitions from yesterday to `days` ahead that are missing, each day's three together or not at all:
-- retention drops them together. Each is built aside and then attached, because attaching takes a lock that lets reads and writes
-- pass, whereas `create table … partition of` would stop them. But attaching also locks the default partition, which every query
-- without bounds on ids opens. A long reader, such as pg_dump, would hold up the attaching, and thereby all queries behind it, so
-- it waits for this lock only briefly. A day that cannot be made is reported as a warning; its rows stand in the default
-- partition, where everything works, except that retention deletes them row by row.
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
        -- From the catalog itself: what a name was found to mean before the lock may be cached.
        continue when exists (select from pg_class where relnamespace = 'waybill'::regnamespace and relname = part);
        execute format('create table waybill.%I (like waybill.%I including all)', part, kind);
        if kind = 'deliveries' then
          -- Every delivery is updated at least once: room in the table's pages keeps the new version beside the old one, and room
          -- in the index's pages does so for their entries: full ones would have to be cleaned and split.
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
      -- Deadlock: this waits for retention, which waits for all readers of these tables, of which this is one.
      when lock_not_available or deadlock_detected then
        raise warning 'no partitions from % on yet: another transaction reads the default partition', day;
        -- That transaction would make the next day wait as well.
        exit;
    end;
  end loop;
end $$;
