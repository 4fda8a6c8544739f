import { type Db, isRetryable, type Pool } from '../db.ts'
import type { Log } from '../log.ts'

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

const KINDS = ['events', 'deliveries', 'attempts'] as const
type Counts = Record<(typeof KINDS)[number], number>
type Finished = { tenant_id: string; endpoint_id: string; status: string; n: number }

const DAY_MS = 86_400_000
/** Small enough that a batch of deletes holds nobody up. */
const MAX_DELETE = 5000
const MOST_TRIES = 20
const RETRY_MS = 500

/**
 * Deletes events, deliveries, attempts and idempotency keys that are older than `days` whole UTC days, or with
 * `apply: false` counts them. Days are dropped as a whole, which costs the same however many rows they have; a day on
 * which a delivery is still live loses only what belongs to finished events. Safe to run twice at once.
 */
export async function runRetention(
  pool: Pool,
  options: { days: number; apply: boolean; log: Log },
): Promise<Retention> {
  const [clock] = await pool<{ now: Date }[]>`select now()`
  const cutoff = new Date(
    Math.floor(((clock as { now: Date }).now.getTime() - options.days * DAY_MS) / DAY_MS) * DAY_MS,
  )
  const total: Counts = { events: 0, deliveries: 0, attempts: 0 }
  for (const day of await daysBefore(pool, cutoff)) {
    const counts = options.apply ? await dropDay(pool, day) : await countDay(pool, day)
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

async function countDay(pool: Pool, day: string): Promise<Counts> {
  return (await hasLive(pool, day)) ? await pruneRows(pool, day, null, false) : await countRows(pool, day)
}

async function countRows(sql: Db, day: string): Promise<Counts> {
  const [counts] = await sql<Counts[]>`
    select (select count(*)::float8 from ${table(sql, 'events', day)}) as events,
      (select count(*)::float8 from ${table(sql, 'deliveries', day)}) as deliveries,
      (select count(*)::float8 from ${table(sql, 'attempts', day)}) as attempts`
  return counts as Counts
}

async function hasLive(sql: Db, day: string): Promise<boolean> {
  const live = await sql`select from ${table(sql, 'deliveries', day)} where status in ('pending', 'retrying') limit 1`
  return live.length > 0
}

/** Drops one day of all three tables, or prunes it when something in it is live. */
async function dropDay(pool: Pool, day: string): Promise<Counts> {
  for (let tries = 1; ; tries++) {
    try {
      const dropped = await pool.begin((sql) => dropFinishedDay(sql, day))
      return dropped ?? (await pruneRows(pool, day, null, true))
    } catch (error) {
      if (!isRetryable(error) || tries === MOST_TRIES) throw error
      await new Promise((resolve) => setTimeout(resolve, Math.random() * RETRY_MS))
    }
  }
}

/** Null when something in it is live. Its counts leave the endpoints' statistics with it. */
async function dropFinishedDay(sql: Db, day: string): Promise<Counts | null> {
  // Another run may take its time over this day.
  await sql`select pg_advisory_xact_lock(hashtext('waybill.retention'))`
  // Of two that wait for each other it is this one that gives up, before Postgres picks one (deadlock_timeout).
  await sql`set local lock_timeout = '500ms'`
  // By the catalog's rows: a name that was looked up before the lock may be remembered.
  const found = await sql`
    select from pg_class where relnamespace = 'waybill'::regnamespace and relname = ${`deliveries_${day}`}`
  if (found.length === 0) return { events: 0, deliveries: 0, attempts: 0 }
  // Writers of this day, which are replays alone, wait from here on; all others only for the drops themselves.
  await sql`lock table ${table(sql, 'deliveries', day)} in share mode`
  if (await hasLive(sql, day)) return null
  const counts = await countRows(sql, day)
  const finished = await sql<Finished[]>`
    select tenant_id, endpoint_id, status, count(*)::int as n from ${table(sql, 'deliveries', day)} group by 1, 2, 3`
  for (const kind of KINDS) await sql`drop table ${table(sql, kind, day)}`
  await forget(sql, finished)
  return counts
}

/**
 * Deletes row by row, in batches, the events of `part` that have no live delivery (and, with a cutoff, are older), with
 * their deliveries and attempts. For days that are kept for a live delivery, and for the default partition.
 */
async function pruneRows(pool: Pool, part: string, cutoff: Date | null, apply: boolean): Promise<Counts> {
  const total: Counts = { events: 0, deliveries: 0, attempts: 0 }
  for (;;) {
    const counts = await pool.begin(async (sql) => {
      let finished = sql`
        select e.tenant_id, e.event_id from ${table(sql, 'events', part)} e
        where ${cutoff ? sql`e.event_id < waybill.first_id(${cutoff})` : sql`true`} and not exists (
          select from waybill.deliveries d where d.tenant_id = e.tenant_id and d.event_id = e.event_id and d.status in ('pending', 'retrying')
            and d.delivery_id between waybill.first_delivery_id(e.event_id) and waybill.last_delivery_id(e.event_id))`
      if (apply) {
        // Asked again once they are locked: one of them may have been replayed a moment before.
        const locked = await sql<{ tenant_id: string; event_id: string }[]>`
          ${finished} order by e.tenant_id, e.event_id limit ${MAX_DELETE} for update skip locked`
        finished = sql`${finished} and (e.tenant_id, e.event_id) in (
          select * from unnest(${locked.map((row) => row.tenant_id)}::text[], ${locked.map((row) => row.event_id)}::uuid[]))`
      }
      const theirs = sql`
        select d.* from doomed join ${table(sql, 'deliveries', part)} d on d.tenant_id = doomed.tenant_id and d.event_id = doomed.event_id`
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
    for (const kind of KINDS) total[kind] += counts[kind]
    if (!apply || counts.events === 0) return total
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

async function deleteKeys(pool: Pool, cutoff: Date, apply: boolean): Promise<number> {
  if (!apply) {
    const [row] = await pool<{ count: number }[]>`
      select count(*)::float8 from waybill.idempotency_keys where event_id < waybill.first_id(${cutoff})`
    return row?.count ?? 0
  }
  let total = 0
  for (;;) {
    const { count } = await pool`
      delete from waybill.idempotency_keys where (tenant_id, key) in (
        select tenant_id, key from waybill.idempotency_keys where event_id < waybill.first_id(${cutoff}) limit ${MAX_DELETE} for update skip locked)`
    total += count
    if (count === 0) return total
  }
}

const table = (sql: Db, kind: (typeof KINDS)[number], part: string) => sql(`waybill.${kind}_${part}`)
