import type { Db } from '../db/open.ts'
import { identifier } from '../db/statement.ts'

/** Tables that are partitioned by day: `<kind>_<YYYYMMDD>`, and `<kind>_default` for days that have none. */
export const KINDS = ['events', 'deliveries', 'attempts'] as const
export type Counts = Record<(typeof KINDS)[number], number>
export const NO_ROWS: Counts = { events: 0, deliveries: 0, attempts: 0 }

/** After each step, retention rests for this many times as long as the step took. */
export const REST = 3

const DAYS_AHEAD = 7

/** Makes the daily partitions of the coming week that are missing. Safe when several processes do it at once. */
export const makePartitions = (sql: Db) => sql`select waybill.make_partitions(${DAYS_AHEAD})`

/** One partition: `part` is its day (YYYYMMDD), or `default`. */
export const table = (kind: (typeof KINDS)[number], part: string) => identifier(`waybill.${kind}_${part}`)

/** For the rest of a transaction, rows are looked up one by one: the planner would rather read whole tables. */
export const lookUpOnly = (sql: Db) =>
  sql`select set_config(name, 'off', true) from unnest(array['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin']) as s (name)`

/** How many rows one day's partitions have, attached or not. Throws (isGone) when they are dropped. */
export async function countRows(sql: Db, day: string): Promise<Counts> {
  const [counts] = await sql<[Counts]>`
    select (select count(*)::float8 from ${table('events', day)}) as events,
      (select count(*)::float8 from ${table('deliveries', day)}) as deliveries,
      (select count(*)::float8 from ${table('attempts', day)}) as attempts`
  return counts
}

/**
 * Waits until no other run changes anything, then returns whether a day's tables are attached (`in use`), detached (`aside`) or
 * dropped (`gone`).
 */
export async function takeTurn(sql: Db, part: string): Promise<'in use' | 'aside' | 'gone'> {
  await sql`select pg_advisory_xact_lock(hashtext('waybill.retention'))`
  // From the catalog itself: what a name was found to mean before the lock may be cached.
  const [found] = await sql<{ relispartition: boolean }[]>`
    select relispartition from pg_class where relnamespace = 'waybill'::regnamespace and relname = ${`deliveries_${part}`}`
  if (found === undefined) return 'gone'
  return found.relispartition ? 'in use' : 'aside'
}

/**
 * The ids that the daily partitions of the deliveries are for: from `first` on, below `end`. Of days with a gap between them, as
 * when retention keeps an old one, only those around today: what is in a gap is in the default partition.
 */
export async function readDays(sql: Db): Promise<{ first: string; end: string }> {
  const [days] = await sql<[{ first: string; end: string }]>`
    with days as (
      select day, day + row_number() over (order by day desc) * interval '1 day' as run from (
        select to_date(right(relname, 8), 'YYYYMMDD')::timestamp as day from pg_class
        where relnamespace = 'waybill'::regnamespace and relkind = 'r' and relispartition
          and relname >= 'deliveries_0' and relname < 'deliveries_:') d
    )
    select coalesce(waybill.first_id(min(day) at time zone 'utc'), waybill.first_id('epoch')) as first,
      coalesce(waybill.first_id((max(day) + interval '1 day') at time zone 'utc'), waybill.first_id('epoch')) as end
    from days where run = (select max(run) from days where day <= now() at time zone 'utc')`
  return days
}
