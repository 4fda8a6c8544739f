-- Functions are no longer made by migrations. They are in sql/functions, each once and in its current form, and are installed
-- after these files (src/migrate.ts). One row tells their version and checksum.
create table waybill.functions (version int[] not null, checksum text not null);

-- These files held nothing but functions and are gone. An earlier version, started on a new database, is not to apply its own.
insert into waybill.migrations (file) values
  ('0002_ids.sql'), ('0005_publish.sql'), ('0007_publish_faster.sql'), ('0008_take_back.sql'), ('0009_attempts.sql'),
  ('0010_failures.sql'), ('0011_partitions.sql'), ('0015_publish_wide.sql'), ('0016_in_time.sql'), ('0017_oldest_first.sql'),
  ('0018_claim_bounds.sql'), ('0019_line_that_is_gone.sql'), ('0020_tenants_count_last.sql'), ('0022_clock_gives_way.sql')
on conflict do nothing;
