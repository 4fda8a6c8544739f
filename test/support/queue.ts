import { randomUUID } from 'node:crypto'
import type { Db, Pool } from '../../src/db/open.ts'
import { insertEndpoint } from './database.ts'

/** A job of each place, due now; answers with their ids. */
export async function queueAt(sql: Db, tags: number[]): Promise<string[]> {
  const ids = tags.map(() => randomUUID())
  await sql`select waybill.enqueue_new(${tags.map(() => 'acme')}::text[], ${ids}::uuid[], ${tags}::float8[], ${tags.map(() => false)}::boolean[], null)`
  return ids
}

/**
 * So many jobs, though the statistics say that there are two, in as many pages as these take; and indexes as large as many more have
 * made them. Postgres then takes one look-up for as dear as reading the whole queue.
 */
export async function fillEmptiedQueue(sql: Pool, jobs: number): Promise<void> {
  await queueAt(sql, Array(10_000).fill(1))
  await sql`delete from pgboss.job`
  await sql.text('vacuum pgboss.job')
  const last = (await queueAt(sql, Array(jobs).fill(1))).slice(-2)
  await sql`delete from pgboss.job where id <> all(${last}::uuid[])`
  await sql.text('vacuum analyze pgboss.job')
  await queueAt(sql, Array(jobs).fill(1))
}

export const claim = async (sql: Db, { retries = false, thorough = false } = {}) =>
  (await sql`select delivery_id as id from waybill.claim_due(${retries}, ${thorough}, 100, 1000)`)
    .map(({ id }) => id)
    .sort()

/** An endpoint whose breaker is open, with so many deliveries; `held` says which of them are held, oldest first. */
export async function startFailing(sql: Pool, held: boolean[]) {
  const endpoint = await insertEndpoint(sql)
  const ids: string[] = []
  for (const isHeld of held) {
    const [row] = await sql<{ id: string }[]>`
      with e as (insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) values ('acme', waybill.make_id(clock_timestamp()), 'a', '{}', 1) returning event_id)
      insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
      select 'acme', waybill.make_delivery_id(event_id), event_id, ${endpoint}, 'a', ${isHeld}, now() from e returning delivery_id as id`
    ids.push(row!.id)
  }
  const queued = ids.filter((_, index) => !held[index])
  if (queued.length > 0)
    await sql`
      select waybill.enqueue_new(${queued.map(() => 'acme')}::text[], ${queued}::uuid[], ${queued.map(() => 1)}::float8[], ${queued.map(() => false)}::boolean[], null)`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, breaker, breaker_since, next_probe_at)
    values ('acme', ${endpoint}, ${ids.length}, ${ids.length - queued.length}, 'open', now(), now() + interval '1 hour')`
  return { endpoint, ids }
}
