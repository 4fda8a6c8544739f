import { setTimeout as sleep } from 'node:timers/promises'
import type { Db, Pool } from '../db/open.ts'
import { retried } from '../db/retried.ts'
import { identifier } from '../db/statement.ts'
import { type Counts, countRows, KINDS, lookUpOnly, NO_ROWS, REST, table, takeTurn } from './partitions.ts'

const RETRY_MS = 500
/** Everybody waits while a day's live rows are moved: 0.2 s for this many, on a busy machine. */
const MAX_MOVED = 10_000
const MAX_MOVED_BYTES = 4 * 1024 * 1024
/** So many counts are changed at once. Who publishes to one of their endpoints waits meanwhile: 50 ms on a busy machine. */
const MAX_UNCOUNTED = 1000
/** Making a day's partitions reads the default partitions, and everybody waits for that. */
const MAX_DEFAULT_BYTES = 64 * 1024 * 1024

/**
 * Drops one day of all three tables; its live rows move to the default partitions. Null if those are too many to be moved. In two
 * steps: the day is detached, for which everybody waits a moment, then counted and dropped, which takes long and delays nobody. A day
 * that was only detached, because the process ended or someone still reads it, is dropped by the next run. What has gone is still in
 * its endpoints' counts (`uncountDropped`). Throws a retryable error if others do not let go of the day within `mostTries`.
 */
export async function dropDay(pool: Pool, day: string, mostTries: number): Promise<Counts | null> {
  const isDetached = await detachInTurn(pool, day, mostTries)
  return isDetached ? await pool.begin((sql) => dropDetached(sql, day)) : null
}

/** What `dropDay` would delete; null when too much is live. Throws (isGone) when another run drops it meanwhile. */
export async function countDay(pool: Pool, day: string): Promise<Counts | null> {
  const counts = await countRows(pool, day)
  const kept = await countMovable(pool, day)
  if (kept === null) return null
  for (const kind of KINDS) counts[kind] -= kept[kind]
  return counts
}

async function detachInTurn(pool: Pool, day: string, most: number): Promise<boolean> {
  const detach = async () => {
    const began = performance.now()
    const isDetached = await pool.begin((sql) => detachDay(sql, day))
    // There may be many such days, and everybody waited for this one.
    await sleep(REST * (performance.now() - began))
    return isDetached
  }
  return await retried(detach, { most, pause: () => sleep(Math.random() * RETRY_MS) })
}

/** Detaches one day from the tables and moves its live rows to the default partitions. False if too many are live. */
async function detachDay(sql: Db, day: string): Promise<boolean> {
  if ((await takeTurn(sql, day)) !== 'in use') return true
  if ((await countMovable(sql, day)) === null) return false
  // For this lock autovacuum gives way after a second, while nobody else has to wait yet.
  await sql`lock table waybill.events, waybill.deliveries, waybill.attempts, waybill.idempotency_keys in share update exclusive mode`
  // While this waits for a lock, everybody who comes later waits behind it: so it gives up soon, and tries again.
  await sql`set local lock_timeout = '200ms'`
  // Publishing locks events before deliveries, and claiming the other way round. So the idempotency keys, with which publishing
  // begins, are locked first: a publish that waits for them has no lock on the other tables yet.
  await sql`lock table waybill.idempotency_keys in share mode`
  await sql`lock table only waybill.deliveries, only waybill.events, only waybill.attempts in access exclusive mode`
  for (const kind of KINDS) await sql`alter table ${identifier(`waybill.${kind}`)} detach partition ${table(kind, day)}`
  // The live rows are looked up again, so they include what was replayed meanwhile.
  await moveLive(sql, day)
  return true
}

/** Drops a day that has been detached, and notes what is to be taken off the endpoints' counts. */
async function dropDetached(sql: Db, day: string): Promise<Counts> {
  if ((await takeTurn(sql, day)) === 'gone') return NO_ROWS
  const counts = await countRows(sql, day)
  await sql`
    insert into waybill.uncounted as u select tenant_id, endpoint_id, status, count(*) from ${table('deliveries', day)} group by 1, 2, 3
    on conflict (tenant_id, endpoint_id, status) do update set count = u.count + excluded.count`
  // Nobody else waits behind this lock, and autovacuum gives way after a second.
  await sql`set local lock_timeout = '5s'`
  for (const kind of KINDS) await sql`drop table ${table(kind, day)}`
  return counts
}

/** Takes the deliveries of days that were dropped, by this run or one that did not come to this, off their endpoints' counts. */
export async function uncountDropped(pool: Pool): Promise<void> {
  for (;;) {
    const began = performance.now()
    const [{ taken }] = await retried(
      () => pool<[{ taken: number }]>`
        with taken as (
          delete from waybill.uncounted where ctid = any(array(
            select ctid from waybill.uncounted order by tenant_id, endpoint_id, status limit ${MAX_UNCOUNTED} for update skip locked))
          returning *
        )
        select count(*)::int as taken, waybill.count_deliveries(array_agg(tenant_id), array_agg(endpoint_id), array_agg(status), array_agg(-count))
        from taken`,
    )
    if (taken === 0) return
    await sleep(REST * (performance.now() - began))
  }
}

/**
 * How many rows of a day belong to events with a live delivery; null if they are too many, or too large, to be moved to the
 * default partitions (moveLive).
 */
async function countMovable(sql: Db, day: string): Promise<Counts | null> {
  const [{ bytes, bytes_there, ...counts }] = await sql<[Counts & { bytes: number; bytes_there: number }]>`
    with live as materialized (
      select distinct tenant_id, event_id from (
        select tenant_id, event_id from ${table('deliveries', day)} where status in ('pending', 'retrying') limit ${MAX_MOVED + 1}) l
    ), e as materialized (
      select e.bytes from live x cross join lateral (
        select pg_column_size(payload) as bytes from ${table('events', day)} t where t.tenant_id = x.tenant_id and t.event_id = x.event_id offset 0) e
    ), d as materialized (
      select d.* from live x cross join lateral (
        select tenant_id, delivery_id from ${table('deliveries', day)} t where t.tenant_id = x.tenant_id and t.event_id = x.event_id
          and t.delivery_id between waybill.first_delivery_id(x.event_id) and waybill.last_delivery_id(x.event_id) offset 0) d limit ${MAX_MOVED + 1}
    ), a as materialized (
      select a.bytes from d x cross join lateral (
        select pg_column_size(response_body) as bytes from ${table('attempts', day)} t
        where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id offset 0) a limit ${MAX_MOVED + 1}
    )
    select (select count(*)::int from e) as events, (select count(*)::int from d) as deliveries, (select count(*)::int from a) as attempts,
      (select coalesce(sum(bytes), 0)::float8 from (select bytes from e union all select bytes from a) s) as bytes,
      (select sum(pg_relation_size('waybill.' || kind || '_default'))::float8 from unnest(${KINDS}::text[]) as k (kind)) as bytes_there`
  const rows = counts.events + counts.deliveries + counts.attempts
  const isLittle = rows <= MAX_MOVED && bytes <= MAX_MOVED_BYTES && bytes_there <= MAX_DEFAULT_BYTES
  return rows === 0 || isLittle ? counts : null
}

/**
 * Moves the events of a day that have a live delivery, with all their deliveries and attempts, to the default partitions.
 * The day's tables have been detached in this transaction, so whoever wants these rows waits at the parent tables, before taking a
 * snapshot, and then sees them where they have moved.
 */
async function moveLive(sql: Db, day: string): Promise<void> {
  await lookUpOnly(sql)
  await sql`
    with live as materialized (
      select distinct tenant_id, event_id from ${table('deliveries', day)} where status in ('pending', 'retrying')
    ), e as (
      delete from ${table('events', day)} t using live x where t.tenant_id = x.tenant_id and t.event_id = x.event_id returning t.*
    ), d as (
      delete from ${table('deliveries', day)} t using live x where t.tenant_id = x.tenant_id and t.event_id = x.event_id
        and t.delivery_id between waybill.first_delivery_id(x.event_id) and waybill.last_delivery_id(x.event_id) returning t.*
    ), a as (
      delete from ${table('attempts', day)} t using d x where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id returning t.*
    ), moved_events as (insert into waybill.events_default select * from e),
    moved_deliveries as (insert into waybill.deliveries_default select * from d)
    insert into waybill.attempts_default select * from a`
}
