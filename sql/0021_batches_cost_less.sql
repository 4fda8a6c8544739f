-- For daily partitions from before the keys of deliveries had room in their pages (sql/functions/partitions.sql).
do $$
declare
  key regclass;
begin
  for key in
    select indexrelid from pg_inherits join pg_index on indrelid = inhrelid and indisprimary
    where inhparent = 'waybill.deliveries'::regclass
  loop
    execute format('alter index %s set (fillfactor = 50)', key);
  end loop;
end $$;
