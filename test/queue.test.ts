import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import type { Db } from '../src/db/open.ts'
import { createLog, type Log } from '../src/log.ts'
import { migrate } from '../src/migrate.ts'
import { createBoss, DELIVERIES, stopBoss } from '../src/queue.ts'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase, insertEndpoint, QUEUE } from './support/database.ts'
import { NO_LIMITS } from './support/deliveries.ts'
import { fillEmptiedQueue, queueAt, startFailing } from './support/queue.ts'
import { waitFor } from './support/wait.ts'

test('a job that publishing makes is the same row as one that pg-boss makes', async (t) => {
  const { sql } = await createDatabase(t)
  const [ours, theirs] = [randomUUID(), randomUUID()]
  const jobs = await sql.begin(async (tx) => {
    await tx`select waybill.enqueue_new(array['acme'], array[${ours}]::uuid[], array[2.5]::float8[], array[false], null)`
    const job = { id: theirs, priority: -2, data: { tenant_id: 'acme', tag: 2.5 } }
    // The very statement of pg-boss's insert(), captured when the queue was installed.
    await tx`select waybill.enqueue(${JSON.stringify([job])})`
    // But for its place in its turn.
    return await tx`select to_jsonb(j) - array['id', 'created_on'] as row from pgboss.job j where id in (${ours}, ${theirs})`
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

test('a start gives the queue the statistics that a dump has left out', async (t) => {
  const { url, sql } = await createDatabase(t)
  const [queue] = await sql`select format('pgboss.%I', table_name) as name from pgboss.queue where name = 'deliveries'`
  const table: string = queue?.name
  const known = async () => {
    const rows = await sql<{ attname: string; n_distinct: number }[]>`
      select attname, n_distinct from pg_stats where format('%I.%I', schemaname, tablename) = ${table} and attname in ('id', 'name')`
    return Object.fromEntries(rows.map(({ attname, n_distinct }) => [attname, n_distinct]))
  }
  const statistics = { id: -1, name: 1 }
  assert.deepEqual(await known(), statistics)
  await sql`delete from pg_statistic where starelid = ${table}::regclass`
  assert.deepEqual(await known(), {})
  await migrate(url, createLog('silent'), QUEUE)
  assert.deepEqual(await known(), statistics)
  // As in a queue that was analyzed before it was told what holds for its keys.
  await sql.text(`alter table ${table} alter column name reset (n_distinct)`)
  await migrate(url, createLog('silent'), QUEUE)
  const [told] = await sql`select attoptions from pg_attribute where attrelid = ${table}::regclass and attname = 'name'`
  assert.deepEqual(told?.attoptions, ['n_distinct=1'])
  assert.deepEqual([...(await sql`select from pgboss.job`)], [])
})

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

test('who settles a failed attempt late leaves alone what others have made of its job', async (t) => {
  const { sql } = await createDatabase(t)
  const ids = await queueAt(sql, [1, 2, 3])
  await sql`select id from waybill.fetch_due(-1000, 1000, 100)`
  await sql`
    update pgboss.job set retry_count = 1, state = other.state from unnest(${ids}::uuid[], '{active,retry,failed}'::pgboss.job_state[]) as other (id, state)
    where job.id = other.id`
  const jobs = async () => [...(await sql`select * from pgboss.job where name = 'deliveries' order by id`)]
  const before = await jobs()
  const settled = await sql`
    select * from waybill.settle_failed(${ids}::uuid[], ${ids.map((id) => `${id}:0`)}::text[], ${ids.map(() => 3600)}::int[])`
  assert.deepEqual([...settled], [])
  assert.equal(before.length, 3)
  assert.deepEqual(await jobs(), before)
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

test('deliveries that leave their bundles read these jobs alone, by statistics of a queue that was all but empty', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await fillEmptiedQueue(sql, 300)
  const bundles = Array.from({ length: 10 }, () => randomUUID())
  const members = bundles.flatMap((bundle) => [1, 2, 3].map(() => ({ bundle, id: randomUUID() })))
  const each = <T>(value: T) => members.map(() => value)
  await sql`
    select waybill.enqueue_new(${each('acme')}::text[], ${members.map(({ id }) => id)}::uuid[], ${each(0)}::float8[], ${each(false)}::boolean[],
      ${members.map(({ bundle }) => bundle)}::uuid[])`
  await newSession().begin(async (tx) => {
    const claimed = await tx`select id from waybill.fetch_due(-1000, 1000, ${bundles.length})`
    assert.deepEqual(claimed.map(({ id }) => id).sort(), bundles.toSorted())
    // All of the first one's, and one of each of the others.
    const leaving = members.filter(({ bundle }, n) => bundle === bundles[0] || n % 3 === 0)
    const before = await rowsRead(tx)
    const [row] = await tx<{ ids: string[] }[]>`
      select waybill.leave_bundles(${leaving.map(({ bundle }) => bundle)}::uuid[], ${leaving.map(({ id }) => id)}::uuid[]) as ids`
    const read = (await rowsRead(tx)) - before
    assert.deepEqual(row?.ids.toSorted(), leaving.map(({ id }) => id).sort())
    assert.ok(read > 0 && read < 10 * bundles.length, `${read} rows of the queue were read`)
    const left =
      await tx`select id, data -> 'ids' as ids from pgboss.job where name = 'deliveries' and id = any(${bundles}::uuid[])`
    assert.deepEqual(
      left.flatMap(({ ids }) => ids).sort(),
      members
        .filter((member) => !leaving.includes(member))
        .map(({ id }) => id)
        .sort(),
    )
    assert.equal(left.length, bundles.length - 1)
  })
})

test('claims that are put away read their own jobs alone, by statistics of a queue that was all but empty', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await fillEmptiedQueue(sql, 300)
  const ids = await queueAt(sql, Array(50).fill(0))
  const each = <T>(value: T) => ids.map(() => value)
  await newSession().begin(async (tx) => {
    const claimed = await tx`select id from waybill.fetch_due(-1000, 1000, ${ids.length})`
    assert.deepEqual(claimed.map(({ id }) => id).sort(), ids.toSorted())
    const before = await rowsRead(tx)
    const still = await tx`
      select id from waybill.claims_that_hold(${each('acme')}::text[], ${ids}::uuid[], ${ids}::uuid[], ${each(null)}::uuid[], ${each(0)}::int[],
        ${each(Date.now() + 1000)}::float8[])`
    const read = (await rowsRead(tx)) - before
    assert.equal(still.length, ids.length)
    assert.ok(read > 0 && read < 4 * ids.length, `${read} rows of the queue were read`)
  })
})

test('what has lost its worker is looked for without reading what waits', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await queueAt(sql, Array(2000).fill(1))
  await sql`
    update pgboss.job set state = 'active', started_on = now(), heartbeat_on = now() - interval '11 seconds'
    where name = 'deliveries' and id = (select id from pgboss.job limit 1)`
  await newSession().begin(async (tx) => {
    const found = await tx`select from waybill.take_back(interval '10 seconds', 3, 5, 500, true)`
    assert.equal(found.length, 1)
    const read = await rowsRead(tx)
    assert.ok(read < 100, `read ${read} rows`)
  })
})

test('the queue is to be vacuumed early and its pages to have room, unless somebody has set it otherwise', async (t) => {
  const { url, sql } = await createDatabase(t)
  const [queue] = await sql`select format('pgboss.%I', table_name) as name from pgboss.queue where name = 'deliveries'`
  const options = async () =>
    (
      await sql<{ options: string[] }[]>`
        select reloptions as options from pg_class where oid in (
          select unnest(array[conrelid, conindid]) from pg_constraint where contype = 'p' and conrelid = ${queue!.name}::regclass)
        order by relkind desc`
    ).map(({ options }) => options.sort())
  assert.deepEqual(await options(), [
    [
      'autovacuum_vacuum_cost_delay=0',
      'autovacuum_vacuum_scale_factor=0.01',
      'autovacuum_vacuum_threshold=1000',
      'fillfactor=70',
    ],
    ['fillfactor=50'],
  ])
  await sql.text(`alter table ${queue!.name} set (autovacuum_vacuum_threshold = 5000)`)
  const own = await options()
  await migrate(url, createLog('silent'), QUEUE)
  assert.deepEqual(await options(), own)
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

test('announcing waits for nobody who has locked the counters of those who are told', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const types = ['endpoint.disabled']
  const [told, about] = [await insertEndpoint(sql, { types }), await insertEndpoint(sql, { types })]
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

test('what is announced reaches endpoints of its own tenant alone, and of these those that are active by then', async (t) => {
  const { sql } = await createDatabase(t)
  const insert = (tenant: string) => insertEndpoint(sql, { tenant, types: ['endpoint.disabled'] })
  const [about, told, left, foreign] = [
    await insert('acme'),
    await insert('acme'),
    await insert('acme'),
    await insert('other'),
  ]
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

test('workers are told at once of whatever has come to the queue, or may be released', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [true])
  const heard: string[] = []
  const listener = newSession()
  for (const channel of ['waybill_due', 'waybill_held'])
    await listener.listen(channel, (kind) => {
      if (kind !== null) heard.push(`${channel}:${kind}`)
    })
  const LIMITS = JSON.stringify(NO_LIMITS)
  /** What is heard of a change; a notice of our own comes behind it. */
  const tells = async (change: () => Promise<unknown>) => {
    await change()
    await sql`select pg_notify('waybill_due', 'end')`
    await waitFor(() => heard.includes('waybill_due:end'))
    return [...new Set(heard.splice(0))].filter((notice) => notice !== 'waybill_due:end')
  }
  const setUp = (stats: string, endpoints = 'ordered = false') =>
    sql.text(`update waybill.endpoint_stats set ${stats}; update waybill.endpoints set ${endpoints}`)
  const release = () =>
    sql`select * from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '1 hour')`
  const replay = () => sql`select from waybill.replay('acme', ${ids[0]!})`
  const inAnHour = () => sql`
    update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where name = 'deliveries' and id = ${ids[0]!}`

  assert.deepEqual(
    await tells(() => sql`select from waybill.publish(array['acme'], array['a'], array['{}'], array[null], ${LIMITS})`),
    ['waybill_held:'],
  )
  assert.deepEqual(await tells(replay), ['waybill_held:'], 'the next probe')
  await setUp("breaker = 'closed', probing = null")
  assert.deepEqual(await tells(release), ['waybill_due:'])
  // The two were released together, and only a delivery with a job of its own may be due later.
  await sql`update pgboss.job set id = ${ids[0]!}, data = data - 'ids' where name = 'deliveries'`
  await sql`update waybill.deliveries set bundle = null`
  assert.deepEqual(
    await tells(() => sql`select from waybill.publish(array['acme'], array['a'], array['{}'], array[null], ${LIMITS})`),
    ['waybill_due:'],
  )
  assert.deepEqual(
    await tells(() => sql`select from waybill.publish_plain('acme', array['a'], array['{}'], array[null], ${LIMITS})`),
    ['waybill_due:'],
  )
  await inAnHour()
  assert.deepEqual(await tells(replay), ['waybill_due:retry'])
  await inAnHour()
  await setUp("breaker = 'closed'", 'ordered = true')
  assert.deepEqual(await tells(() => sql`select waybill.hurry_ordered('acme', ${endpoint})`), ['waybill_due:retry'])
  await setUp("breaker = 'closed'")
  await sql`delete from pgboss.job where name = 'deliveries'`
  assert.deepEqual(await tells(replay), ['waybill_held:'], 'a lost job')
  await sql`update waybill.deliveries set spent_retries = 1 where held`
  assert.deepEqual(await tells(release), ['waybill_due:retry'])
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set status = 'dead_lettered' where delivery_id = ${ids[0]!}`
  assert.deepEqual(await tells(replay), ['waybill_due:'])
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', gen_random_uuid(), 'http://y', '{endpoint.disabled}', '')`
  await sql`select waybill.announce('acme', ${endpoint}, 'endpoint.disabled', '{}')`
  assert.deepEqual(await tells(() => sql`select waybill.publish_announcements(10)`), ['waybill_held:'])
})

test('no job is dropped for being old', async (t) => {
  const { sql } = await createDatabase(t)
  await queueAt(sql, [1])
  await sql`select waybill.enqueue(${JSON.stringify([{ id: randomUUID(), data: {} }])})`
  const [jobs] =
    await sql`select count(*)::int from pgboss.job where name = 'deliveries' and keep_until > now() + interval '5 years'`
  assert.deepEqual({ ...jobs }, { count: 2 })
})

test('what pg-boss warns of is in the log', (t) => {
  const lines: unknown[] = []
  const log = { warn: (...line: unknown[]) => lines.push(line) } as unknown as Log
  const boss = createBoss('postgres://127.0.0.1:9/nowhere', log)
  t.after(() => boss.removeAllListeners())
  boss.emit('warning', { message: 'clock skew', data: {} })
  assert.deepEqual(lines, [[{ warning: 'clock skew' }, 'queue.warning']])
})

test('pg-boss warns of no queue for being long', async (t) => {
  const { url, sql } = await createDatabase(t)
  const lines: unknown[] = []
  const boss = createBoss(url, { warn: (...line: unknown[]) => lines.push(line) } as unknown as Log)
  await boss.start()
  cleanUp(t, () => stopBoss(boss))
  await queueAt(sql, Array(10_001).fill(1))
  await sql`update pgboss.queue set monitor_on = null`
  await boss.supervise(DELIVERIES)
  const [queue] = await sql`select queued_count::int as queued from pgboss.queue where name = ${DELIVERIES}`
  assert.equal(queue?.queued, 10_001)
  assert.deepEqual(lines, [])
})

test('a release reads what it releases, not all that is held, nor all endpoints, though the statistics know of nothing held', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const endpoint = await insertEndpoint(sql, { types: ['a'] })
  const fill = (count: number, status: string, held: boolean) => sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, held, updated_at)
    select 'acme', waybill.make_delivery_id(event), event, ${endpoint}, 'a', ${status}, ${held}, now()
    from generate_series(1, ${count}), waybill.make_id(clock_timestamp()) as event`
  await fill(5000, 'delivered', false)
  await sql.text('analyze waybill.deliveries')
  await fill(5000, 'pending', true)
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, delivered) values ('acme', ${endpoint}, 5000, 5000, 5000)`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id) select 'acme', gen_random_uuid() from generate_series(1, 2000)`
  await sql.text('analyze waybill.endpoint_stats')
  await newSession().begin(async (sql) => {
    const [{ released }] = await sql<[{ released: number }]>`
      select released from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[10], interval '1 minute')`
    assert.equal(released, 10)
    const [{ read }] = await sql<[{ read: number }]>`
      select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int as read from pg_stat_xact_user_tables
      where schemaname = 'waybill' and (relname like 'deliveries_%' or relname = 'endpoint_stats')`
    assert.ok(read < 100, `read ${read} rows`)
  })
})
