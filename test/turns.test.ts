import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Db, Pool } from '../src/db/open.ts'
import { createDatabase, insertEndpoint, waitingForLocks } from './support/database.ts'
import { NO_LIMITS, publishMany } from './support/deliveries.ts'
import { claim } from './support/queue.ts'
import { waitFor } from './support/wait.ts'

const FULL = 64
/** Where the clock stands: an endpoint that nothing has been queued for is not taken for one that keeps up with it. */
const CLOCK = 100

/** A database in which claiming has got to the clock. */
async function start(t: TestContext): Promise<Pool> {
  const { sql } = await createDatabase(t)
  await sql`update waybill.queue_clock set tag = ${CLOCK}`
  return sql
}

async function addEndpoints(sql: Pool, count: number, typeOf: (nth: number) => string = () => '*') {
  const ids: string[] = []
  for (let nth = 0; nth < count; nth++) ids.push(await insertEndpoint(sql, { types: [typeOf(nth)] }))
  return ids
}

/** How many deliveries stand in each turn. */
const turns = async (sql: Pool) =>
  (
    await sql<{ deliveries: number }[]>`
      select sum(coalesce(jsonb_array_length(data -> 'ids'), 1))::int as deliveries from pgboss.job where name = 'deliveries'
      group by priority order by priority desc`
  ).map(({ deliveries }) => deliveries)

/** Fails unless all `deliveries` are queued and no turn has more than `most` of them. */
async function assertTurns(sql: Pool, deliveries: number, most = FULL): Promise<void> {
  const all = await turns(sql)
  const sum = all.reduce((total, turn) => total + turn, 0)
  assert.ok(sum === deliveries && Math.max(...all) <= most, `${sum} in turns of ${all}`)
}

/** What has been published for these endpoints is held, and nothing queued. */
async function holdAll(sql: Pool) {
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set held = true, bundle = null`
  await sql`update waybill.endpoint_stats set held = pending, tag = 0`
}

const releaseAll = (sql: Db, most: number) => sql`
  select waybill.release_held(array_agg(tenant_id), array_agg(endpoint_id), array_agg(0), array_agg(${most}::int), interval '25 seconds')
  from waybill.endpoint_stats`

const HOWS: Record<string, (sql: Pool, type: string) => Promise<unknown>> = {
  publish_plain: (sql, type) =>
    sql`select from waybill.publish_plain('acme', array[${type}::text], array['{}'], array[null::text], ${JSON.stringify(NO_LIMITS)})`,
  publish: (sql, type) => publishMany(sql, 'acme', 1, type),
}

for (const [how, publishOne] of Object.entries(HOWS)) {
  test(`no more of a tenant stands in a turn however few deliveries each of its endpoints has (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 50)
    for (let nth = 0; nth < 6; nth++) await publishOne(sql, 'a')
    await assertTurns(sql, 50 * 6)
    assert.equal((await turns(sql)).length, Math.ceil((50 * 6) / FULL))
  })

  test(`who publishes while many tenants have a backlog waits for a part of their turn (${how})`, async (t) => {
    const sql = await start(t)
    const tenants = Array.from({ length: 40 }, (_, nth) => `tenant-${nth}`)
    for (const tenant of tenants) {
      await insertEndpoint(sql, { tenant })
      await publishMany(sql, tenant, 2 * FULL)
    }
    await addEndpoints(sql, 1)
    for (let nth = 0; nth < 3; nth++) await claim(sql)
    // Their bundles hold sixteen each. A few that come one after the other have their places, too.
    const part = (tenants.length * 16) / 100
    for (let nth = 0; nth < 3; nth++) {
      await publishOne(sql, 'a')
      const [{ id }] = await sql<[{ id: string }]>`
        select delivery_id as id from waybill.deliveries where tenant_id = 'acme' order by delivery_id desc limit 1`
      let claims = 1
      while (!(await claim(sql)).includes(id)) claims++
      assert.ok(claims <= part + 2, `came with the ${claims}th claim`)
    }
  })

  test(`nor if each of them gets its own, one after the other (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 200, (nth) => `kind ${nth}`)
    for (let nth = 0; nth < 200; nth++) await publishOne(sql, `kind ${nth}`)
    await assertTurns(sql, 200)
  })

  test(`what one endpoint has little of waits for one delivery of each other, and not for all that another has (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 3, (nth) => ['large', 'large', 'small'][nth]!)
    await publishMany(sql, 'acme', 1000, 'large')
    const placeOfNext = async () => {
      await publishOne(sql, 'small')
      const [job] = await sql<
        { tag: number }[]
      >`select (data ->> 'tag')::float8 as tag from pgboss.job order by start_after desc limit 1`
      return job?.tag
    }
    for (const nth of [1, 2, 3]) assert.equal(await placeOfNext(), CLOCK + (nth * 3) / FULL)
  })

  test(`what comes to endpoints together does not stand at one place where others of theirs are under way (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 100)
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, tag) select tenant_id, endpoint_id, 1, ${CLOCK - 1} from waybill.endpoints`
    await publishOne(sql, 'a')
    await assertTurns(sql, 100)
  })

  test(`nor does what is alone in the queue stand far back for them (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 1)
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, tag) select 'acme', gen_random_uuid(), 20, ${CLOCK - 1} from generate_series(1, 1000)`
    for (let nth = 0; nth < FULL; nth++) await publishOne(sql, 'a')
    assert.deepEqual(await turns(sql), [FULL - 1, 1])
  })

  test(`about that much stands in a turn, whichever of its endpoints its events go to (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 200, (nth) => `kind ${nth % 4}`)
    await addEndpoints(sql, 2)
    for (let nth = 0; nth < 40; nth++) await publishOne(sql, `kind ${nth % 4}`)
    for (let nth = 0; nth < 40; nth++) await publishOne(sql, 'kind 1')
    await assertTurns(sql, 80 * 52, 2 * FULL)
  })

  test(`what waits for its retry takes no part of a turn (${how})`, async (t) => {
    const sql = await start(t)
    await addEndpoints(sql, 1, () => 'a')
    // Nor do first attempts that are held.
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, retrying, held, tag)
      select 'acme', gen_random_uuid(), nth % 2 * 50, 100, nth % 2 * 50, ${CLOCK + 1} from generate_series(1, 100) nth`
    for (let nth = 0; nth < FULL; nth++) await publishOne(sql, 'a')
    const [last] = await sql<{ tag: number }[]>`select max((data ->> 'tag')::float8) as tag from pgboss.job`
    assert.equal(last?.tag, CLOCK + 1)
  })
}

/** Fails unless each endpoint's deliveries have jobs that will be claimed in their order; of one job any may be the first. */
async function assertOldestFirst(sql: Pool): Promise<void> {
  const jobs = await sql<{ ids: string[] }[]>`
    select coalesce(data -> 'ids', jsonb_build_array(id)) as ids from pgboss.job where name = 'deliveries' order by priority desc, created_on`
  const place = new Map(jobs.flatMap(({ ids }, nth) => ids.map((id) => [id, nth] as const)))
  const endpoints = await sql<{ ids: string[] }[]>`
    select json_agg(delivery_id order by delivery_id) as ids from waybill.deliveries group by endpoint_id`
  for (const { ids } of endpoints) {
    const places = ids.flatMap((id) => place.get(id) ?? [])
    assert.equal(places.length, ids.length)
    assert.deepEqual(
      places,
      places.toSorted((one, other) => one - other),
    )
  }
}

test('where endpoints share jobs, what is published at once is claimed in the order of each', async (t) => {
  const sql = await start(t)
  for (const types of [
    ['a', 'c'],
    ['b', 'c'],
  ])
    await insertEndpoint(sql, { types })
  await publishMany(sql, 'acme', 40, 'a')
  await publishMany(sql, 'acme', 32, 'c')
  await assertOldestFirst(sql)
})

test('what is gathered from many turns keeps its order', async (t) => {
  const sql = await start(t)
  await sql`update waybill.queue_clock set tag = 1e8 + 0.5`
  await addEndpoints(sql, 1)
  for (let nth = 0; nth < FULL; nth++) await publishMany(sql, 'acme', 1)
  await sql`update waybill.queue_clock set tag = 0.5`
  assert.deepEqual([...(await sql`select waybill.gather_strays() as found`)], [{ found: FULL + 1 }])
  assert.equal((await turns(sql)).length, 1)
  await assertOldestFirst(sql)
})

test('what is published at once to many endpoints does not stand in one turn, nor does what comes next', async (t) => {
  const sql = await start(t)
  await addEndpoints(sql, 16)
  await publishMany(sql, 'acme', FULL)
  assert.deepEqual([Math.max(...(await turns(sql))), (await turns(sql)).length], [FULL, 17])
  const [next] = await sql`select max(tag) as tag from waybill.endpoint_stats`
  assert.equal(next?.tag, CLOCK + 16)
})

test('nor do large parts of it stand at the same places where many have little', async (t) => {
  const sql = await start(t)
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, tag) select 'acme', gen_random_uuid(), 1, ${CLOCK + 1} from generate_series(1, 2000)`
  await addEndpoints(sql, 100)
  await publishMany(sql, 'acme', FULL)
  await assertTurns(sql, 100 * FULL)
})

test('what others of the same batch are refused changes no places', async (t) => {
  const sql = await start(t)
  await addEndpoints(sql, 100)
  await insertEndpoint(sql, { tenant: 'refused' })
  await sql`update waybill.tenants set limits = '{"monthly_events": 0}' where tenant_id = 'refused'`
  for (let nth = 0; nth < 3; nth++) {
    const outcomes = await sql`
      select outcome from waybill.publish(array['acme', 'refused'], array['a', 'a'], array['{}', '{}'], array[null, null]::text[], ${JSON.stringify(NO_LIMITS)})`
    assert.deepEqual(
      outcomes.map(({ outcome }) => outcome),
      ['accepted', 'monthly_events'],
    )
    const [stats] = await sql<{ next: number }[]>`select min(tag) as next from waybill.endpoint_stats`
    assert.equal(stats?.next, CLOCK + ((nth + 1) * 100) / FULL)
  }
  await assertTurns(sql, 300)
})

test('nor does what is refused of the tenant itself take part in its turn', async (t) => {
  const sql = await start(t)
  await addEndpoints(sql, 100)
  await sql`update waybill.tenants set limits = '{"monthly_events": 1}' where tenant_id = 'acme'`
  await publishMany(sql, 'acme', 50)
  assert.deepEqual(await turns(sql), [FULL - 1, 37])
})

test('an endpoint with a large backlog is not slowed down by a thousand that have one delivery each', async (t) => {
  const sql = await start(t)
  const [large] = await addEndpoints(sql, 1, () => 'large')
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, tag) select 'acme', gen_random_uuid(), 1, ${CLOCK + 1} from generate_series(1, 1000)`
  const next = async () =>
    (await sql<{ tag: number }[]>`select tag from waybill.endpoint_stats where endpoint_id = ${large!}`)[0]
      ?.tag as number
  await publishMany(sql, 'acme', FULL, 'large')
  assert.equal(await next(), CLOCK + (1000 + FULL) / FULL)
  await sql`delete from waybill.endpoint_stats where endpoint_id = ${large!}`
  // One by one, they begin behind one of each other.
  for (let nth = 0; nth < FULL; nth++) await publishMany(sql, 'acme', 1, 'large')
  assert.ok((await next()) < CLOCK + (2 * (1000 + FULL)) / FULL, `${await next()}`)
})

test('a tenant whose backlog is released from many endpoints has one turn all the same', async (t) => {
  const sql = await start(t)
  await addEndpoints(sql, 80)
  await publishMany(sql, 'acme', 4)
  await holdAll(sql)
  await releaseAll(sql, 4)
  await assertTurns(sql, 80 * 4)
  const [places] = await sql`
    select (select max((data ->> 'tag')::float8) from pgboss.job where name = 'deliveries') as last, max(tag) as next from waybill.endpoint_stats`
  assert.deepEqual({ ...places }, { last: CLOCK + 5, next: CLOCK + 5 })
})

test('what is published while its endpoint’s backlog is released stands behind that', async (t) => {
  const sql = await start(t)
  await addEndpoints(sql, 1)
  await publishMany(sql, 'acme', FULL)
  await holdAll(sql)
  let publishing: Promise<unknown> | undefined
  await sql.begin(async (releasing) => {
    await releaseAll(releasing, FULL)
    publishing = publishMany(sql, 'acme', 1)
    await waitFor(async () => (await waitingForLocks(sql)) === 1)
  })
  await publishing
  const [last] = await sql`
    select held, (data ->> 'tag')::float8 as tag from waybill.deliveries left join pgboss.job on id = delivery_id order by delivery_id desc limit 1`
  assert.equal(last?.held, false)
  assert.ok(last.tag >= CLOCK + 1, `it stands at ${last.tag}`)
})

test('what is published and held moves its endpoint’s place in the queue neither on nor back', async (t) => {
  const sql = await start(t)
  const [id] = await addEndpoints(sql, 1)
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, tag) values ('acme', ${id!}, 65, 1, ${CLOCK + 1})`
  await publishMany(sql, 'acme', 2)
  assert.deepEqual([...(await sql`select held::int, tag from waybill.endpoint_stats`)], [{ held: 3, tag: CLOCK + 1 }])
})

test('what two have queued for an endpoint at the same places counts twice for the places of what comes next', async (t) => {
  const sql = await start(t)
  const [id] = await addEndpoints(sql, 1)
  await publishMany(sql, 'acme', FULL)
  let publishing: Promise<unknown> | undefined
  await sql.begin(async (holder) => {
    await holder`select from waybill.endpoint_stats where endpoint_id = ${id!} for update`
    publishing = Promise.all([publishMany(sql, 'acme', FULL), publishMany(sql, 'acme', FULL)])
    await waitFor(async () => (await waitingForLocks(sql)) === 2)
  })
  await publishing
  const places = await sql<{ last: number; next: number }[]>`
    select max((data ->> 'tag')::float8) as last, (select tag from waybill.endpoint_stats) as next
    from pgboss.job where name = 'deliveries'`
  assert.deepEqual({ ...places[0] }, { last: CLOCK + 2, next: CLOCK + 3 })
})
