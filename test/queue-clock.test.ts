import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Db, Pool } from '../src/db/open.ts'
import { fragment } from '../src/db/statement.ts'
import { createDatabase } from './support/database.ts'
import { NO_LIMITS } from './support/deliveries.ts'
import { claim, queueAt, startFailing } from './support/queue.ts'
import { waitFor } from './support/wait.ts'

/** As if `seconds` had gone by since claims last noted how far they had got. */
const letPass = (sql: Pool, seconds: number) =>
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
  const retryDue = async (secondsAgo: number, db: Db = sql) => {
    const [id] = await queueAt(db, [1])
    await db`
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

  const ahead = fragment`waybill.retry_priority(now() + interval '1 hour')`
  await sql`update waybill.claim_marks set retry = ${ahead}, old_retry = ${ahead}, next_retry = ${ahead}`
  // At the same moment: what was due a second ago is left to a thorough one.
  await sql.begin(async (tx) => {
    const today = await retryDue(0, tx)
    assert.deepEqual(await claim(tx, { retries: true }), [today])
  })
  const [mark] =
    await sql`select retry > waybill.retry_priority(now() + interval '1 minute') as is_back from waybill.claim_marks`
  assert.equal(mark?.is_back, true)
})

test('a claim of what was placed before the queue clock was set back does not set it forward again, nor one of what is older back', async (t) => {
  const { sql } = await createDatabase(t)
  const clock = async () => (await sql<{ tag: number }[]>`select tag from waybill.queue_clock`)[0]?.tag
  const [stray] = await queueAt(sql, [150_000_000])
  assert.deepEqual(await claim(sql, { thorough: true }), [stray])
  assert.equal(await clock(), 0)
  const [honest] = await queueAt(sql, [7])
  assert.deepEqual(await claim(sql), [honest])
  assert.equal(await clock(), 7)
  // Who queued it has read the clock before it was set.
  const [late] = await queueAt(sql, [3])
  assert.deepEqual(await claim(sql), [late])
  assert.equal(await clock(), 7)
})

test('claims note how far they have got also when the last note was made by a clock that was ahead', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`update waybill.claim_marks set since = now() + interval '1 hour'`
  await queueAt(sql, [5000])
  await claim(sql)
  const [marks] = await sql`select next_tag, since <= now() as is_past from waybill.claim_marks`
  assert.deepEqual({ ...marks }, { next_tag: 5000, is_past: true })
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
  await sql.begin(async (snapshot) => {
    await snapshot`set transaction isolation level repeatable read`
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

test('what waits for its retry keeps its place while the queue clock is set back, and what was left behind is gathered', async (t) => {
  const { sql } = await createDatabase(t)
  const [retry, stray] = await queueAt(sql, [1, 3e8])
  await sql`
    update pgboss.job set state = 'retry', start_after = now() + interval '1 hour', priority = waybill.retry_priority(now() + interval '1 hour') where id = ${retry!}`
  const placeOf = async (id: string) => (await sql`select priority from pgboss.job where id = ${id}`)[0]?.priority
  const before = await placeOf(retry!)
  await sql`update waybill.queue_clock set tag = 2e8`
  await sql`select waybill.rebase_queue()`
  assert.deepEqual([await placeOf(retry!), await placeOf(stray!)], [before, -1e8])
  await sql`select waybill.gather_strays()`
  assert.deepEqual([await placeOf(retry!), await placeOf(stray!)], [before, 0])
})

test('the queue clock is set back in any case before it comes near the retries, but sooner only when little is queued', async (t) => {
  const { sql } = await createDatabase(t)
  await queueAt(
    sql,
    Array.from({ length: 10_001 }, () => 1),
  )
  const rebase = async (tag: number) => {
    await sql`update waybill.queue_clock set tag = ${tag}`
    return (await sql`select waybill.rebase_queue() as done`)[0]?.done
  }
  assert.deepEqual([await rebase(9e8), await rebase(1.1e9)], [false, true])
  // What had come back to the queue from before is claimed by an ordinary claim.
  assert.equal((await claim(sql)).length, 100)
})

test('what waits while the queue clock is set back moves it on from there', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`update waybill.queue_clock set tag = 2e8`
  await queueAt(sql, [2e8 + 5])
  await sql`select waybill.rebase_queue()`
  await claim(sql)
  assert.deepEqual([...(await sql`select tag from waybill.queue_clock`)], [{ tag: 5 }])
})

test('places far ahead that many endpoints with a backlog bring about are left so, and the clock gets there', async (t) => {
  const { sql } = await createDatabase(t)
  const [delivery] = await queueAt(sql, [4e7])
  await sql`update waybill.endpoint_stats set tag = 4e7`
  assert.deepEqual([...(await sql`select waybill.gather_strays() as found`)], [{ found: 0 }])
  assert.deepEqual(await claim(sql), [delivery])
  assert.deepEqual([...(await sql`select tag from waybill.queue_clock`)], [{ tag: 4e7 }])
})

test('the queue clock is set back although the counters of an endpoint are busy for longer than it would wait for tables', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await startFailing(sql, [])
  await sql`update waybill.queue_clock set tag = 2e8`
  await sql`update waybill.endpoint_stats set tag = 2e8`
  const waits = () =>
    sql`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%rebase_queue%' and state_change < now() - interval '400 ms'`
  const { rebasing } = await newSession().begin(async (busy) => {
    await busy`select from waybill.endpoint_stats for update`
    const rebasing = sql`select waybill.rebase_queue() as done`
    await Promise.race([rebasing, waitFor(async () => (await waits()).length > 0)])
    return { rebasing }
  })
  assert.deepEqual([...(await rebasing)], [{ done: true }])
})

test('who waits for the queue clock to be set back has no counters that this waits for', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { endpoint } = await startFailing(sql, [true])
  await sql`update waybill.endpoint_stats set next_probe_at = now()`
  const session = newSession()
  const waits = () => sql`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`
  for (const call of [
    () =>
      session`select from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '1 hour')`,
    () =>
      session`select from waybill.publish(array['acme'], array['a'], array['{}'], array[null], ${JSON.stringify(NO_LIMITS)})`,
  ]) {
    const { called } = await sql.begin(async (rebasing) => {
      await rebasing`lock table only waybill.events, only waybill.deliveries in share row exclusive mode`
      const called = call()
      await waitFor(async () => (await waits()).length > 0)
      await rebasing`set local lock_timeout = '1s'`
      await rebasing`select from waybill.endpoint_stats for no key update`
      return { called }
    })
    assert.equal((await called).length, 1)
  }
})

test('what is queued once the queue clock was set back is found by an ordinary claim', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`update waybill.queue_clock set tag = 2e8`
  await sql`update waybill.claim_marks set old_tag = 2e8, next_tag = 2e8`
  await sql`select waybill.rebase_queue()`
  const ids = await queueAt(sql, [1])
  assert.deepEqual(await claim(sql), ids)
})

test('a claim waits for nobody who notes how far claiming has got', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const [first, retry] = await queueAt(sql, [5, 5])
  await sql`
    update pgboss.job set state = 'retry', priority = waybill.retry_priority(now()), start_after = now() where id = ${retry!}`
  await sql`update waybill.claim_marks set since = now() - interval '1 minute'`
  await newSession().begin(async (other) => {
    await other`select from waybill.queue_clock, waybill.claim_marks for update`
    for (const [retries, id] of [
      [false, first],
      [true, retry],
    ] as const)
      await sql.begin(async (tx) => {
        await tx`set local lock_timeout = '100ms'`
        assert.deepEqual(await claim(tx, { retries }), [id])
      })
  })
})
