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

/** As if `seconds` had gone by since claims last noted how far they had got. */
const letPass = (sql: postgres.Sql, seconds: number) =>
  sql`update waybill.claim_marks set since = since - ${seconds} * interval '1 second'`

test('claims start where claiming had got to some seconds ago, and what is older is found by a thorough one', async (t) => {
  const { sql } = await createDatabase(t)
  await queueAt(sql, [5000])
  await claim(sql)
  const [early] = await queueAt(sql, [4000])
  assert.deepEqual(await claim(sql), [early], 'who queued it may have read the clock before it was set')
  for (const tag of [6000, 6001, 6002]) {
    await letPass(sql, 4)
    await queueAt(sql, [tag])
    await claim(sql)
  }
  const [old, , next] = await queueAt(sql, [4000, 6002, 6003])
  assert.equal((await claim(sql)).includes(next!), true)
  assert.deepEqual(await claim(sql), [])
  assert.deepEqual(await claim(sql, { thorough: true }), [old])
})

test('claims of retries start there as well, and a clock that was set back hides none', async (t) => {
  const { sql } = await createDatabase(t)
  const retryDue = async (secondsAgo: number) => {
    const [id] = await queueAt(sql, [1])
    await sql`
      update pgboss.job set state = 'retry', start_after = now() - interval '1 day', priority = waybill.retry_priority(now() - ${secondsAgo} * interval '1 second')
      where id = ${id!}`
    return id!
  }
  for (const secondsAgo of [3, 2, 1]) {
    await letPass(sql, 4)
    await retryDue(secondsAgo)
    assert.equal((await claim(sql, { retries: true })).length, 1)
  }
  const [old, due] = [await retryDue(600), await retryDue(0)]
  assert.deepEqual(await claim(sql, { retries: true }), [due])
  assert.deepEqual(await claim(sql, { retries: true, thorough: true }), [old])

  const ahead = sql`waybill.retry_priority(now() + interval '1 hour')`
  await sql`update waybill.claim_marks set retry = ${ahead}, old_retry = ${ahead}, next_retry = ${ahead}`
  const today = await retryDue(0)
  assert.deepEqual(await claim(sql, { retries: true }), [today])
  const [mark] =
    await sql`select retry > waybill.retry_priority(now() + interval '1 minute') as is_back from waybill.claim_marks`
  assert.equal(mark?.is_back, true)
})

test('what is handed back, or taken from a lost worker, comes before all that waits', async (t) => {
  const { sql } = await createDatabase(t)
  for (const retries of [false, true]) {
    const tags = Array.from({ length: 300 }, (_, n) => 1 + n)
    const ids = await queueAt(sql, tags)
    if (retries)
      await sql`
        update pgboss.job j set state = 'retry', start_after = now() - interval '1 day', priority = waybill.retry_priority(now() - (900 - 2 * u.n) * interval '1 second')
        from unnest(${ids}::uuid[]) with ordinality as u (id, n) where j.id = u.id`
    const claimed = await claim(sql, { retries })
    const [handedBack, lost] = claimed
    for (let turn = 0; turn < 3; turn++) await letPass(sql, 4)
    const counts = await sql`select id, retry_count from pgboss.job where id = ${handedBack!}`
    await sql`select waybill.unclaim(array[${handedBack!}]::uuid[], array[${counts[0]!.retry_count}]::int[])`
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${lost!}`
    await sql`select waybill.take_back('10 seconds', 3, 5, 100, false)`
    const next = await claim(sql, { retries })
    assert.deepEqual([next.includes(handedBack!), next.includes(lost!)], [true, true])
    await sql`delete from pgboss.job where name = 'deliveries'`
  }
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
    for (let turn = 0; turn < 2; turn++) {
      await letPass(sql, 4)
      await queueAt(sql, [gone])
      await claim(sql)
    }
    await sql`delete from pgboss.job where name = 'deliveries'`
    const [next] = await queueAt(sql, [gone])
    const before = await read()
    assert.deepEqual(await claim(sql), [next])
    const taken = (await read()) - before
    assert.ok(taken < gone / 4, `${taken} entries of the queue's indexes were read`)
  })
})
