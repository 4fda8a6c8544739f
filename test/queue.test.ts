import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { createDatabase } from './support/database.ts'

test('a job that publishing makes is the same row as one that pg-boss makes', async (t) => {
  const { sql } = await createDatabase(t)
  const [ours, theirs] = [randomUUID(), randomUUID()]
  const jobs = await sql.begin(async (tx) => {
    await tx`select waybill.enqueue_new(array['acme'], array[${ours}]::uuid[], array[2.5]::float8[], array[false])`
    const job = { id: theirs, priority: -2, data: { tenant_id: 'acme', tag: 2.5 } }
    // The very statement of pg-boss's insert(), captured when the queue was installed.
    await tx`select waybill.enqueue(${JSON.stringify([job])})`
    return await tx`select to_jsonb(j) - 'id' as row from pgboss.job j where id in (${ours}, ${theirs})`
  })
  assert.equal(jobs.length, 2)
  assert.deepEqual(jobs[0]?.row, jobs[1]?.row)
  assert.equal(jobs[0]?.row.priority, -2)
})

test('held deliveries get no job', async (t) => {
  const { sql } = await createDatabase(t)
  const ids = [randomUUID(), randomUUID()]
  await sql`select waybill.enqueue_new(array['acme', 'acme'], ${ids}::uuid[], array[1, 2]::float8[], array[true, false])`
  assert.deepEqual(
    (await sql`select id from pgboss.job where name = 'deliveries'`).map((row) => row.id),
    [ids[1]],
  )
})

test('settling failed attempts reads their own jobs, however many others wait in a queue of which no statistics are known', async (t) => {
  const { sql } = await createDatabase(t)
  const others = 3000
  await sql`
    with ids as (select gen_random_uuid() as id from generate_series(1, ${others}))
    select waybill.enqueue_new(array_agg('acme'::text), array_agg(id), array_agg(1::float8), array_agg(false)) from ids`
  await sql`update pgboss.job set state = 'retry', priority = waybill.retry_priority(now()) where name = 'deliveries'`
  const mine = Array.from({ length: 50 }, () => randomUUID())
  await sql`select waybill.enqueue_new(${mine.map(() => 'acme')}::text[], ${mine}::uuid[], ${mine.map(() => 2)}::float8[], ${mine.map(() => 'false')}::text[]::boolean[])`
  const claimed = await sql`select id from waybill.fetch_jobs(-1000, 1000, 100)`
  assert.equal(claimed.length, mine.length)

  const { settled, read } = await sql.begin(async (tx) => {
    const rowsRead = async () => {
      const [row] = await tx<{ read: number }[]>`
        select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int as read from pg_stat_xact_user_tables where schemaname = 'pgboss'`
      return row?.read ?? 0
    }
    const before = await rowsRead()
    const settled = await tx`
      select * from waybill.settle_failed(${mine}::uuid[], ${mine.map((id) => `${id}:0`)}::text[], ${mine.map(() => 3600)}::int[])`
    return { settled, read: (await rowsRead()) - before }
  })
  assert.equal(settled.length, mine.length)
  const hour = Date.now() + 3_600_000
  assert.ok(settled.every(({ next_attempt_at }) => Math.abs(next_attempt_at.getTime() - hour) < 60_000))
  assert.ok(read > 0 && read < 10 * mine.length, `${read} rows of the queue were read`)
})
