import type { Pool } from '../../src/db/open.ts'

/** Makes the partitions of past days, as a database has them that has kept these: from `oldest` days ago to `latest`. */
export const keepDays = (sql: Pool, { oldest, latest = 2 }: { oldest: number; latest?: number }) =>
  sql.text(`do $$ declare kind text; today constant timestamptz := date_trunc('day', now(), 'utc'); begin
    for n in ${latest}..${oldest} loop
      foreach kind in array array['events', 'deliveries', 'attempts'] loop
        execute format('create table waybill.%1$s_%2$s partition of waybill.%1$s for values from (%3$L) to (%4$L)', kind,
          to_char((today - n * interval '1 day') at time zone 'utc', 'YYYYMMDD'), waybill.first_id(today - n * interval '1 day'),
          waybill.first_id(today - (n - 1) * interval '1 day'));
      end loop;
    end loop; end $$`)
