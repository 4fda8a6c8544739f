import { setTimeout as sleep } from 'node:timers/promises'
import { type Db, isGone, isRetryable, type Pool } from '../db.ts'
import { firstId } from '../ids.ts'
import type { Log } from '../log.ts'
import { type Counts, countMovable, KINDS, lookUpOnly, moveLive, table } from './partitions.ts'

/** How many rows were deleted, or would be. */
export type Retention = {
  applied: boolean
  /** What was created before this is deleted: midnight UTC, since the tables are kept by day. */
  cutoff: Date
  events: number
  deliveries: number
  attempts: number
  idempotency_keys: number
}

const NONE: Counts = { events: 0, deliveries: 0, attempts: 0 }
type Finished = { tenant_id: string; endpoint_id: string; status: string; n: number }

const DAY_MS = 86_400_000
/** Small enough that a batch of deletes holds nobody up. */
const MAX_DELETE = 250
/** Times as long as a batch took, or putting a day aside, nothing is deleted after it. */
const REST = 3
const MOST_TRIES = 20
const RETRY_MS = 500

/**
 * Deletes events, deliveries, attempts and idempotency keys that are older than `days` whole UTC days, or with
 * `apply: false` counts them. Days are counted and then dropped as a whole; what is still live of them moves to the default
 * partitions first. A day with too much of that, or in use for long (a dump reads every table to its end), loses only what
 * belongs to finished events, row by row. Safe to run twice at once.
 */
export async function runRetention(
  pool: Pool,
  options: { days: number; apply: boolean; log: Log },
): Promise<Retention> {
  const [clock] = await pool<{ now: Date }[]>`select now()`
  const cutoff = new Date(
    Math.floor(((clock as { now: Date }).now.getTime() - options.days * DAY_MS) / DAY_MS) * DAY_MS,
  )
  const total = { ...NONE }
  let tries = MOST_TRIES
  async function deleteDay(day: string): Promise<Counts> {
    try {
      const counts = await dropDay(pool, day, tries)
      tries = MOST_TRIES
      return counts
    } catch (error) {
      if (!isRetryable(error)) throw error
      options.log.warn({ err: error, day }, 'retention.day_in_use')
      // Whoever is in the way of one day is in the way of the next, most likely, and everybody waits at each try.
      tries = 1
      return await pruneRows(pool, day, null, true)
    }
  }
  for (const day of await daysBefore(pool, cutoff)) {
    const counts = options.apply ? await deleteDay(day) : await countDay(pool, day).catch(noneIfGone)
    for (const kind of KINDS) total[kind] += counts[kind]
  }
  const leftovers = await pruneRows(pool, 'default', cutoff, options.apply)
  for (const kind of KINDS) total[kind] += leftovers[kind]
  const result = {
    applied: options.apply,
    cutoff,
    ...total,
    idempotency_keys: await deleteKeys(pool, cutoff, options.apply),
  }
  if (options.apply) await pool`delete from waybill.attempt_counts where hour < ${cutoff}`
  options.log.info(result, 'retention.run')
  return result
}

/** The suffixes of the daily partitions that end at or before `cutoff`, oldest first. */
async function daysBefore(pool: Pool, cutoff: Date): Promise<string[]> {
  const last = cutoff.toISOString().slice(0, 10).replaceAll('-', '')
  const rows = await pool<{ day: string }[]>`
    select substring(relname from '\\d{8}$') as day from pg_class
    where relnamespace = 'waybill'::regnamespace and relkind = 'r' and relname ~ '^deliveries_\\d{8}$'
      and substring(relname from '\\d{8}$') < ${last}
    order by 1`
  return rows.map((row) => row.day)
}

/** Another run has dropped the day that was to be counted. */
function noneIfGone(error: unknown): Counts {
  if (isGone(error)) return NONE
  throw error
}

async function countDay(pool: Pool, day: string): Promise<Counts> {
  const counts = await countRows(pool, day)
  const kept = await countMovable(pool, day)
  if (kept === null) return await pruneRows(pool, day, null, false)
  for (const kind of KINDS) counts[kind] -= kept[kind]
  return counts
}

async function countRows(sql: Db, day: string): Promise<Counts> {
  const [counts] = await sql<Counts[]>`
    select (select count(*)::float8 from ${table(sql, 'events', day)}) as events,
      (select count(*)::float8 from ${table(sql, 'deliveries', day)}) as deliveries,
      (select count(*)::float8 from ${table(sql, 'attempts', day)}) as attempts`
  return counts as Counts
}

/**
 * Drops one day of all three tables, or prunes it when much in it is live. In two steps: it is put aside, for which
 * everybody waits a moment, and then counted and dropped, which takes long and holds up nobody. A day that was only put
 * aside, because the process ended or it is still read, is found by the next run. Throws a retryable error when others do
 * not let go of it.
 */
async function dropDay(pool: Pool, day: string, mostTries: number): Promise<Counts> {
  if (!(await putAsideInTurn(pool, day, mostTries))) return await pruneRows(pool, day, null, true)
  return await pool.begin((sql) => dropAside(sql, day))
}

async function putAsideInTurn(pool: Pool, day: string, mostTries: number): Promise<boolean> {
  for (let tries = 1; ; tries++) {
    try {
      const began = performance.now()
      const isAside = await pool.begin((sql) => putAside(sql, day))
      // There may be many such days, and everybody waited for this one.
      await sleep(REST * (performance.now() - began))
      return isAside
    } catch (error) {
      if (!isRetryable(error) || tries === mostTries) throw error
      await sleep(Math.random() * RETRY_MS)
    }
  }
}

/** Waits until no other run changes anything, and answers where a part of the tables is since then. */
async function takeTurn(sql: Db, part: string): Promise<'in use' | 'aside' | 'gone'> {
  await sql`select pg_advisory_xact_lock(hashtext('waybill.retention'))`
  // By the catalog's rows: a name that was looked up before the lock may be remembered.
  const [found] = await sql<{ relispartition: boolean }[]>`
    select relispartition from pg_class where relnamespace = 'waybill'::regnamespace and relname = ${`deliveries_${part}`}`
  if (found === undefined) return 'gone'
  return found.relispartition ? 'in use' : 'aside'
}

/** Takes one day out of the tables: what is live stays, elsewhere, and the rest is not seen any more. False when too much is live. */
async function putAside(sql: Db, day: string): Promise<boolean> {
  if ((await takeTurn(sql, day)) !== 'in use') return true
  if ((await countMovable(sql, day)) === null) return false
  // Autovacuum gives way after a second, in which nobody else waits.
  await sql`lock table waybill.events, waybill.deliveries, waybill.attempts, waybill.idempotency_keys in share update exclusive mode`
  // Whoever comes next waits behind a lock that is waited for: it is given up soon, and tried again.
  await sql`set local lock_timeout = '200ms'`
  // Publishing takes events before deliveries, and claiming the other way round. The first to be locked are the keys, with
  // which publishing begins: those who then wait for the others have none of them.
  await sql`lock table waybill.idempotency_keys in share mode`
  await sql`lock table only waybill.deliveries, only waybill.events, only waybill.attempts in access exclusive mode`
  for (const kind of KINDS) await sql`alter table ${sql(`waybill.${kind}`)} detach partition ${table(sql, kind, day)}`
  // With what was replayed meanwhile.
  await moveLive(sql, day)
  return true
}

/** Its counts leave the endpoints' statistics with it. */
async function dropAside(sql: Db, day: string): Promise<Counts> {
  if ((await takeTurn(sql, day)) === 'gone') return NONE
  const counts = await countRows(sql, day)
  const finished = await sql<Finished[]>`
    select tenant_id, endpoint_id, status, count(*)::int as n from ${table(sql, 'deliveries', day)} group by 1, 2, 3`
  // Nobody waits behind this one, and autovacuum gives way after a second.
  await sql`set local lock_timeout = '5s'`
  for (const kind of KINDS) await sql`drop table ${table(sql, kind, day)}`
  await forget(sql, finished)
  return counts
}

/**
 * Deletes row by row, in batches, the events of `part` that have no live delivery (and, with a cutoff, are older), with
 * their deliveries and attempts. For days that are kept for their live deliveries, and for the default partition.
 */
async function pruneRows(pool: Pool, part: string, cutoff: Date | null, apply: boolean): Promise<Counts> {
  const total = { ...NONE }
  let last = { tenant_id: '', event_id: firstId(new Date(0)) }
  for (;;) {
    const began = performance.now()
    const counts = await pool.begin(async (sql) => {
      if (apply && (await takeTurn(sql, part)) !== 'in use') return null
      let finished = sql`
        select e.tenant_id, e.event_id from ${table(sql, 'events', part)} e
        where ${cutoff ? sql`e.event_id < waybill.first_id(${cutoff})` : sql`true`} and not exists (
          select from waybill.deliveries d where d.tenant_id = e.tenant_id and d.event_id = e.event_id and d.status in ('pending', 'retrying')
            and d.delivery_id between waybill.first_delivery_id(e.event_id) and waybill.last_delivery_id(e.event_id))`
      if (apply) {
        await lookUpOnly(sql)
        // Asked again once they are locked: one of them may have been replayed a moment before.
        const locked = await sql<{ tenant_id: string; event_id: string }[]>`
          ${finished} and (e.tenant_id, e.event_id) > (${last.tenant_id}, ${last.event_id}) order by e.tenant_id, e.event_id limit ${MAX_DELETE} for update skip locked`
        if (locked.length === 0) return null
        last = locked.at(-1) as typeof last
        finished = sql`${finished} and (e.tenant_id, e.event_id) in (
          select * from unnest(${locked.map((row) => row.tenant_id)}::text[], ${locked.map((row) => row.event_id)}::uuid[]))`
      }
      const theirs = sql`
        select d.* from doomed join ${table(sql, 'deliveries', part)} d on d.tenant_id = doomed.tenant_id and d.event_id = doomed.event_id
          and d.delivery_id between waybill.first_delivery_id(doomed.event_id) and waybill.last_delivery_id(doomed.event_id)`
      const verb = apply ? sql`delete from` : sql`select 1 from`
      const using = apply ? sql`using` : sql`,`
      const returning = apply ? sql`returning 1` : sql``
      const [row] = await sql<(Counts & { finished: Finished[] })[]>`
        with doomed as materialized (${finished}), doomed_deliveries as materialized (${theirs}),
        a as (${verb} ${table(sql, 'attempts', part)} t ${using} doomed_deliveries x where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id ${returning}),
        d as (${verb} ${table(sql, 'deliveries', part)} t ${using} doomed_deliveries x where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id ${returning}),
        e as (${verb} ${table(sql, 'events', part)} t ${using} doomed x where t.tenant_id = x.tenant_id and t.event_id = x.event_id ${returning})
        select (select count(*)::float8 from e) as events, (select count(*)::float8 from d) as deliveries, (select count(*)::float8 from a) as attempts,
          (select coalesce(json_agg(f), '[]') from (select tenant_id, endpoint_id, status, count(*)::int as n from doomed_deliveries group by 1, 2, 3) f) as finished`
      const counts = row as Counts & { finished: Finished[] }
      if (apply) await forget(sql, counts.finished)
      return counts
    })
    for (const kind of KINDS) total[kind] += counts?.[kind] ?? 0
    if (!apply || counts === null) return total
    await sleep(REST * (performance.now() - began))
  }
}

/**
 * Takes finished deliveries out of the endpoints' counts. The last step of a transaction: whoever publishes or records has
 * used the tables when it wants these rows, and each of its batches would wait for the whole of ours.
 */
async function forget(sql: Db, finished: Finished[]): Promise<void> {
  await sql`
    select waybill.count_deliveries(${finished.map((row) => row.tenant_id)}::text[], ${finished.map((row) => row.endpoint_id)}::uuid[],
      ${finished.map((row) => row.status)}::waybill.delivery_status[], ${finished.map((row) => -row.n)}::int[])`
}

/** A key is kept as long as its event, which a live delivery may keep beyond its time. */
async function deleteKeys(pool: Pool, cutoff: Date, apply: boolean): Promise<number> {
  if (!apply) {
    const [row] = await pool<{ count: number }[]>`
      select count(*)::float8 from waybill.idempotency_keys k where event_id < waybill.first_id(${cutoff}) and (
        select d.event_id from waybill.deliveries d where d.tenant_id = k.tenant_id and d.event_id = k.event_id and d.status in ('pending', 'retrying')
          and d.delivery_id between waybill.first_delivery_id(k.event_id) and waybill.last_delivery_id(k.event_id) limit 1) is null`
    return row?.count ?? 0
  }
  let total = 0
  // In the order of the table's pages, so that none is read again for each batch.
  let last = '(0,0)'
  for (;;) {
    const began = performance.now()
    const [deleted] = await pool<{ count: number; last: string | null }[]>`
      with gone as (
        delete from waybill.idempotency_keys where ctid = any(array(
          select ctid from waybill.idempotency_keys k where ctid > ${last} and event_id < waybill.first_id(${cutoff})
            -- A sub-query that stays one: a join would read all events for each batch.
            and (select e.event_id from waybill.events e where e.tenant_id = k.tenant_id and e.event_id = k.event_id) is null
          limit ${MAX_DELETE} for update skip locked
        )) returning ctid
      )
      select count(*)::int, max(ctid)::text as last from gone`
    if (!deleted?.last) return total
    total += deleted.count
    last = deleted.last
    await sleep(REST * (performance.now() - began))
  }
}
