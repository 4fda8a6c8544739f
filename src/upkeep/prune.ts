import { setTimeout as sleep } from 'node:timers/promises'
import type { Db, Pool } from '../db/open.ts'
import { fragment } from '../db/statement.ts'
import { firstId } from '../ids.ts'
import { type Counts, KINDS, lookUpOnly, NO_ROWS, REST, table, takeTurn } from './partitions.ts'

/** How many finished deliveries an endpoint loses. */
type Finished = { tenant_id: string; endpoint_id: string; status: string; n: number }

/** Small enough that a batch of deletes delays nobody. */
const MAX_DELETE = 250

/** The events of `part` that have no live delivery and, with a cutoff, are older. */
const finishedEvents = (part: string, cutoff: Date | null) => fragment`
  select e.tenant_id, e.event_id from ${table('events', part)} e
  where ${cutoff ? fragment`e.event_id < waybill.first_id(${cutoff})` : fragment`true`} and not exists (
    select from waybill.deliveries d where d.tenant_id = e.tenant_id and d.event_id = e.event_id and d.status in ('pending', 'retrying')
      and d.delivery_id between waybill.first_delivery_id(e.event_id) and waybill.last_delivery_id(e.event_id))`

/** The deliveries of the events in `doomed`. */
const theirDeliveries = (part: string) => fragment`
  select d.* from doomed join ${table('deliveries', part)} d on d.tenant_id = doomed.tenant_id and d.event_id = doomed.event_id
    and d.delivery_id between waybill.first_delivery_id(doomed.event_id) and waybill.last_delivery_id(doomed.event_id)`

/** What `pruneRows` would delete. */
export async function countRowsToPrune(pool: Pool, part: string, cutoff: Date | null): Promise<Counts> {
  const [counts] = await pool<[Counts]>`
    with doomed as materialized (${finishedEvents(part, cutoff)}), doomed_deliveries as materialized (${theirDeliveries(part)})
    select (select count(*)::float8 from doomed) as events, (select count(*)::float8 from doomed_deliveries) as deliveries,
      (select count(*)::float8 from ${table('attempts', part)} t join doomed_deliveries using (tenant_id, delivery_id)) as attempts`
  return counts
}

/**
 * Deletes row by row, in batches, the events of `part` that have no live delivery (and, with a cutoff, are older), with
 * their deliveries and attempts. For days that are kept for their live deliveries, and for the default partition.
 */
export async function pruneRows(pool: Pool, part: string, cutoff: Date | null): Promise<Counts> {
  const total = { ...NO_ROWS }
  let last: EventKey = { tenant_id: '', event_id: firstId(new Date(0)) }
  for (;;) {
    const began = performance.now()
    const pruned = await pool.begin((sql) => pruneBatch(sql, part, cutoff, last))
    if (pruned === null) return total
    last = pruned.last
    for (const kind of KINDS) total[kind] += pruned.counts[kind]
    await sleep(REST * (performance.now() - began))
  }
}

type EventKey = { tenant_id: string; event_id: string }

/** Deletes the next events after `last`; null if there are none, or if their tables have gone. */
async function pruneBatch(
  sql: Db,
  part: string,
  cutoff: Date | null,
  after: EventKey,
): Promise<{ counts: Counts; last: EventKey } | null> {
  if ((await takeTurn(sql, part)) !== 'in use') return null
  await lookUpOnly(sql)
  const finished = finishedEvents(part, cutoff)
  const locked = await sql<EventKey[]>`
    ${finished} and (e.tenant_id, e.event_id) > (${after.tenant_id}, ${after.event_id}) order by e.tenant_id, e.event_id limit ${MAX_DELETE} for update skip locked`
  const last = locked.at(-1)
  if (last === undefined) return null
  // Checked again now that they are locked: one may have been replayed a moment before.
  const [{ finished: uncounted, ...counts }] = await sql<[Counts & { finished: Finished[] }]>`
    with doomed as materialized (${finished} and (e.tenant_id, e.event_id) in (
      select * from unnest(${locked.map((row) => row.tenant_id)}::text[], ${locked.map((row) => row.event_id)}::uuid[]))),
    doomed_deliveries as materialized (${theirDeliveries(part)}),
    a as (delete from ${table('attempts', part)} t using doomed_deliveries x where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id returning 1),
    d as (delete from ${table('deliveries', part)} t using doomed_deliveries x where t.tenant_id = x.tenant_id and t.delivery_id = x.delivery_id returning 1),
    e as (delete from ${table('events', part)} t using doomed x where t.tenant_id = x.tenant_id and t.event_id = x.event_id returning 1)
    select (select count(*)::float8 from e) as events, (select count(*)::float8 from d) as deliveries, (select count(*)::float8 from a) as attempts,
      (select coalesce(json_agg(f), '[]') from (select tenant_id, endpoint_id, status, count(*)::int as n from doomed_deliveries group by 1, 2, 3) f) as finished`
  await uncountFinished(sql, uncounted)
  return { counts, last }
}

/** How many idempotency keys `deleteKeys` would delete. A key is kept as long as its event, which a live delivery may keep beyond its time. */
export async function countKeys(pool: Pool, cutoff: Date): Promise<number> {
  const [{ count }] = await pool<[{ count: number }]>`
    select count(*)::float8 from waybill.idempotency_keys k where event_id < waybill.first_id(${cutoff}) and (
      select d.event_id from waybill.deliveries d where d.tenant_id = k.tenant_id and d.event_id = k.event_id and d.status in ('pending', 'retrying')
        and d.delivery_id between waybill.first_delivery_id(k.event_id) and waybill.last_delivery_id(k.event_id) limit 1) is null`
  return count
}

/** Deletes the idempotency keys whose events are gone, once these have been deleted. */
export async function deleteKeys(pool: Pool, cutoff: Date): Promise<number> {
  let total = 0
  // In the order of the table's pages, so that each page is read once.
  let last = '(0,0)'
  for (;;) {
    const began = performance.now()
    const deleted = await pool.begin((sql) => deleteNextKeys(sql, cutoff, last))
    if (!deleted.last) return total
    total += deleted.count
    last = deleted.last
    await sleep(REST * (performance.now() - began))
  }
}

/** Deletes the next keys after `after`, a row's place in the table. */
async function deleteNextKeys(sql: Db, cutoff: Date, after: string): Promise<{ count: number; last: string | null }> {
  // A scan of the whole table might begin anywhere in it.
  await lookUpOnly(sql)
  const [deleted] = await sql<[{ count: number; last: string | null }]>`
    with gone as (
      delete from waybill.idempotency_keys where ctid = any(array(
        select ctid from waybill.idempotency_keys k where ctid > ${after} and event_id < waybill.first_id(${cutoff})
          -- Written so that it stays a sub-query: a join would read all events for each batch.
          and (select e.event_id from waybill.events e where e.tenant_id = k.tenant_id and e.event_id = k.event_id) is null
        limit ${MAX_DELETE} for update skip locked
      )) returning ctid
    )
    select count(*)::int, max(ctid)::text as last from gone`
  return deleted
}

/**
 * Takes finished deliveries out of the endpoints' counts. Must be the last step of a transaction: batches that publish or record
 * want the same rows, and would wait for all the rest of it.
 */
async function uncountFinished(sql: Db, finished: Finished[]): Promise<void> {
  await sql`
    select waybill.count_deliveries(${finished.map((row) => row.tenant_id)}::text[], ${finished.map((row) => row.endpoint_id)}::uuid[],
      ${finished.map((row) => row.status)}::waybill.delivery_status[], ${finished.map((row) => -row.n)}::int[])`
}
