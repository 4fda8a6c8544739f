import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import type postgres from 'postgres'
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
  const claimed = await sql`select id from waybill.fetch_due(-1000, 1000, 100)`
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

/** A job of each place, due now; answers with their ids. */
async function queueAt(sql: postgres.Sql, tags: number[]): Promise<string[]> {
  const ids = tags.map(() => randomUUID())
  await sql`select waybill.enqueue_new(${tags.map(() => 'acme')}::text[], ${ids}::uuid[], ${tags}::float8[], ${tags.map(() => 'false')}::text[]::boolean[])`
  return ids
}

const claim = async (sql: postgres.Sql, { retries = false, thorough = false } = {}) =>
  (await sql`select delivery_id as id from waybill.claim(${retries}, ${thorough}, 100, 1000)`)
    .map(({ id }) => id)
    .sort()

test('claims go on from where the last one got to, and what is older is found by a thorough one', async (t) => {
  const { sql } = await createDatabase(t)
  const first = await queueAt(sql, [1, 2, 5000])
  assert.deepEqual(await claim(sql), first.sort(), 'nothing has been claimed before')
  const [late, , next] = await queueAt(sql, [4000, 4990, 5001])
  assert.equal((await claim(sql)).includes(next!), true)
  assert.deepEqual(await claim(sql), [])
  assert.deepEqual(await claim(sql, { thorough: true }), [late])
})

test('claims of retries go on from where the last one got to as well, and a clock that was set back hides none', async (t) => {
  const { sql } = await createDatabase(t)
  const retryDue = async (dueSecondsAgo: number) => {
    const [id] = await queueAt(sql, [1])
    await sql`
      update pgboss.job set state = 'retry', start_after = now() - interval '1 day', priority = waybill.retry_priority(now() - ${dueSecondsAgo} * interval '1 second')
      where id = ${id!}`
    return id!
  }
  const recent = await retryDue(1)
  assert.deepEqual(await claim(sql, { retries: true }), [recent])
  const old = await retryDue(600)
  const due = await retryDue(0)
  assert.deepEqual(await claim(sql, { retries: true }), [due])
  assert.deepEqual(await claim(sql, { retries: true, thorough: true }), [old])
  // As if the last one had been claimed an hour ahead of the present clock.
  await sql`update waybill.retry_clock set priority = waybill.retry_priority(now() + interval '1 hour')`
  const today = await retryDue(0)
  assert.deepEqual(await claim(sql, { retries: true }), [today])
})

test('what is handed back, or taken from a lost worker, is found by the next claim', async (t) => {
  const { sql } = await createDatabase(t)
  const [handedBack, lost] = await queueAt(sql, [1, 2])
  await queueAt(sql, [5000])
  await claim(sql)
  await sql`select waybill.unclaim(array[${handedBack!}]::uuid[], array[0])`
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${lost!}`
  await sql`select waybill.take_back('10 seconds', 3, 5, 100, false)`
  assert.deepEqual(await claim(sql), [handedBack, lost].sort())
})

test('claiming does not step over what has gone through the queue, while an old snapshot keeps it from being vacuumed', async (t) => {
  const { sql } = await createDatabase(t)
  const gone = 2000
  const read = async () => {
    await sql`select pg_stat_force_next_flush()`
    const [row] = await sql<{ read: number }[]>`
      select sum(idx_tup_read)::int as read from pg_stat_user_indexes where schemaname = 'pgboss' and relname like 'j%'`
    return row!.read
  }
  await sql.begin('isolation level repeatable read', async (snapshot) => {
    await snapshot`select count(*) from waybill.tenants`
    await queueAt(
      sql,
      Array.from({ length: gone }, (_, n) => n),
    )
    for (let rest = gone; rest > 0; rest -= 100) assert.equal((await claim(sql)).length, 100)
    await sql`delete from pgboss.job where name = 'deliveries'`
    const [next] = await queueAt(sql, [gone])
    const before = await read()
    assert.deepEqual(await claim(sql), [next])
    const taken = (await read()) - before
    assert.ok(taken < gone / 4, `${taken} entries of the queue's indexes were read`)
  })
})
