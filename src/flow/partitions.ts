import type { Db } from '../db.ts'

/** What is kept by day: a table of each for every day, `<kind>_<YYYYMMDD>`, and `<kind>_default` for days without. */
export const KINDS = ['events', 'deliveries', 'attempts'] as const
export type Counts = Record<(typeof KINDS)[number], number>

const DAYS_AHEAD = 7
/** Everybody waits while a day's live rows are moved: 0.2 s for as many as this, on a machine that has other work. */
const MOST_MOVED = 10_000
const MOST_MOVED_BYTES = 4 * 1024 * 1024
/** Everybody waits while the default partitions are read, which making a day's partitions does. */
const MOST_DEFAULT_BYTES = 64 * 1024 * 1024

/** Makes the daily partitions of the coming week that are missing. Safe when several processes do it at once. */
export const makePartitions = (sql: Db) => sql`select waybill.make_partitions(${DAYS_AHEAD})`

export const table = (sql: Db, kind: (typeof KINDS)[number], part: string) => sql(`waybill.${kind}_${part}`)

/** For the rest of a transaction, rows are looked up one by one, however large the tables are: the planner would read all. */
export const lookUpOnly = (sql: Db) =>
  sql`select set_config(name, 'off', true) from unnest(array['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin']) as s (name)`

/**
 * How many rows of a day belong to events that have a live delivery, or null when they are more than may be moved to the
 * default partitions (moveLive).
 */
export async function countMovable(sql: Db, day: string): Promise<Counts | null> {
  const [found] = await sql<(Counts & { bytes: number; bytes_there: number })[]>`
    with live as materialized (
      select distinct tenant_id, event_id from (
        select tenant_id, event_id from ${table(sql, 'deliveries', day)} where status in ('pending', 'retrying') limit ${MOST_MOVED + 1}) l
    ), e as materialized (
      select e.bytes from live x cross join lateral (
        select pg_column_size(payload) as bytes from ${table(sql, 'events', day)} t where t.tenant_id = x.tenant_id and t.event_id = x.event_id offset 0) e
    ), d as materialized (
      select d.* from live x cross join lateral (
        select tenant_id, delivery_id from ${table(sql, 'deliveries', day)} t where t.tenant_id = x.tenant_id and t.event_id = x.event_id
          and t.delivery_id between waybill.first_delivery_id(x.event_id) and waybill.last_delivery_id(x.event_id) offset 0) d limit ${MOST_MOVED + 1}
    ), a as materialized (
      select a.bytes from d x cross join lateral (
        select pg_column_size(response_body) as bytes from ${table(sql, 'attempts', day)} t
        where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id offset 0) a limit ${MOST_MOVED + 1}
    )
    select (select count(*)::int from e) as events, (select count(*)::int from d) as deliveries, (select count(*)::int from a) as attempts,
      (select coalesce(sum(bytes), 0)::float8 from (select bytes from e union all select bytes from a) s) as bytes,
      (select sum(pg_relation_size('waybill.' || kind || '_default'))::float8 from unnest(${KINDS}::text[]) as k (kind)) as bytes_there`
  const { bytes, bytes_there, ...counts } = found as NonNullable<typeof found>
  const rows = counts.events + counts.deliveries + counts.attempts
  const isLittle = rows <= MOST_MOVED && bytes <= MOST_MOVED_BYTES && bytes_there <= MOST_DEFAULT_BYTES
  return rows === 0 || isLittle ? counts : null
}

/**
 * Moves the events of a day that have a live delivery, with all their deliveries and attempts, to the default partitions.
 * The day's tables are detached, in this transaction: whoever wants these rows waits for it at the tables that they were
 * part of, before it takes its snapshot, so it finds them where they are then.
 */
export async function moveLive(sql: Db, day: string): Promise<void> {
  await lookUpOnly(sql)
  await sql`
    with live as materialized (
      select distinct tenant_id, event_id from ${table(sql, 'deliveries', day)} where status in ('pending', 'retrying')
    ), e as (
      delete from ${table(sql, 'events', day)} t using live x where t.tenant_id = x.tenant_id and t.event_id = x.event_id returning t.*
    ), d as (
      delete from ${table(sql, 'deliveries', day)} t using live x where t.tenant_id = x.tenant_id and t.event_id = x.event_id
        and t.delivery_id between waybill.first_delivery_id(x.event_id) and waybill.last_delivery_id(x.event_id) returning t.*
    ), a as (
      delete from ${table(sql, 'attempts', day)} t using d x where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id returning t.*
    ), moved_events as (insert into waybill.events_default select * from e),
    moved_deliveries as (insert into waybill.deliveries_default select * from d)
    insert into waybill.attempts_default select * from a`
}
