import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import { setTimeout } from 'node:timers/promises'
import { DatabaseError } from 'pg'
import type { Pool } from '../../src/db/open.ts'
import { createLanes, type Lanes } from '../../src/flow/lanes/lanes.ts'
import { startReleaser } from '../../src/flow/release.ts'
import { createLog } from '../../src/log.ts'
import { cleanUp } from '../support/cleanup.ts'
import { createDatabase, insertEndpoint, waitingForLocks } from '../support/database.ts'
import { publishMany } from '../support/deliveries.ts'
import { claim, queueAt, startFailing } from '../support/queue.ts'
import { waitFor } from '../support/wait.ts'

/** An endpoint of a tenant that has so many deliveries, all of them held. */
async function holdBack(sql: Pool, count: number, tenant = 'acme'): Promise<string> {
  const endpoint = await insertEndpoint(sql, { tenant })
  await publishMany(sql, tenant, count)
  await sql`delete from pgboss.job where name = 'deliveries' and data ->> 'tenant_id' = ${tenant}`
  await sql`update waybill.deliveries set held = true, bundle = null, next_attempt_at = null where tenant_id = ${tenant}`
  await sql`update waybill.endpoint_stats set held = pending, tag = 0 where tenant_id = ${tenant}`
  return endpoint
}

const releaseAll = (sql: Pool, endpoints: string[], tenants = endpoints.map(() => 'acme')) => sql`
  select endpoint_id, released from waybill.release_held(${tenants}::text[], ${endpoints}::uuid[], ${endpoints.map(() => 0)}::int[],
    ${endpoints.map(() => 50)}::int[], interval '25 seconds')`

/** Releases until the test ends, beside a backlog of first attempts. */
function release(t: TestContext, pool: Pool, lanes: Lanes, slots = 200) {
  const releaser = startReleaser({
    pool,
    lanes,
    hasBacklog: () => true,
    slots,
    leaseSeconds: 25,
    log: createLog('silent'),
  })
  cleanUp(t, releaser.stop)
  return releaser
}

test('a release reads its own endpoints, however many have come since its plan was made', async (t) => {
  const { newSession } = await createDatabase(t)
  const sql = newSession()
  const endpoint = await holdBack(sql, 3)
  await sql`update waybill.endpoints set ordered = true`
  const finish = async () => {
    await sql`delete from pgboss.job where name = 'deliveries'`
    await sql`update waybill.deliveries set status = 'delivered' where not held`
    await sql`update waybill.endpoint_stats set pending = held where endpoint_id = ${endpoint}`
  }
  for (let nth = 0; nth < 2; nth++) {
    assert.equal((await releaseAll(sql, [endpoint]))[0]?.released, 1)
    await finish()
  }
  await sql`
    with e as (
      insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
      select 'acme', gen_random_uuid(), 'http://x', array['other'], '' from generate_series(1, 5000) returning tenant_id, endpoint_id
    )
    insert into waybill.endpoint_stats (tenant_id, endpoint_id) select tenant_id, endpoint_id from e`
  const read = async () => {
    await sql`select pg_stat_force_next_flush()`
    const [row] = await sql<[{ read: number }]>`
      select sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::int as read from pg_stat_user_tables
      where schemaname = 'waybill' and relname in ('endpoints', 'endpoint_stats')`
    return row.read
  }
  const before = await read()
  assert.equal((await releaseAll(sql, [endpoint]))[0]?.released, 1)
  assert.ok((await read()) - before < 50, `${(await read()) - before} were read`)
})

test('what is held counts as failing where its endpoint did not answer last, or has failed three times in a row', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  for (const [url, streak, last] of [
    ['answered 500 twice', 2, 500],
    ['answered 500 three times', 3, 500],
    ['did not answer last', 1, null],
    ['answered', 0, 200],
  ] as const)
    await sql`
      with e as (
        insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
        values ('acme', gen_random_uuid(), ${url}, array['*'], '') returning tenant_id, endpoint_id
      )
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, last_success_at, recent_status_codes)
      select tenant_id, endpoint_id, 1, 1, ${streak}, now(), array[${last}]::smallint[] from e`
  const endpoints = await sql<{ id: string; url: string }[]>`select endpoint_id as id, url from waybill.endpoints`
  const standings = new Map<string, string>()
  const lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    reserve(endpoint: { endpointId: string; standing: string }) {
      standings.set(endpoints.find(({ id }) => id === endpoint.endpointId)!.url, endpoint.standing)
      return 0
    },
  }
  release(t, sql, lanes)
  await waitFor(() => standings.size === 4, { what: 'all to be asked for' })
  assert.deepEqual(Object.fromEntries(standings), {
    'answered 500 twice': 'good',
    'answered 500 three times': 'failing',
    'did not answer last': 'failing',
    answered: 'good',
  })
})

test('an endpoint has no more than its part released in a look, and a paced one what it has time slots for, which like retries comes before a backlog; many of those are told of', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  for (const [url, held, retrying, pace] of [
    ['many', 100_000, 64, null],
    ['retries', 100_000, 65, null],
    ['few', 3, 0, null],
    ['paced', 100_000, 0, 7],
  ] as const)
    await sql`
      with e as (
        insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret, max_per_second)
        values ('acme', gen_random_uuid(), ${url}, array['*'], '', ${pace}) returning tenant_id, endpoint_id
      )
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, retrying, held)
      select tenant_id, endpoint_id, ${held}, ${retrying}, ${held} from e`
  const endpoints = await sql<{ id: string; url: string }[]>`select endpoint_id as id, url from waybill.endpoints`
  const asked = new Map<string, [number, boolean, boolean]>()
  const lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    reserve(
      { endpointId, hasManyRetries }: { endpointId: string; hasManyRetries: boolean },
      { wanted, comeAtOnce }: { wanted: number; comeAtOnce: boolean },
    ) {
      asked.set(endpoints.find(({ id }) => id === endpointId)!.url, [wanted, hasManyRetries, comeAtOnce])
      return 0
    },
  }
  release(t, sql, lanes)
  await waitFor(() => asked.size === 4, { what: 'all to be asked for' })
  assert.deepEqual(Object.fromEntries(asked), {
    many: [500, false, true],
    retries: [500, true, true],
    few: [3, false, false],
    paced: [4, false, true],
  })
})

test('a tenant’s probes are asked for in the order in which they are due, and take turns with other tenants’ and with what is no probe', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) select n, n from unnest(array['acme', 'other']) n`
  await sql`
    with e as (
      insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
      select tenant, gen_random_uuid(), nth, array['*'], ''
      from unnest(array['acme', 'other']) tenant, generate_series(0, 40) nth where tenant = 'acme' or nth in (0, 7, 8) returning *
    )
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, breaker, next_probe_at, last_failure_at)
    select tenant_id, endpoint_id, 1, 1, 10, case when url::int > 20 then 'closed' else 'open' end::waybill.breaker,
      -- Each has one that has been probed since the others; where that has long been failing, its next probe comes much later.
      case when url::int between 1 and 20 then now() - url::int * interval '1 second'
        when url::int = 0 then now() + case when tenant_id = 'acme' then 5 else 280 end * interval '1 second' end,
      now() - case when url::int > 0 then 60 when tenant_id = 'acme' then 5 else 20 end * interval '1 second' from e`
  const endpoints = await sql<{ id: string; name: string; nth: number }[]>`
    select endpoint_id as id, tenant_id as name, url::int as nth from waybill.endpoints where url <> '0'`
  const asked: { name: string; nth: number }[] = []
  const lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    // In the first look that knows of all.
    noteHeld() {
      if (asked.length < endpoints.length) asked.length = 0
    },
    reserve(endpoint: { endpointId: string }) {
      if (asked.length < endpoints.length) asked.push(endpoints.find(({ id }) => id === endpoint.endpointId)!)
      return 0
    },
  }
  release(t, sql, lanes)
  await waitFor(() => asked.length === endpoints.length, { what: 'all to be asked for' })
  const probes = asked.filter(({ nth }) => nth <= 20)
  assert.deepEqual(
    probes.filter(({ name }) => name === 'acme').map(({ nth }) => nth),
    Array.from({ length: 20 }, (_, nth) => 20 - nth),
  )
  assert.deepEqual(
    probes.slice(0, 4).map(({ name, nth }) => `${name} ${nth}`),
    ['other 8', 'acme 20', 'other 7', 'acme 19'],
  )
  // The 20 others of the one tenant come between its probes, in no order.
  const others = asked.flatMap(({ name, nth }, index) => (nth > 20 ? [{ name, index }] : []))
  assert.ok(others.every(({ name }) => name === 'acme'))
  assert.ok(others.some(({ index }) => index < 3) && others.filter(({ index }) => index < 22).length >= 9)
})

test('what may be released is found by one look-up for each endpoint, also where thousands are down that were not when it was planned', async (t) => {
  const { sql, openPool } = await createDatabase(t)
  const pool = openPool({ max: 1 })
  let looks = 0
  let asked = 0
  const none = {
    ...createLanes({ cap: 50, slots: 200 }),
    noteHeld: () => void looks++,
    reserve() {
      asked++
      return 0
    },
  }
  const releaser = startReleaser({
    pool,
    lanes: none,
    hasBacklog: () => true,
    slots: 200,
    leaseSeconds: 25,
    log: createLog('silent'),
  })
  cleanUp(t, releaser.stop)
  const look = async (times: number) => {
    const before = looks
    await waitFor(
      () => {
        releaser.wake()
        return looks >= before + times
      },
      { what: 'looks', intervalMs: 5 },
    )
  }
  /** By the releaser's connection. */
  const read = async () => {
    await pool`select pg_stat_force_next_flush()`
    const [row] = await sql<{ read: number }[]>`
      select sum(seq_tup_read + idx_tup_fetch)::int as read from pg_stat_user_tables where relname in ('endpoints', 'endpoint_stats')`
    return row!.read
  }
  // Postgres keeps a plan from the sixth time on.
  await look(10)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) select n, n from generate_series(1, 10) n`
  await sql`
    with e as (
      insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
      select nth % 10 + 1, gen_random_uuid(), 'http://down', array['*'], '' from generate_series(1, 1000) nth returning *
    )
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, breaker, next_probe_at, last_failure_at)
    select tenant_id, endpoint_id, 1, 1, 10, 'open', now(), now() from e`
  const [before, first] = [await read(), looks]
  asked = 0
  await waitFor(() => asked > 0, { what: 'probes to be found' })
  assert.ok(asked >= 1000, `${asked} were found`)
  await releaser.stop()
  const rows = (await read()) - before
  assert.ok(rows <= (looks - first + 1) * 3100, `${rows} rows in ${looks - first} looks`)
})

test('a release that Postgres gives up because of others is made all the same, and nobody is told', async (t) => {
  const { sql } = await createDatabase(t)
  await startFailing(sql, [true])
  await sql`update waybill.endpoint_stats set next_probe_at = now()`
  let tries = 0
  const pool = new Proxy(sql, {
    apply(pool, self, [text, ...values]) {
      if (String(text).includes('release_held') && tries++ === 0)
        throw Object.assign(new DatabaseError('deadlock detected', 0, 'error'), { code: '40P01' })
      return Reflect.apply(pool, self, [text, ...values])
    },
  })
  const told: unknown[] = []
  const log = Object.assign(createLog('silent'), { error: (...line: unknown[]) => void told.push(line) })
  const lanes = createLanes({ cap: 50, slots: 200 })
  const releaser = startReleaser({ pool, lanes, hasBacklog: () => true, slots: 200, leaseSeconds: 25, log })
  cleanUp(t, releaser.stop)
  await waitFor(async () => (await sql`select from waybill.endpoint_stats where held = 0`).length === 1)
  assert.deepEqual([tries, told], [2, []])
})

test('a look that leaves endpoints out does not tell that these have nothing held', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  const hold = (count: number) => sql`
    with e as (
      insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
      select 'acme', gen_random_uuid(), 'http://x', array['*'], '' from generate_series(1, ${count}) returning *
    )
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held) select tenant_id, endpoint_id, 1, 1 from e`
  let told: [number, boolean] | undefined
  const lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    noteHeld(ids: Set<string>, { all }: { all: boolean }) {
      told = [ids.size, all]
    },
    reserve: () => 0,
  }
  await hold(499)
  release(t, sql, lanes)
  await waitFor(() => told, { what: 'a look' })
  assert.deepEqual(told, [499, true])
  await hold(2)
  await waitFor(() => told![0] > 499, { what: 'another look' })
  assert.deepEqual(told, [500, false])
})

test('a probe that does not come back in time has the oldest delivery that is held probed, also one that is older', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [true, false])
  await sql`update waybill.endpoint_stats set probing = ${ids[1]!}, next_probe_at = now()`
  await sql`select waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[1], array[50], interval '25 seconds')`
  const [row] = await sql`
    select probing, held::int, next_probe_at > now() + interval '20 seconds' as is_alone from waybill.endpoint_stats`
  assert.deepEqual(row, { probing: ids[0], held: 0, is_alone: true })
})

test('an ordered endpoint is probed with its oldest delivery, whichever was probed before', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [true, true])
  await sql`update waybill.endpoints set ordered = true`
  await sql`update waybill.endpoint_stats set probing = ${ids[1]!}, next_probe_at = now()`
  await sql`select waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '25 seconds')`
  const [row] = await sql`select probing, held::int from waybill.endpoint_stats`
  assert.deepEqual(row, { probing: ids[0], held: 1 })
})

test('what is released for several tenants at once shares jobs with its own tenant’s alone, at most sixteen a job', async (t) => {
  const { sql } = await createDatabase(t)
  const tenants = ['acme', 'other']
  const endpoints = [await holdBack(sql, 20, 'acme'), await holdBack(sql, 20, 'other')]
  await releaseAll(sql, endpoints, tenants)
  const jobs = await sql<{ tenant: string; size: number; owners: string[] }[]>`
    select data ->> 'tenant_id' as tenant, jsonb_array_length(data -> 'ids') as size,
      array(select distinct tenant_id from waybill.deliveries where bundle = id) as owners
    from pgboss.job where name = 'deliveries' order by 1, 2`
  assert.deepEqual(
    [...jobs],
    tenants.flatMap((tenant) => [4, 16].map((size) => ({ tenant, size, owners: [tenant] }))),
  )
})

test('of two who release for an endpoint at once the second sees what the first has released', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const endpoint = await holdBack(sql, 3)
  await sql`update waybill.endpoints set ordered = true`
  let second: Promise<unknown> | undefined
  await newSession().begin(async (first) => {
    assert.deepEqual(
      [
        ...(await first`select released from waybill.release_held('{acme}', ${[endpoint]}::uuid[], '{0}', '{50}', interval '25 seconds')`),
      ],
      [{ released: 1 }],
    )
    second = releaseAll(sql, [endpoint])
    await waitFor(async () => (await waitingForLocks(sql, '%release_held%')) > 0, { what: 'the second to wait' })
  })
  assert.deepEqual(await second, [])
  const [stats] =
    await sql`select held::int, (select count(*)::int from waybill.deliveries where held) as rows from waybill.endpoint_stats`
  assert.deepEqual({ ...stats }, { held: 2, rows: 2 })
})

test('retries that are released move no place in the turns of what comes next', async (t) => {
  const { sql } = await createDatabase(t)
  const endpoint = await holdBack(sql, 5)
  await sql`update waybill.deliveries set status = 'retrying', spent_retries = 1`
  await sql`update waybill.endpoint_stats set pending = 0, retrying = 5`
  assert.deepEqual(
    (await releaseAll(sql, [endpoint])).map(({ released }) => released),
    [5],
  )
  assert.deepEqual([...(await sql`select tag from waybill.endpoint_stats`)], [{ tag: 0 }])
})

test('what has a slot comes before all that waits in the turn that is being claimed, though its own place is in the next', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`update waybill.queue_clock set tag = 100.99`
  await sql`update waybill.claim_marks set old_tag = 100.99, next_tag = 100.99`
  const endpoint = await holdBack(sql, 1)
  await sql`update waybill.endpoints set max_per_second = 1`
  await queueAt(sql, Array(3).fill(100.99))
  await releaseAll(sql, [endpoint])
  const [first] = await sql`select delivery_id as id from waybill.claim_due(false, false, 1, 1000)`
  const [own] = await sql`select delivery_id as id from waybill.deliveries`
  assert.deepEqual({ ...first }, { ...own })
})

test('an urgent first attempt is not put before where claiming has got to', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`update waybill.queue_clock set tag = 100`
  await sql`update waybill.claim_marks set old_tag = 100, next_tag = 100`
  const endpoint = await holdBack(sql, 1)
  await sql`update waybill.endpoints set ordered = true`
  await releaseAll(sql, [endpoint])
  assert.equal((await claim(sql)).length, 1)
})

test('a release that has waited gives slots from the moment on at which it goes on', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const endpoint = await holdBack(sql, 1)
  await sql`update waybill.endpoints set max_per_second = 1`
  let releasing: Promise<unknown> | undefined
  const { ended } = await newSession().begin(async (other) => {
    await other`select from waybill.endpoint_stats for update`
    releasing = releaseAll(sql, [endpoint])
    await waitFor(async () => (await waitingForLocks(sql, '%release_held%')) > 0, { what: 'the release to wait' })
    const [row] = await other<{ ended: Date }[]>`select clock_timestamp() as ended`
    return row!
  })
  await releasing
  const [shown] = await sql<{ next_attempt_at: Date }[]>`select next_attempt_at from waybill.deliveries`
  assert.ok(
    shown!.next_attempt_at >= ended,
    `a slot at ${shown!.next_attempt_at.toISOString()}, given after ${ended.toISOString()}`,
  )
})

test('an endpoint that recovers has twice its ramp released, less what is under way', async (t) => {
  const { sql } = await createDatabase(t)
  const endpoint = await holdBack(sql, 10)
  await sql`update waybill.endpoint_stats set breaker = 'half_open', ramp = 2`
  const release = (busy: number) =>
    sql`select released from waybill.release_held('{acme}', ${[endpoint]}::uuid[], ${[busy]}::int[], '{50}', interval '25 seconds')`
  assert.deepEqual([...(await release(4))], [])
  assert.deepEqual([...(await release(1))], [{ released: 3 }])
})

test('a tenant’s probes take no part of the turn in which what is released for others of its endpoints stands', async (t) => {
  const { sql } = await createDatabase(t)
  const endpoint = await holdBack(sql, 32)
  const failing: string[] = []
  for (let nth = 0; nth < 10; nth++) failing.push((await startFailing(sql, [true])).endpoint)
  await sql`update waybill.endpoint_stats set next_probe_at = now() where breaker = 'open'`
  assert.equal((await releaseAll(sql, [endpoint, ...failing])).length, 11)
  assert.deepEqual(
    [...(await sql`select tag from waybill.endpoint_stats where endpoint_id = ${endpoint}`)],
    [{ tag: 0.5 }],
  )
})

for (const [what, change] of [
  ['is inactive', 'update waybill.endpoints set is_active = false'],
  [
    'has had its probe',
    "update waybill.endpoint_stats set breaker = 'open', next_probe_at = now() + interval '1 minute'",
  ],
] as const)
  test(`nothing is released for an endpoint that ${what} since it was found to take some`, async (t) => {
    const { sql } = await createDatabase(t)
    const endpoint = await holdBack(sql, 3)
    await sql.text(change)
    assert.deepEqual([...(await releaseAll(sql, [endpoint]))], [])
    assert.deepEqual([...(await sql`select held::int from waybill.endpoint_stats`)], [{ held: 3 }])
  })

for (const [what, slots, perSecond, early, first, second, restMs] of [
  ['no longer ahead than half of the slots last, and again when half of that is over', 200, 100, 5, 5, 0, 25],
  ['again when half of what an endpoint has is over', 200, 100, 4, 5, 1, 20],
  ['as far ahead as looks are apart, however few slots there are', 10, 100, 1, 3, 2, 12.5],
  ['half a second ahead at most', 200, 2, 1, 1, 0, 250],
  ['at leisure where it had no room', 200, 100, 0, 5, 5, 250],
] as const)
  test(`what is paced is released ${what}`, async (t) => {
    const { sql } = await createDatabase(t)
    for (let nth = 0; nth < 20; nth++) {
      await insertEndpoint(sql, { types: [String(nth)] })
      await publishMany(sql, 'acme', 20, String(nth))
    }
    await sql`update waybill.endpoints set max_per_second = ${perSecond}`
    await sql`update waybill.deliveries set held = true, bundle = null, next_attempt_at = null`
    await sql`update waybill.endpoint_stats set held = pending`
    await sql`delete from pgboss.job where name = 'deliveries'`
    const timers = t.mock.method(globalThis, 'setTimeout')
    const asked: number[] = []
    const looks: number[] = []
    let isReleased = false
    const lanes: Lanes = {
      ...createLanes({ cap: 50, slots }),
      early: () => (isReleased ? early : 0),
      reserve(_endpoint, { wanted }) {
        if (asked.push(wanted) % 20 === 1) looks.push(performance.now())
        return Math.max(0, wanted)
      },
      giveBack: () => {
        isReleased = true
      },
    }
    release(t, sql, lanes, slots)
    await waitFor(() => asked.length >= 40, { what: 'a second look', intervalMs: 1 })
    assert.deepEqual(asked.slice(0, 40), [...Array(20).fill(first), ...Array(20).fill(second)])
    const rest = looks[1]! - looks[0]!
    assert.ok(rest >= restMs - 1, `${rest} ms later`)
    // A pause and what is left of this time.
    const waits = timers.mock.calls.map(({ arguments: [, ms = 0] }) => ms)
    assert.ok(waits.some((pause) => waits.some((left) => Math.abs(pause + left - restMs) < 0.001)))
  })

/** A pool that does this first, each time that probes are looked for, or others. */
const beforeLooks = (sql: Pool, { probes }: { probes: boolean }, first: () => Promise<void>) =>
  new Proxy(sql, {
    async apply(pool, self, [text, ...values]) {
      if (String(text).includes('with stats') && values.includes(probes)) await first()
      return await Reflect.apply(pool, self, [text, ...values])
    },
  })

test('probes for which there is no room yet are kept, and looked for again after five times as long as that took', async (t) => {
  const { sql } = await createDatabase(t)
  for (let nth = 0; nth < 5; nth++) await startFailing(sql, [true])
  await sql`update waybill.endpoint_stats set next_probe_at = now()`
  const looks: number[] = []
  const pool = beforeLooks(sql, { probes: true }, async () => {
    looks.push(performance.now())
    await setTimeout(700)
  })
  let room = 0
  const lanes: Lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    noteHeld() {
      room = 1
    },
    reserve: () => (room > 0 ? room-- : 0),
  }
  const releaser = release(t, pool, lanes)
  const held = () => sql`select from waybill.endpoint_stats where held > 0`
  const areReleased = async () => {
    releaser.wake()
    return (await held()).length === 0
  }
  await waitFor(areReleased, { what: 'all to be probed' })
  assert.equal(looks.length, 1)
  await waitFor(() => looks.length === 2, { what: 'another look for probes' })
  const apart = looks[1]! - looks[0]!
  assert.ok(apart >= 5 * 700 - 10, `${apart} ms apart`)
})

test('what is paced is looked for when half of what an endpoint has is over, though looking takes long', async (t) => {
  const { sql } = await createDatabase(t)
  await holdBack(sql, 20)
  await sql`update waybill.endpoints set max_per_second = 10`
  const looks: number[] = []
  const pool = beforeLooks(sql, { probes: false }, async () => {
    looks.push(performance.now())
    await setTimeout(100)
  })
  release(t, pool, { ...createLanes({ cap: 50, slots: 200 }), early: () => 2, reserve: () => 0 })
  await waitFor(() => looks.length > 10, { what: 'looks' })
  const apart = Math.min(...looks.slice(1).map((at, nth) => at - looks[nth]!))
  assert.ok(apart < 240, `${apart} ms apart`)
})

test('who finds that another worker had a probe before has the next one released at once', {
  timeout: 60_000,
}, async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint: other } = await startFailing(sql, [true])
  await startFailing(sql, [true])
  await sql`update waybill.endpoint_stats set next_probe_at = now() - case when endpoint_id = ${other} then interval '1 minute' else '0' end`
  const asked: string[] = []
  let room = 0
  let isFound = false
  const looked = Promise.withResolvers<void>()
  const lanes: Lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    noteHeld() {
      room = 1
      looked.resolve()
    },
    reserve({ endpointId }) {
      if (room === 0) return 0
      room = 0
      asked.push(endpointId)
      return 1
    },
  }
  const pool = new Proxy(sql, {
    async apply(pool, self, [text, ...values]) {
      if (String(text).includes('with stats') && values.includes(true)) {
        if (isFound) return []
        // Or the next look would be due in the first one.
        await looked.promise
        isFound = true
      }
      if (String(text).includes('release_held') && asked.length === 1)
        await sql`update waybill.endpoint_stats set next_probe_at = now() + interval '1 minute' where endpoint_id = ${asked[0]!}`
      return await Reflect.apply(pool, self, [text, ...values])
    },
  })
  // Looks take no time, so pauses are short, and who rests does not come back.
  t.mock.method(performance, 'now', () => 0)
  const { setTimeout: start } = globalThis
  t.mock.method(globalThis, 'setTimeout', (then: () => void, ms = 0) => start(then, ms > 200 ? 120_000 : ms))
  release(t, pool, lanes)
  await waitFor(() => asked.length === 2, { what: 'the other probe' })
  assert.equal(new Set(asked).size, 2)
})

test('what is no probe is released although a look for probes takes long and fails, and the next one comes after five times as long', async (t) => {
  const { sql } = await createDatabase(t)
  await holdBack(sql, 1)
  const looks: number[] = []
  const pool = beforeLooks(sql, { probes: true }, async () => {
    looks.push(performance.now())
    await setTimeout(400)
    throw new Error('no probes today')
  })
  const told: unknown[] = []
  const log = Object.assign(createLog('silent'), { error: (...line: unknown[]) => void told.push(line[1]) })
  const lanes = createLanes({ cap: 50, slots: 200 })
  const releaser = startReleaser({ pool, lanes, hasBacklog: () => false, slots: 200, leaseSeconds: 25, log })
  cleanUp(t, releaser.stop)
  await waitFor(async () => (await sql`select from waybill.endpoint_stats where held = 0`).length === 1)
  await waitFor(() => looks.length === 2, { what: 'another look' })
  assert.deepEqual(told, ['release-probes.failed'])
  const apart = looks[1]! - looks[0]!
  assert.ok(apart >= 5 * 400 - 10, `${apart} ms apart`)
})
