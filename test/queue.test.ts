import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import type { Db, Pool } from '../src/db/open.ts'
import { fragment } from '../src/db/statement.ts'
import { createDatabase } from './support/database.ts'
import { publishMany } from './support/lanes.ts'
import { createTenant, startService } from './support/service.ts'

test('a job that publishing makes is the same row as one that pg-boss makes', async (t) => {
  const { sql } = await createDatabase(t)
  const [ours, theirs] = [randomUUID(), randomUUID()]
  const jobs = await sql.begin(async (tx) => {
    await tx`select waybill.enqueue_new(array['acme'], array[${ours}]::uuid[], array[2.5]::float8[], array[false], null)`
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
  await sql`select waybill.enqueue_new(array['acme', 'acme'], ${ids}::uuid[], array[1, 2]::float8[], array[true, false], null)`
  assert.deepEqual(
    (await sql`select id from pgboss.job where name = 'deliveries'`).map((row) => row.id),
    [ids[1]],
  )
})

/** Of the queue, or of other tables, by this transaction. */
async function rowsRead(tx: Db, tables = 'pgboss.%'): Promise<number> {
  const [row] = await tx<{ read: number }[]>`
    select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int as read from pg_stat_xact_user_tables
    where schemaname || '.' || relname like ${tables}`
  return row?.read ?? 0
}

test('settling failed attempts reads their own jobs, however many others wait in a queue of which no statistics are known', async (t) => {
  const { sql } = await createDatabase(t)
  const others = 3000
  await sql`
    with ids as (select gen_random_uuid() as id from generate_series(1, ${others}))
    select waybill.enqueue_new(array_agg('acme'::text), array_agg(id), array_agg(1::float8), array_agg(false), null) from ids`
  await sql`update pgboss.job set state = 'retry', priority = waybill.retry_priority(now()) where name = 'deliveries'`
  const mine = Array.from({ length: 50 }, () => randomUUID())
  await sql`select waybill.enqueue_new(${mine.map(() => 'acme')}::text[], ${mine}::uuid[], ${mine.map(() => 2)}::float8[], ${mine.map(() => false)}::boolean[], null)`
  const claimed = await sql`select id from waybill.fetch_due(-1000, 1000, 100)`
  assert.equal(claimed.length, mine.length)

  const { settled, read } = await sql.begin(async (tx) => {
    const before = await rowsRead(tx)
    const settled = await tx`
      select * from waybill.settle_failed(${mine}::uuid[], ${mine.map((id) => `${id}:0`)}::text[], ${mine.map(() => 3600)}::int[])`
    return { settled, read: (await rowsRead(tx)) - before }
  })
  assert.equal(settled.length, mine.length)
  const hour = Date.now() + 3_600_000
  assert.ok(settled.every(({ next_attempt_at }) => Math.abs(next_attempt_at.getTime() - hour) < 60_000))
  assert.ok(read > 0 && read < 10 * mine.length, `${read} rows of the queue were read`)
})

test('a retry comes no sooner than its backoff and its receiver say, and stands in the queue where it is due', async (t) => {
  const { sql } = await createDatabase(t)
  const asked = [0, 1, 3600]
  const ids = await queueAt(sql, [1, 2, 3])
  await sql`update pgboss.job set retry_delay = 60 where name = 'deliveries'`
  await sql`select id from waybill.fetch_due(-1000, 1000, 100)`
  const settled = await sql<{ delivery_id: string; seconds: number }[]>`
    select delivery_id, extract(epoch from next_attempt_at - now())::float8 as seconds
    from waybill.settle_failed(${ids}::uuid[], ${ids.map((id) => `${id}:0`)}::text[], ${asked}::int[])`
  assert.equal(settled.length, asked.length)
  for (const { delivery_id, seconds } of settled) {
    const least = Math.max(60, asked[ids.indexOf(delivery_id)]!)
    assert.ok(seconds > least - 5, `${seconds} seconds instead of ${least}`)
  }
  const misplaced = await sql`
    select id from pgboss.job where name = 'deliveries' and priority <> waybill.retry_priority(start_after)`
  assert.deepEqual([...misplaced], [])
})

test('claiming and finishing read their own jobs, by plans from when the queue was known to be empty', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const session = newSession()
  const fetch = () => session<{ id: string }[]>`select id from waybill.fetch_due(-10000, 10000, 50)`
  const finish = (ids: string[]) =>
    session<
      { ids: string[] }[]
    >`select ids from waybill.finish_jobs('deliveries', ${ids}::uuid[], ${ids.map((id) => `${id}:0`)}::text[])`
  await session`vacuum analyze pgboss.job`
  assert.equal((await fetch()).length, 0)
  await finish([])

  const tags = Array.from({ length: 3000 }, (_, n) => n)
  const queued = await queueAt(sql, tags)
  await session`begin`
  const claimed = (await fetch()).map(({ id }) => id)
  assert.deepEqual(claimed.sort(), queued.slice(0, 50).sort())
  assert.deepEqual((await finish(claimed))[0]?.ids.sort(), claimed)
  const read = await rowsRead(session)
  await session`commit`
  assert.ok(read > 0 && read < 4 * claimed.length, `${read} rows of the queue were read`)
})

test('recording reads its own deliveries, by a plan from when there were none', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const session = newSession()
  const record = (ids: string[]) => session`
    select settled from waybill.record(${ids.map(() => 'acme')}::text[], ${ids}::uuid[], null, ${ids.map(() => randomUUID())}::uuid[],
      ${ids.map(() => 'https://acme.example/')}::text[], ${ids.map(() => 1)}::int[], ${ids.map(() => 0)}::int[], ${ids.map(() => 'pending')}::waybill.delivery_status[],
      ${ids.map(() => 'delivered')}::waybill.delivery_status[], null, null, ${ids.map(() => new Date().toISOString())}::text[]::timestamptz[],
      ${ids.map(() => 5)}::int[], ${ids.map(() => 200)}::smallint[], null, null, null, ${ids.map(() => false)}::boolean[])`
  await session`vacuum analyze waybill.deliveries`
  await record([])

  const all = await session<{ id: string }[]>`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, gen_random_uuid(), 'order.paid', now()
    from (select waybill.make_id(clock_timestamp()) as id from generate_series(1, 3000)) e returning delivery_id as id`
  const some = all.map(({ id }) => id).filter((_, nth) => nth % 60 === 0)
  await session`begin`
  const before = await rowsRead(session, 'waybill.deliveries%')
  assert.equal((await record(some)).length, some.length)
  const read = (await rowsRead(session, 'waybill.deliveries%')) - before
  await session`commit`
  assert.ok(read > 0 && read < 3 * some.length, `${read} deliveries were read`)
  const [{ delivered } = { delivered: 0 }] = await sql<
    { delivered: number }[]
  >`select count(*)::int as delivered from waybill.deliveries where status = 'delivered'`
  assert.equal(delivered, some.length)
})

/** A job of each place, due now; answers with their ids. */
async function queueAt(sql: Db, tags: number[]): Promise<string[]> {
  const ids = tags.map(() => randomUUID())
  await sql`select waybill.enqueue_new(${tags.map(() => 'acme')}::text[], ${ids}::uuid[], ${tags}::float8[], ${tags.map(() => false)}::boolean[], null)`
  return ids
}

const claim = async (sql: Db, { retries = false, thorough = false } = {}) =>
  (await sql`select delivery_id as id from waybill.claim_due(${retries}, ${thorough}, 100, 1000)`)
    .map(({ id }) => id)
    .sort()

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

test('a claim of what was placed before the queue clock was set back does not set it forward again', async (t) => {
  const { sql } = await createDatabase(t)
  const clock = async () => (await sql<{ tag: number }[]>`select tag from waybill.queue_clock`)[0]?.tag
  const [stray] = await queueAt(sql, [150_000_000])
  assert.deepEqual(await claim(sql, { thorough: true }), [stray])
  assert.equal(await clock(), 0)
  const [honest] = await queueAt(sql, [7])
  assert.deepEqual(await claim(sql), [honest])
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

test('saying of claims that they are alive, and taking them back, takes as long as they are many, and not its square', async (t) => {
  const { url, sql } = await createDatabase(t)
  const tenant = await createTenant(await startService(t, { databaseUrl: url, mode: 'api' }))
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  // What the planner knows of a queue that is empty most of the time.
  await sql.text('analyze')
  const timed = async (work: () => Promise<unknown>) => {
    const began = performance.now()
    await work()
    return performance.now() - began
  }
  const measure = async (most: number) => {
    await publishMany(sql, tenant.tenantId, most - (await sql`select from waybill.deliveries`).length)
    const states = async () => [
      ...(await sql`
        select state::text, count(*)::int as jobs, count(*) filter (where heartbeat_on > now() - interval '1 minute')::int as alive
        from pgboss.job where name = 'deliveries' group by 1`),
    ]
    const loseAll = () =>
      sql`update pgboss.job set state = 'active', started_on = now(), heartbeat_on = now() - interval '1 hour' where name = 'deliveries'`
    await loseAll()
    // Some bundles hold fewer than sixteen, so twice as many are asked for as there are.
    const takingBack = await timed(async () => {
      const lost = await sql`select due_now from waybill.take_back('10 seconds', 3, 5, ${2 * most}, true)`
      assert.equal(lost.filter(({ due_now }) => due_now).length, most)
    })
    assert.deepEqual(await states(), [{ state: 'retry', jobs: most, alive: 0 }])
    await loseAll()
    const jobs = await sql<
      { id: string; retry_count: number }[]
    >`select id, retry_count from pgboss.job where name = 'deliveries'`
    const touching = await timed(
      () =>
        sql`select waybill.touch(${jobs.map(({ id }) => id)}::uuid[], ${jobs.map(({ retry_count }) => retry_count)}::int[])`,
    )
    assert.deepEqual(await states(), [{ state: 'active', jobs: most, alive: most }])
    return [takingBack, touching] as const
  }
  const few = await measure(1000)
  const many = [await measure(8000), await measure(8000)]
  for (const kind of [0, 1] as const) {
    const best = Math.min(...many.map((times) => times[kind]))
    // Eight times as long, with room for what else is going on; the square would be 64 times as long.
    assert.ok(best < 25 * few[kind], `${few[kind]} ms, then ${best} ms`)
  }
})

test('saying that claims are alive waits for none that is being settled', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const ids = [randomUUID(), randomUUID(), randomUUID()].sort()
  await sql`select waybill.enqueue_new(array_agg('acme'::text), array_agg(id), array_agg(1::float8), array_agg(false), null) from unnest(${ids}::uuid[]) as u (id)`
  await sql`update pgboss.job set state = 'active', heartbeat_on = now() - interval '1 minute' where name = 'deliveries'`
  const settling = newSession()
  await settling`begin`
  await settling`select from pgboss.job where name = 'deliveries' and id = ${ids[1]!} for update`
  await sql.begin(async (tx) => {
    await tx`set local lock_timeout = '100ms'`
    // The last has been claimed anew since.
    await tx`select waybill.touch(${ids}::uuid[], array[0, 0, 7])`
  })
  await settling`commit`
  const touched =
    await sql`select id from pgboss.job where name = 'deliveries' and heartbeat_on > now() - interval '30 seconds'`
  assert.deepEqual(
    touched.map(({ id }) => id),
    [ids[0]],
  )
})

test('announcing waits for nobody who has locked the counters of those who are told', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  const [told, about] = [randomUUID(), randomUUID()]
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    values ('acme', ${told}, 'http://x', array['endpoint.disabled'], ''), ('acme', ${about}, 'http://y', array['endpoint.disabled'], '')`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id) values ('acme', ${told})`
  const other = newSession()
  await other`begin`
  await other`select from waybill.endpoint_stats where endpoint_id = ${told} for update`
  await sql.begin(async (tx) => {
    await tx`set local lock_timeout = '100ms'`
    await tx`select waybill.announce('acme', ${about}, 'endpoint.disabled', '{"a":1}')`
    await tx`select waybill.announce('acme', ${about}, 'nobody.asked', '{}')`
  })
  await other`commit`
  const publish = async () => (await sql`select waybill.publish_announcements(100)::int as told`)[0]?.told
  assert.deepEqual([await publish(), await publish()], [1, 0])
  const rows = await sql`
    select e.event_type, e.payload, e.delivery_count, d.endpoint_id, d.held, s.pending::int, s.held::int as waiting
    from waybill.events e join waybill.deliveries d using (tenant_id, event_id) join waybill.endpoint_stats s using (tenant_id, endpoint_id)`
  assert.deepEqual(
    rows.map((row) => ({ ...row })),
    [
      {
        event_type: 'endpoint.disabled',
        payload: '{"a":1}',
        delivery_count: 1,
        endpoint_id: told,
        held: true,
        pending: 1,
        waiting: 1,
      },
    ],
  )
})

test('a probe that has been tried before goes before all retries that are due', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  const endpoint = randomUUID()
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', ${endpoint}, 'http://x', array['*'], '')`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, retrying, held, breaker, next_probe_at) values ('acme', ${endpoint}, 1, 1, 'open', now())`
  const [delivery] = await sql`
    with e as (insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) values ('acme', waybill.make_id(clock_timestamp()), 'a', '{}', 1) returning event_id)
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, held, spent_retries, attempt_count, updated_at)
    select 'acme', waybill.make_delivery_id(event_id), event_id, ${endpoint}, 'a', 'retrying', true, 3, 4, now() from e returning delivery_id`
  // Retries that have been due for an hour, and for half of one.
  await sql`
    with ids as (select gen_random_uuid() as id from generate_series(1, 300))
    select waybill.enqueue_new(array_agg('acme'::text), array_agg(id), array_agg(1::float8), array_agg(false), null) from ids`
  await sql`
    update pgboss.job j set state = 'retry', priority = waybill.retry_priority(due), start_after = due
    from (select id, now() - case when row_number() over () <= 100 then interval '1 hour' else interval '30 minutes' end as due
          from pgboss.job where name = 'deliveries') d where j.name = 'deliveries' and j.id = d.id`
  // Claiming has got to the second.
  await sql`select * from waybill.claim_due(true, true, 100, 1000000)`
  await sql`select * from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '25 seconds')`
  const claimed = await sql`select id from waybill.fetch_due(-2147483648, -1400000000, 1)`
  assert.deepEqual(
    claimed.map(({ id }) => id),
    [delivery?.delivery_id],
  )
})

test('what is announced reaches endpoints of its own tenant alone, and of these those that are active by then', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme'), ('other', 'other')`
  const [about, told, left, foreign] = [randomUUID(), randomUUID(), randomUUID(), randomUUID()]
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    select tenant, id, 'http://x', array['endpoint.disabled'], '' from unnest(array['acme', 'acme', 'acme', 'other'], array[${about}, ${told}, ${left}, ${foreign}]::uuid[]) as u (tenant, id)`
  await sql`select waybill.announce('acme', ${about}, 'endpoint.disabled', '{}')`
  await sql`select waybill.announce('other', ${foreign}, 'endpoint.disabled', '{}')`
  await sql`update waybill.endpoints set is_active = false where endpoint_id = ${left}`
  await sql`select waybill.publish_announcements(100)`
  const rows = await sql`select tenant_id, endpoint_id from waybill.deliveries`
  assert.deepEqual(
    rows.map((row) => ({ ...row })),
    [{ tenant_id: 'acme', endpoint_id: told }],
  )
})

test('who hands a claim back late leaves alone what was taken from it and claimed again', async (t) => {
  const { sql } = await createDatabase(t)
  const [id] = await queueAt(sql, [1])
  await claim(sql)
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${id!}`
  await sql`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`
  assert.deepEqual(await claim(sql), [id])
  const handBack = (retries: number) =>
    sql`select waybill.unclaim(array[${id!}]::uuid[], array[${retries}::int])::int as n`
  assert.deepEqual([...(await handBack(0))], [{ n: 0 }])
  assert.deepEqual([...(await handBack(1))], [{ n: 1 }])
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

test('a place in the month that is given back is taken off this month’s attempts, and off nothing else', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme'), ('other', 'other')`
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    select tenant, date_trunc('month', now() at time zone 'utc')::date - ago * interval '1 month', metric, 5
    from unnest(array['acme', 'other']) tenant, generate_series(0, 1) ago, unnest(array['attempts', 'events']::waybill.metered[]) metric`
  await sql`select waybill.refund_attempts(array['acme', 'acme'])`
  const changed = await sql<{ tenant_id: string; metric: string; is_now: boolean; count: number }[]>`
    select tenant_id, metric, month = date_trunc('month', now() at time zone 'utc')::date as is_now, count::int from waybill.usage where count <> 5`
  assert.deepEqual([...changed], [{ tenant_id: 'acme', metric: 'attempts', is_now: true, count: 3 }])
  // Some of these may have been counted in the month before.
  await sql`select waybill.refund_attempts(array_fill('acme'::text, array[4]))`
  assert.deepEqual([...(await sql`select count::int from waybill.usage where count < 5`)], [{ count: 0 }])
})

/** An endpoint whose breaker is open, with so many deliveries; `held` says which of them are held, oldest first. */
async function startFailing(sql: Pool, held: boolean[]) {
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  const endpoint = randomUUID()
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', ${endpoint}, 'http://x', array['*'], '')`
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

test('of what is put away for a failing endpoint the probe alone has the next one made soon', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false])
  const [other, probe] = ids as [string, string]
  await sql`update waybill.endpoint_stats set probing = ${probe}`
  await sql`select * from waybill.claim_due(false, true, 10, 1000)`
  const putAway = async (id: string) => {
    await sql`select waybill.hold_claims(array['acme'], array[${id}]::uuid[], array[${endpoint}]::uuid[], array[null]::uuid[], array[0], false)`
    const [row] = await sql`
      select held::int, probing, next_probe_at < now() + interval '10 seconds' as is_soon from waybill.endpoint_stats`
    return { ...row }
  }
  assert.deepEqual(await putAway(other), { held: 1, probing: probe, is_soon: false })
  assert.deepEqual(await putAway(probe), { held: 2, probing: probe, is_soon: true })
})

test('the oldest that is held is probed with where what was asked for is not held any more', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [true, true, false])
  await sql`update waybill.endpoint_stats set probing = ${ids[2]!}, next_probe_at = now()`
  await sql`
    select * from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '25 seconds')`
  const [standing] = await sql`select probing, held::int from waybill.endpoint_stats`
  assert.deepEqual({ ...standing }, { probing: ids[0], held: 1 })
})

test('the retry for which an ordered endpoint’s others wait is claimed as soon as it is hurried', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, true])
  await sql`update waybill.endpoints set ordered = true`
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`
    update pgboss.job set state = 'retry', retry_count = 1, start_after = now() + interval '1 hour',
      priority = waybill.retry_priority(now() + interval '1 hour') where name = 'deliveries'`
  await sql`select waybill.hurry_ordered('acme', ${endpoint})`
  const claimed = await sql<{ id: string }[]>`select delivery_id as id from waybill.claim_due(true, true, 10, 1000)`
  assert.deepEqual([...claimed], [{ id: ids[0] }])
})

test('what is put away after it was counted gives its places in the month back', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`select * from waybill.claim_due(false, true, 10, 1000)`
  const attempts = async () => (await sql`select count::int from waybill.usage where metric = 'attempts'`)[0]?.count
  assert.equal(await attempts(), 2)
  await sql`select waybill.hold_claims(array['acme'], array[${ids[0]!}]::uuid[], array[${endpoint}]::uuid[], array[null]::uuid[], array[0], true)`
  assert.equal(await attempts(), 1)
})
