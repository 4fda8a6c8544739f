import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Db, Pool } from '../src/db/open.ts'
import { createClockMender } from '../src/upkeep/clock-set-back.ts'
import { createDatabase, insertEndpoint } from './support/database.ts'
import { keepDays } from './support/days.ts'
import { assertBooks, publishMany } from './support/deliveries.ts'
import { claim } from './support/queue.ts'

// How many days are kept must not matter to what delivers: of each it would open the tables, or have their plans made.

/** Days before today that have partitions, too. */
const OLD = 9

/** A database that has kept an old day, and an endpoint. */
async function keepOldDay(t: TestContext, { ordered = false } = {}) {
  const { sql } = await createDatabase(t)
  await keepDays(sql, { oldest: OLD, latest: OLD })
  const [day] = await sql<
    [{ name: string }]
  >`select to_char(now() at time zone 'utc' - ${OLD} * interval '1 day', 'YYYYMMDD') as name`
  const addEndpoint = async () => {
    const endpoint = await insertEndpoint(sql, { ordered })
    await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id) values ('acme', ${endpoint})`
    return endpoint
  }
  return { sql, endpoint: await addEndpoint(), addEndpoint, oldDay: `deliveries_${day.name}` }
}

/** A delivery of now or of the old day: held, in the queue or delivered. */
async function insertDelivery(
  sql: Pool,
  endpoint: string,
  { is = 'held' as 'held' | 'queued' | 'delivered', daysAgo = 0, hoursAgo = 0 },
): Promise<string> {
  const [{ id }] = await sql<[{ id: string }]>`
    with e as (
      insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
      values ('acme', waybill.make_id(clock_timestamp() - ${24 * daysAgo + hoursAgo} * interval '1 hour'), 'a', '{}', 1) returning event_id
    )
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, status, updated_at)
    select 'acme', waybill.make_delivery_id(event_id), event_id, ${endpoint}, 'a', ${is === 'held'},
      ${is === 'delivered' ? 'delivered' : 'pending'}, now() from e returning delivery_id as id`
  if (is === 'queued') await sql`select waybill.enqueue_one('acme', ${id}, 1)`
  await sql`
    update waybill.endpoint_stats set pending = pending + ${Number(is !== 'delivered')}, delivered = delivered + ${Number(is === 'delivered')},
      held = held + ${Number(is === 'held')} where endpoint_id = ${endpoint}`
  return id
}

/** The distant days that something opens: those before yesterday and after tomorrow. */
const distantDays = (sql: Pool, run: (sql: Db) => Promise<unknown>): Promise<string[]> =>
  sql.begin(async (sql) => {
    await run(sql)
    const opened = await sql<{ relname: string }[]>`
      select relname from pg_locks l join pg_class c on c.oid = l.relation
      where l.pid = pg_backend_pid() and relkind = 'r' and relname ~ '^(events|deliveries|attempts)_\\d+$'
        and abs(to_date(right(relname, 8), 'YYYYMMDD') - (now() at time zone 'utc')::date) > 1`
    return opened.map(({ relname }) => relname)
  })

/** Releases as many as this, and answers with how many there were. */
async function release(sql: Db, endpoint: string, room = 1): Promise<number> {
  const released = await sql<{ released: number }[]>`
    select released from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[${room}::int], interval '25 seconds')`
  return released[0]?.released ?? 0
}

const isQueued = async (sql: Db, id: string) =>
  (await sql`select from pgboss.job where name = 'deliveries' and (id = ${id} or data -> 'ids' ? ${id}::text)`)
    .length === 1

test('a release that knows from where on there is something held opens no distant day', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  for (let nth = 0; nth < 3; nth++) await insertDelivery(sql, endpoint, {})
  assert.notDeepEqual(await distantDays(sql, (sql) => release(sql, endpoint)), [])
  assert.deepEqual(await distantDays(sql, (sql) => release(sql, endpoint)), [])
  assert.equal(await release(sql, endpoint), 1)
  await assertBooks(sql)
})

const behind = async (sql: Db, endpoints: string[], ids: string[], areHeld = ids.map(() => false)) => {
  const rows = await sql<{ id: string }[]>`
    select distinct unnest(waybill.behind(${ids.map(() => 'acme')}::text[], ${endpoints}::uuid[], ${ids}::uuid[], ${areHeld}::boolean[])) as id`
  return rows.map(({ id }) => id)
}

test('whether ordered endpoints’ deliveries are the oldest is found out without opening a distant day', async (t) => {
  const { sql, endpoint, addEndpoint } = await keepOldDay(t, { ordered: true })
  const other = await addEndpoint()
  const late = await insertDelivery(sql, endpoint, { hoursAgo: 0.02 })
  await insertDelivery(sql, other, {})
  const [first, second] = [
    await insertDelivery(sql, other, { is: 'queued', hoursAgo: 0.01 }),
    await insertDelivery(sql, endpoint, { is: 'queued' }),
  ]
  await sql`update waybill.endpoint_stats set held_from = waybill.first_id(now() - interval '1 hour')`
  const days = await distantDays(sql, async (sql) => {
    assert.deepEqual(await behind(sql, [other, endpoint], [first, second]), [second])
  })
  assert.deepEqual(days, [])
  // It has a job, as in a backup of two moments.
  assert.deepEqual(await behind(sql, [endpoint], [late], [true]), [])
  const later = await insertDelivery(sql, endpoint, {})
  await sql`update waybill.deliveries set held = false where delivery_id = ${late}`
  await sql`update waybill.deliveries set held = true where delivery_id = ${second}`
  assert.deepEqual(await behind(sql, [endpoint], [later], [true]), [later])
})

test('the oldest of each of several ordered endpoints is behind none, whatever else they have in the queue', async (t) => {
  const { sql, endpoint, addEndpoint } = await keepOldDay(t, { ordered: true })
  const other = await addEndpoint()
  const oldest: string[] = []
  for (const one of [endpoint, other]) oldest.push(await insertDelivery(sql, one, { is: 'queued' }))
  const later: string[] = []
  for (const one of [other, endpoint]) later.push(await insertDelivery(sql, one, { is: 'queued' }))
  assert.deepEqual(await behind(sql, [endpoint, other], oldest), [])
  assert.deepEqual((await behind(sql, [other, endpoint], later)).toSorted(), later)
})

test('an ordered endpoint’s held delivery that has a job all the same is not sent beside the one in the queue', async (t) => {
  const { sql, endpoint } = await keepOldDay(t, { ordered: true })
  const [first, second] = [
    await insertDelivery(sql, endpoint, { is: 'queued' }),
    await insertDelivery(sql, endpoint, {}),
  ]
  await sql`select waybill.enqueue_one('acme', ${second}, 1)`
  const claimed =
    await sql`select delivery_id, sendable from waybill.claim_due(false, true, 10, 1000) order by delivery_id`
  assert.deepEqual(
    [...claimed],
    [
      { delivery_id: first, sendable: true },
      { delivery_id: second, sendable: false },
    ],
  )
})

test('a delivery is behind one of a distant day if it is not known from where on some are held', async (t) => {
  const { sql, endpoint } = await keepOldDay(t, { ordered: true })
  await insertDelivery(sql, endpoint, { daysAgo: OLD })
  const id = await insertDelivery(sql, endpoint, { is: 'queued' })
  assert.deepEqual(await behind(sql, [endpoint], [id]), [id])
})

test('a claim is taken back from a lost worker without opening a distant day', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  const id = await insertDelivery(sql, endpoint, { is: 'queued' })
  assert.deepEqual(await claim(sql), [id])
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds'`
  const days = await distantDays(sql, async (sql) => {
    const taken = await sql`select delivery_id from waybill.take_back('10 seconds', 3, 5, 100, false)`
    assert.deepEqual([...taken], [{ delivery_id: id }])
  })
  assert.deepEqual(days, [])
})

test('how old a tenant’s queue is shows without opening a day of more than a week ago, unless something waits there', async (t) => {
  const { sql, endpoint, oldDay } = await keepOldDay(t)
  await insertDelivery(sql, endpoint, { is: 'queued' })
  await insertDelivery(sql, endpoint, {})
  await sql`update waybill.endpoint_stats set held_from = waybill.first_id(now() - interval '1 hour')`
  await sql`update waybill.deliveries set next_attempt_at = now() - interval '1 minute' where not held`
  const age = async (sql: Db) =>
    (await sql<[{ age: number }]>`select round(waybill.queue_age('acme'))::int as age`)[0].age
  assert.equal(await age(sql), 60)
  assert.ok(!(await distantDays(sql, age)).includes(oldDay))
  const old = await insertDelivery(sql, endpoint, { is: 'queued', daysAgo: OLD })
  await sql`update waybill.deliveries set next_attempt_at = now() - interval '2 minutes' where delivery_id = ${old}`
  assert.equal(await age(sql), 120)
  await sql`update waybill.deliveries set held = true, updated_at = now() - interval '3 minutes', earlier_attempts = 1 where delivery_id = ${old}`
  await sql`update waybill.endpoint_stats set held = held + 1`
  assert.equal(await age(sql), 180, 'though it is from before all that is known to be held')
})

/** How a delivery that is older than all that is held comes to be held. */
const HOLDS: Record<
  string,
  { is: 'queued' | 'delivered'; hold: (sql: Pool, endpoint: string, id: string) => Promise<unknown> }
> = {
  'a worker that has no room for it': {
    is: 'queued',
    hold: async (sql, endpoint, id) => {
      await claim(sql)
      await sql`select waybill.hold_claims(array['acme'], array[${id}]::uuid[], array[${endpoint}]::uuid[], array[null]::uuid[], array[0], false)`
    },
  },
  'a replay': { is: 'delivered', hold: (sql, _, id) => sql`select from waybill.replay('acme', ${id})` },
  'somebody who does not say which it is': {
    is: 'queued',
    hold: async (sql, endpoint, id) => {
      await sql`update waybill.deliveries set held = true where delivery_id = ${id}`
      await sql`update waybill.endpoint_stats set held = held + 1, held_from = null where endpoint_id = ${endpoint}`
      await sql`delete from pgboss.job where id = ${id}`
    },
  },
}

for (const [who, { is, hold }] of Object.entries(HOLDS))
  test(`what is held by ${who} is released first, if it is the oldest`, async (t) => {
    const { sql, endpoint } = await keepOldDay(t, { ordered: is === 'delivered' })
    const old = await insertDelivery(sql, endpoint, { is, daysAgo: OLD })
    const [first] = [await insertDelivery(sql, endpoint, {}), await insertDelivery(sql, endpoint, {})]
    // An ordered endpoint gets none while another is in the queue.
    if (is === 'queued') await sql`update waybill.endpoints set ordered = false`
    await release(sql, endpoint)
    assert.equal(await isQueued(sql, first), true)
    await sql`delete from pgboss.job where id = ${first}`
    await sql`update waybill.deliveries set status = 'delivered' where delivery_id = ${first}`
    await sql`update waybill.endpoint_stats set pending = pending - 1, delivered = delivered + 1`
    await hold(sql, endpoint, old)
    assert.equal(await isQueued(sql, old), false)
    await assertBooks(sql)
    assert.equal(await release(sql, endpoint), 1)
    assert.equal(await isQueued(sql, old), true)
  })

test('what was published before others are released, and is stored after that, is found', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  for (let nth = 0; nth < 2; nth++) await insertDelivery(sql, endpoint, {})
  await release(sql, endpoint)
  const [before, ahead] = [
    await insertDelivery(sql, endpoint, { hoursAgo: 0.9 }),
    await insertDelivery(sql, endpoint, { hoursAgo: -0.9 }),
  ]
  assert.equal(await release(sql, endpoint), 1)
  assert.equal(await isQueued(sql, before), true)
  assert.equal(await release(sql, endpoint, 2), 2)
  assert.equal(await isQueued(sql, ahead), true)
})

test('what is asked for as a probe does not hide what is older', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  const [old, wanted] = [await insertDelivery(sql, endpoint, { daysAgo: OLD }), await insertDelivery(sql, endpoint, {})]
  await sql`update waybill.endpoint_stats set breaker = 'open', probing = ${wanted}, next_probe_at = now()`
  assert.equal(await release(sql, endpoint), 1)
  assert.equal(await isQueued(sql, wanted), true)
  await assertBooks(sql)
  await sql`update waybill.endpoint_stats set next_probe_at = now()`
  assert.equal(await release(sql, endpoint), 1)
  assert.equal(await isQueued(sql, old), true)
  await assertBooks(sql)
})

test('an announcement that is published late is not hidden by what was released before', async (t) => {
  const { sql, endpoint, addEndpoint } = await keepOldDay(t)
  await sql`update waybill.endpoints set subscribed_events = array['endpoint.disabled']`
  const about = await addEndpoint()
  await sql`select waybill.announce('acme', ${about}, 'endpoint.disabled', '{}')`
  await sql`update waybill.announcements set announcement_id = waybill.make_id(now() - interval '3 hours')`
  for (let nth = 0; nth < 2; nth++) await insertDelivery(sql, endpoint, {})
  await release(sql, endpoint)
  await sql`select waybill.publish_announcements(10)`
  await assertBooks(sql)
})

test('publishing tells from where on something is held only where nothing was', async (t) => {
  const { sql, endpoint, addEndpoint } = await keepOldDay(t, { ordered: true })
  const other = await addEndpoint()
  await insertDelivery(sql, other, { daysAgo: OLD })
  await publishMany(sql, 'acme', 2)
  await assertBooks(sql)
  const known = await sql<
    { id: string }[]
  >`select endpoint_id as id from waybill.endpoint_stats where held_from is not null`
  assert.deepEqual([...known], [{ id: endpoint }])
  assert.deepEqual(await distantDays(sql, (sql) => release(sql, endpoint)), [])
})

test('where more is counted than is held, other endpoints are released as before', async (t) => {
  const { sql, endpoint, addEndpoint } = await keepOldDay(t)
  const other = await addEndpoint()
  for (let nth = 0; nth < 3; nth++) for (const one of [endpoint, other]) await insertDelivery(sql, one, {})
  await sql`update waybill.endpoint_stats set held = held + 1 where endpoint_id = ${other}`
  await sql`update waybill.endpoint_stats set held_from = waybill.first_id(now() - interval '1 hour')`
  await sql`
    select from waybill.release_held(array['acme', 'acme'], array[${endpoint}, ${other}]::uuid[], array[0, 0], array[10, 10], interval '25 seconds')`
  const standing = await sql`
    select endpoint_id, held::int, held_from is not null as is_known from waybill.endpoint_stats order by endpoint_id`
  assert.deepEqual(
    [...standing],
    [
      { endpoint_id: endpoint, held: 0, is_known: true },
      { endpoint_id: other, held: 1, is_known: false },
    ],
  )
})

test('what has an id from before the clock was set back is released as fast as the rest', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  for (let nth = 0; nth < 3; nth++) await insertDelivery(sql, endpoint, { hoursAgo: -30 })
  for (let nth = 0; nth < 3; nth++) assert.equal(await release(sql, endpoint), 1)
})

test('what is held by hand before all that is known of is found when nothing else is left', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  for (let nth = 0; nth < 2; nth++) await insertDelivery(sql, endpoint, {})
  await release(sql, endpoint)
  const old = await insertDelivery(sql, endpoint, { daysAgo: OLD })
  assert.equal(await release(sql, endpoint, 2), 1)
  assert.equal(await release(sql, endpoint, 2), 1)
  assert.equal(await isQueued(sql, old), true)
  await assertBooks(sql)
})

test('what is published after the clock was set back by days is found', async (t) => {
  const { sql, endpoint } = await keepOldDay(t)
  for (let nth = 0; nth < 2; nth++) await insertDelivery(sql, endpoint, {})
  await release(sql, endpoint)
  await sql`update waybill.endpoint_stats set held_from = waybill.first_id(now() + interval '2 days')`
  await createClockMender(sql, 300)()
  assert.equal(await release(sql, endpoint), 1)
})
