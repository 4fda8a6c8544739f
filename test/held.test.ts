import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Db } from '../src/db/open.ts'
import { createDatabase, insertEndpoint } from './support/database.ts'
import { keepDays } from './support/days.ts'
import { claim } from './support/queue.ts'

/** How many rows of deliveries a statement reads. `sql` has one connection: what others have read is told when they come to it. */
async function readBy(sql: Db, run: () => Promise<unknown>): Promise<number> {
  const total = async () => {
    await sql`select pg_stat_force_next_flush()`
    const [row] = await sql<[{ read: number }]>`
      select sum(idx_tup_fetch + seq_tup_read)::int as read from pg_stat_user_tables where relname like 'deliveries_2%'`
    return row.read
  }
  const before = await total()
  await run()
  return (await total()) - before
}

test('holding deliveries, and releasing them, reads none of those between them', async (t) => {
  const { newSession } = await createDatabase(t)
  const sql = newSession()
  const [own, other] = [await insertEndpoint(sql), await insertEndpoint(sql)]
  const insert = async (endpoint: string, { from, to, step }: { from: number; to: number; step: number }) => {
    const rows = await sql<{ id: string }[]>`
      insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, updated_at)
      select 'acme', waybill.make_delivery_id(id), id, ${endpoint}, 'thing', now()
      from (select waybill.make_id(date_trunc('day', now(), 'utc') + n * interval '1 ms') as id
            from generate_series(${from}::int, ${to}::int, ${step}::int) n) made returning delivery_id as id`
    return rows.map(({ id }) => id)
  }
  await insert(other, { from: 1, to: 1000, step: 1 })
  await sql.text('analyze waybill.deliveries')
  // By the statistics there are none so new.
  await insert(other, { from: 1001, to: 11_000, step: 1 })
  const ids = await insert(own, { from: 1001, to: 11_000, step: 100 })
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending)
    select tenant_id, endpoint_id, count(*) from waybill.deliveries group by 1, 2`
  await sql`
    select waybill.enqueue_new(array_fill('acme'::text, array[100]), ${ids}::uuid[], array_fill(1::float8, array[100]), array_fill(false, array[100]), null)`
  assert.deepEqual(await claim(sql), ids.toSorted())

  const held = async () => (await sql`select from waybill.deliveries where held`).length
  const holding = await readBy(
    sql,
    () => sql`
      select waybill.hold_claims(array_agg('acme'::text), array_agg(id), array_agg(${own}::uuid), array_agg(null::uuid), array_agg(0), false)
      from unnest(${ids}::uuid[]) as u (id)`,
  )
  assert.equal(await held(), 100)
  assert.ok(holding < 1000, `holding 100 read ${holding}`)
  const releasing = await readBy(
    sql,
    () => sql`select waybill.release_held(array['acme'], array[${own}::uuid], array[0], array[100], '1 minute')`,
  )
  assert.equal(await held(), 0)
  assert.ok(releasing < 1000, `releasing 100 read ${releasing}`)
})

test('where something is held from an old day, what is due of others is found without reading all of theirs', async (t) => {
  const { newSession } = await createDatabase(t)
  const sql = newSession()
  await keepDays(sql, { oldest: 9, latest: 9 })
  const endpoints: string[] = []
  for (let nth = 0; nth < 20; nth++) endpoints.push(await insertEndpoint(sql))
  const insert = (endpoints: string[], many: number, daysAgo: number) => sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, endpoint, 'thing', true, now()
    from (select waybill.make_id(date_trunc('day', now(), 'utc') - ${daysAgo} * interval '1 day' + n * interval '1 ms') as id
          from generate_series(1, ${many}::int) n) made, unnest(${endpoints}::uuid[]) as e (endpoint)`
  await insert(endpoints, 2000, 0)
  await insert(endpoints.slice(0, 1), 2000, 9)
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, held_from)
    select tenant_id, endpoint_id, count(*), count(*), min(delivery_id::text)::uuid from waybill.deliveries group by 1, 2`
  await sql`vacuum analyze waybill.deliveries`
  const releasing = await readBy(
    sql,
    () => sql`
      select waybill.release_held(array_fill('acme'::text, array[20]), ${endpoints}::uuid[], array_fill(0, array[20]), array_fill(50, array[20]), '1 minute')`,
  )
  assert.equal((await sql`select from waybill.deliveries where not held`).length, 1000)
  assert.ok(releasing < 10_000, `releasing a thousand read ${releasing}`)
  // A thousand of each, twice, as the first look is at the last week alone. Reading all for each would be 80,000 a look.
  const telling = await readBy(sql, () => sql`select waybill.queue_age('acme')`)
  assert.ok(telling < 60_000, `telling the age read ${telling}`)
})
