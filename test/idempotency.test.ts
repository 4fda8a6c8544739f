import assert from 'node:assert/strict'
import { after, beforeEach, test } from 'node:test'
import { createPublish } from '../src/flow/publish.ts'
import { createDatabase } from './support/database.ts'
import { startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, createTenant, type Reply, startService, type Tenant } from './support/service.ts'
import { passMidnight, waitFor } from './support/wait.ts'

beforeEach(() => passMidnight())

const file = { after }
const database = await createDatabase(file)
const receiver = await startReceiver(file)
const env = { RATE_LIMIT_WINDOW_SECONDS: '86400' }
const service = await startService(file, { databaseUrl: database.url, mode: 'api', env })

async function start(): Promise<Tenant> {
  const tenant = await createTenant(service)
  await tenant.createEndpoint(receiver.url())
  return tenant
}

const publish = (tenant: Tenant, key: string | null, payload: string, type = 'order.placed'): Promise<Reply> =>
  tenant.call('POST', '/v1/events', {
    body: `{"event_type":"${type}","payload":${payload}}`,
    headers: key === null ? {} : { 'idempotency-key': key },
  })

const eventsOf = async (tenant: Tenant) => {
  const rows = await database.sql`select event_id from waybill.events where tenant_id = ${tenant.tenantId}`
  const jobs = await database.sql`
    select coalesce(members.id, job.id::text) as id
    from pgboss.job left join lateral jsonb_array_elements_text(data -> 'ids') as members (id) on true
    where name = 'deliveries' and data ->> 'tenant_id' = ${tenant.tenantId}`
  const deliveries = await database.sql`select delivery_id from waybill.deliveries where tenant_id = ${tenant.tenantId}`
  return { events: rows.length, deliveries: deliveries.length, jobs: jobs.length }
}

/** Groups replies by status, each with the one body that all of them must have. */
function byStatus(replies: Reply[]): Record<number, { count: number; text: string }> {
  const found: Record<number, { count: number; text: string }> = {}
  for (const { status, text } of replies) {
    const group = found[status] ?? { count: 0, text }
    found[status] = group
    assert.equal(text, group.text)
    group.count++
  }
  return found
}

const CONFLICT = (eventId: string) =>
  JSON.stringify({
    ok: false,
    error: 'idempotency key already used with a different payload',
    details: { event_id: eventId },
  })

test('50 publishes at once with one key make one event and 50 equal answers', async () => {
  const tenant = await start()
  const replies = await Promise.all(Array.from({ length: 50 }, () => publish(tenant, 'k', '{"n":1}')))
  const { 202: accepted, 200: replayed, ...others } = byStatus(replies)
  assert.deepEqual(others, {})
  assert.deepEqual([accepted?.count, replayed?.count], [1, 49])
  assert.equal(accepted!.text, replayed!.text)
  for (const { status, headers } of replies) {
    assert.equal(headers.get('idempotent-replayed'), status === 200 ? 'true' : null)
  }
  assert.deepEqual(await eventsOf(tenant), { events: 1, deliveries: 1, jobs: 1 })
})

test('of two different events that race for one key, one wins for all', async () => {
  const tenant = await start()
  const replies = await Promise.all(
    Array.from({ length: 50 }, (_, index) => publish(tenant, 'k', index % 2 ? '{"n":1}' : '{"n":2}')),
  )
  const { 202: accepted, 200: replayed, 409: refused, ...others } = byStatus(replies)
  assert.deepEqual(others, {})
  assert.deepEqual([accepted?.count, replayed?.count, refused?.count], [1, 24, 25])
  assert.equal(accepted!.text, replayed!.text)
  assert.equal(refused!.text, CONFLICT(JSON.parse(accepted!.text).event_id))
  assert.deepEqual(await eventsOf(tenant), { events: 1, deliveries: 1, jobs: 1 })
})

test('a repeated publish gets the first answer, however the same event is spelled', async () => {
  const tenant = await start()
  const first = await publish(tenant, 'k', String.raw`{"a":1,"b":{"x":100,"y":"\u00e9"}}`)
  assert.equal(first.status, 202)
  for (const spelling of [
    String.raw`{"a":1,"b":{"x":100,"y":"\u00e9"}}`,
    '{"b":{"y":"é","x":1e2},"a":1.0}',
    '{ "a" : 10e-1, "b" : { "x" : 100.00 , "y" : "é" } }',
  ]) {
    const again = await publish(tenant, 'k', spelling)
    assert.equal(again.status, 200, spelling)
    assert.equal(again.headers.get('idempotent-replayed'), 'true')
    assert.equal(again.text, first.text)
  }
  assert.deepEqual(await eventsOf(tenant), { events: 1, deliveries: 1, jobs: 1 })
})

test('the same key with another event is a conflict that names the original', async () => {
  const tenant = await start()
  const first = await publish(tenant, 'k', '{"id":9007199254740993,"a":[1,2]}')
  for (const [payload, type] of [
    ['{"id":9007199254740992,"a":[1,2]}', 'order.placed'],
    ['{"id":9007199254740993,"a":[2,1]}', 'order.placed'],
    ['{"id":"9007199254740993","a":[1,2]}', 'order.placed'],
    ['{"id":9007199254740993,"a":[1,2],"b":null}', 'order.placed'],
    ['{"id":9007199254740993,"a":[1,2]}', 'order.paid'],
  ] as const) {
    const refused = await publish(tenant, 'k', payload, type)
    assert.equal(refused.status, 409, payload)
    assert.equal(refused.text, CONFLICT(first.body.event_id))
  }
  assert.deepEqual(await eventsOf(tenant), { events: 1, deliveries: 1, jobs: 1 })
})

test('two tenants use the same key for events of their own', async () => {
  const [one, two] = [await start(), await start()]
  const answers = await Promise.all([publish(one, 'k', '{"n":1}'), publish(two, 'k', '{"n":2}')])
  assert.deepEqual(
    answers.map(({ status }) => status),
    [202, 202],
  )
  assert.notEqual(answers[0].body.event_id, answers[1].body.event_id)
})

test('without a key every publish is an event of its own', async () => {
  const tenant = await start()
  const replies = await Promise.all(Array.from({ length: 10 }, () => publish(tenant, null, '{"n":1}')))
  assert.equal(new Set(replies.map(({ body }) => body.event_id)).size, 10)
  assert.equal(replies[0]!.body.idempotency_key, null)
  assert.deepEqual(await eventsOf(tenant), { events: 10, deliveries: 10, jobs: 10 })
})

test('a repeated publish answers as the first one did, although the endpoints have changed', async () => {
  const tenant = await start()
  const first = await publish(tenant, 'k', '{}')
  await tenant.createEndpoint(receiver.url('/new'))
  const again = await publish(tenant, 'k', '{}')
  assert.equal(again.text, first.text)
  assert.deepEqual(await eventsOf(tenant), { events: 1, deliveries: 1, jobs: 1 })
})

test('a refused publish does not use its key up', async () => {
  const tenant = await createTenant(service, { limits: { max_fanout_endpoints: 1 } })
  const endpoint = await tenant.createEndpoint(receiver.url('/1'))
  await tenant.createEndpoint(receiver.url('/2'))
  const refused = await publish(tenant, 'k', '{"n":1}')
  assert.equal(refused.status, 429)
  assert.deepEqual(await eventsOf(tenant), { events: 0, deliveries: 0, jobs: 0 })
  await tenant.call('PATCH', `/v1/endpoints/${endpoint.endpoint_id}`, { body: { is_active: false } })
  assert.equal((await publish(tenant, 'k', '{"n":2}')).status, 202)
})

for (const limits of [{ max_fanout_endpoints: 0 }, { monthly_events: 0 }, { monthly_attempts: 0 }])
  test(`20 publishes at once with one key are all refused alike by ${Object.keys(limits)}`, async () => {
    const tenant = await createTenant(service, { limits })
    await tenant.createEndpoint(receiver.url())
    const replies = byStatus(await Promise.all(Array.from({ length: 20 }, () => publish(tenant, 'k', '{"n":1}'))))
    assert.deepEqual(
      Object.entries(replies).map(([status, { count }]) => [status, count]),
      [['429', 20]],
    )
    assert.deepEqual(await eventsOf(tenant), { events: 0, deliveries: 0, jobs: 0 })
  })

test('a repeated publish is answered like the first however often it comes, also when the month is used up', async () => {
  const tenant = await createTenant(service, { limits: { monthly_events: 2 } })
  await tenant.createEndpoint(receiver.url())
  const first = await publish(tenant, 'k', '{"n":1}')
  assert.equal((await publish(tenant, null, '{"n":2}')).status, 202)
  assert.equal((await publish(tenant, null, '{"n":3}')).status, 429)
  for (let times = 0; times < 3; times++) {
    const { status, text } = await publish(tenant, 'k', '{"n":1}')
    assert.deepEqual({ status, text }, { status: 200, text: first.text })
    assert.equal((await publish(tenant, 'k', '{"n":4}')).status, 409)
  }
  assert.deepEqual(await eventsOf(tenant), { events: 2, deliveries: 2, jobs: 2 })
})

test('a repeated publish that is stored in one batch with what is held makes no second event of its key', async () => {
  const tenant = await createTenant(service)
  const endpoint = { url: receiver.url(), subscribed_events: ['*'], ordered: true }
  assert.equal((await tenant.call('POST', '/v1/endpoints', { body: endpoint })).status, 201)
  const publishOne = publishHere(async () => {})
  const { outcome } = await publishOne(tenant, 'k', '{"n":1}')
  assert.equal(outcome, 'accepted')
  // What is called in one turn is one batch.
  for (const other of ['a', 'b']) {
    const results = await Promise.all([publishOne(tenant, other, '{"n":2}'), publishOne(tenant, 'k', '{"n":1}')])
    assert.deepEqual(
      results.map((result) => result.outcome),
      ['accepted', 'repeated'],
    )
  }
  assert.deepEqual(await eventsOf(tenant), { events: 3, deliveries: 3, jobs: 0 })
})

test('requests of one batch have places of their own in their tenant’s rate window, also the repetition of an event, which takes none in the month', async () => {
  const [tenant, other] = [await start(), await start()]
  const publishOne = publishHere(async () => {})
  await publishOne(tenant, 'k', '{"n":1}')
  const results = await Promise.all([
    publishOne(other, 'k', '{"n":1}'),
    ...['a', 'k', 'b'].map((key) => publishOne(tenant, key, '{"n":1}')),
  ])
  assert.deepEqual(
    results.map(({ outcome, rate }) => [outcome, rate.count]),
    [
      ['accepted', 1],
      ['accepted', 2],
      ['repeated', 3],
      ['accepted', 4],
    ],
  )
  const [used] = await database.sql`
    select count::int from waybill.usage where tenant_id = ${tenant.tenantId} and metric = 'events'`
  assert.equal(used?.count, 3)
})

test('an event whose key another one has lost by being refused is judged for itself', async () => {
  const tenant = await createTenant(service, { limits: { max_fanout_endpoints: 1 } })
  for (const path of ['/1', '/2'])
    await tenant.createEndpoint(receiver.url(path), { subscribed_events: ['order.placed'] })
  const publishOne = publishHere(async () => {})
  const results = await Promise.all([
    publishOne(tenant, 'k', '{}', 'order.placed'),
    publishOne(tenant, 'k', '{}', 'order.paid'),
  ])
  assert.deepEqual(
    results.map(({ outcome }) => outcome),
    ['fanout', 'accepted'],
  )
})

for (const limits of [{ monthly_events: 0 }, { monthly_attempts: 0 }, { max_fanout_endpoints: 0 }]) {
  test(`events of five types that race for one key are all refused by ${Object.keys(limits)}, and counted once`, async () => {
    const tenant = await createTenant(service, { limits })
    await tenant.createEndpoint(receiver.url())
    const replies = await Promise.all(
      Array.from({ length: 50 }, (_, n) => publish(tenant, 'k', '{}', `order.${'abcde'[n % 5]}`)),
    )
    assert.equal(byStatus(replies)[429]?.count, 50)
    const left = replies.map(({ headers }) => Number(headers.get('x-ratelimit-remaining')))
    assert.deepEqual(
      left.sort((a, b) => a - b),
      Array.from({ length: 50 }, (_, n) => 5950 + n),
    )
  })
}

test('a key whose event is gone makes a new event, once, and each request is counted once', async () => {
  const [tenant, other] = [await start(), await start()]
  await publish(other, 'k', '{"n":1}')
  const first = await publish(tenant, 'k', '{"n":1}')
  await database.sql`delete from waybill.deliveries where tenant_id = ${tenant.tenantId}`
  await database.sql`delete from waybill.events where tenant_id = ${tenant.tenantId}`
  const {
    202: accepted,
    200: replayed,
    ...others
  } = byStatus(await Promise.all(Array.from({ length: 20 }, () => publish(tenant, 'k', '{"n":2}'))))
  assert.deepEqual(others, {})
  assert.deepEqual([accepted?.count, replayed?.count], [1, 19])
  assert.equal(accepted!.text, replayed!.text)
  assert.notEqual(JSON.parse(accepted!.text).event_id, first.body.event_id)
  const counts = await database.sql<{ tenant_id: string; count: number }[]>`
    select tenant_id, count::int from waybill.rate_windows where action = 'events:write'`
  const countOf = ({ tenantId }: Tenant) => counts.find(({ tenant_id }) => tenant_id === tenantId)?.count
  assert.deepEqual([tenant, other].map(countOf), [21, 1])
})

/** Publishing in this process; `watch` sees each statement before it goes to the database. */
function publishHere(watch: (statement: string) => Promise<void>) {
  const pool = database.openPool({ max: 8 })
  const watched = async (parts: TemplateStringsArray, ...values: never[]) => {
    await watch(parts.join('?'))
    return await pool(parts, ...values)
  }
  const limits = { rate: 1000, window_seconds: 86_400, fanout: 10, monthly_events: 1000, monthly_attempts: 1000 }
  const publishOne = createPublish(Object.assign(watched, pool), limits)
  return (tenant: Tenant, idempotencyKey: string, payload: string, type = 'order.placed') =>
    publishOne({ tenantId: tenant.tenantId, event: { type, payload, idempotencyKey } })
}

const isLoad = (statement: string) => statement.includes('select payload from')

test('a key whose event goes just before it is compared makes a new event, and the request is counted once', async () => {
  const tenant = await start()
  let gone = 0
  const publish = publishHere(async (statement) => {
    if (!isLoad(statement) || gone++ > 0) return
    await database.sql`delete from waybill.deliveries where tenant_id = ${tenant.tenantId}`
    await database.sql`delete from waybill.events where tenant_id = ${tenant.tenantId}`
  })
  // So large that a tenant has no two of them read at once.
  const large = `{"text":"${'x'.repeat(600_000)}"}`
  const first = await publish(tenant, 'k', large)
  const second = await publish(tenant, 'k', `${large} `)
  assert.deepEqual([first.outcome, second.outcome, second.rate.count, gone], ['accepted', 'accepted', 2, 1])
  assert.deepEqual(await eventsOf(tenant), { events: 1, deliveries: 1, jobs: 2 })
  assert.equal((await publish(tenant, 'k', large)).outcome, 'repeated', 'there is room for the next')
})

test('a request that is submitted again after its window has ended takes nothing off the count of the next', async () => {
  const tenant = await start()
  const isUncount = (statement: string) => statement.includes('count = count - 1')
  const publish = publishHere(async (statement) => {
    if (isUncount(statement))
      await database.sql`
        update waybill.rate_windows set window_start = window_start + interval '1 day', count = 5
        where tenant_id = ${tenant.tenantId}`
  })
  await publish(tenant, 'k', '{"n":1}')
  await database.sql`delete from waybill.deliveries where tenant_id = ${tenant.tenantId}`
  await database.sql`delete from waybill.events where tenant_id = ${tenant.tenantId}`
  assert.equal((await publish(tenant, 'k', '{"n":2}')).rate.count, 6)
})

test('a key whose event is gone is freed once, however late another that has found it so gets to that', async () => {
  const tenant = await start()
  const { promise: stored, resolve: store } = Promise.withResolvers<void>()
  let freed = 0
  const publish = publishHere(async (statement) => {
    if (statement.includes('delete from waybill.idempotency_keys') && freed++ > 0) await stored
  })
  await publish(tenant, 'k', '{"n":1}')
  await database.sql`delete from waybill.deliveries where tenant_id = ${tenant.tenantId}`
  await database.sql`delete from waybill.events where tenant_id = ${tenant.tenantId}`
  const both = ['{"n":2}', '{"n":2}'].map((payload) => publish(tenant, 'k', payload))
  await Promise.race(both).finally(store)
  const outcomes = (await Promise.all(both)).map(({ outcome }) => outcome)
  assert.deepEqual([outcomes.sort(), freed], [['accepted', 'repeated'], 2])
})

test('the first event is read only for a request that may repeat it, and a tenant has no two large ones read at once', async () => {
  const [tenant, other] = [await start(), await start()]
  const { promise: held, resolve: open } = Promise.withResolvers<void>()
  let loads = 0
  const publish = publishHere(async (statement) => {
    if (!isLoad(statement)) return
    loads++
    await held
  })
  const large = `{"text":"${'x'.repeat(600_000)}"}`
  for (const one of [tenant, other]) await publish(one, 'k', large)
  assert.equal((await publish(tenant, 'k', large)).outcome, 'repeated')
  assert.equal((await publish(tenant, 'k', '{}', 'order.paid')).outcome, 'key_reused')
  assert.equal(loads, 0)
  const answers = Promise.all([
    ...[`${large} `, '{}', '{}'].map((payload) => publish(tenant, 'k', payload)),
    ...['{}', ` ${large}`].map((payload) => publish(other, 'k', payload)),
  ])
  answers.catch(() => {})
  await waitFor(() => loads === 2, { what: 'one of each tenant to be read' })
  // Their outcomes came in one batch, so all were asked for by now; those in line wait no longer than a second.
  for (let n = 0; n < 5; n++) await new Promise(setImmediate)
  assert.equal(loads, 2)
  open()
  const outcomes = (await answers).map(({ outcome }) => outcome)
  assert.deepEqual(outcomes, ['repeated', 'key_reused', 'key_reused', 'key_reused', 'repeated'])
  assert.equal(loads, 5)
})

test('a key is kept as long as its event, which a live delivery keeps beyond its time', async () => {
  const tenant = await start()
  const { sql } = database
  const { body: first } = await publish(tenant, 'old', '{"n":1}')
  // As if it had been published 40 days ago, and another with it that is done.
  const [{ event_id: old } = {}] = await sql`
    with moved as (select waybill.make_id(now() - interval '40 days') as event_id),
    e as (update waybill.events e set event_id = m.event_id from moved m where e.tenant_id = ${tenant.tenantId} and e.event_id = ${first.event_id} returning e.event_id),
    d as (update waybill.deliveries d set event_id = m.event_id, delivery_id = waybill.make_delivery_id(m.event_id) from moved m where d.tenant_id = ${tenant.tenantId} and d.event_id = ${first.event_id}),
    k as (update waybill.idempotency_keys k set event_id = m.event_id from moved m where k.tenant_id = ${tenant.tenantId} and k.event_id = ${first.event_id})
    select event_id from moved`
  await sql`insert into waybill.idempotency_keys (tenant_id, key, event_id) values (${tenant.tenantId}, 'gone', waybill.make_id(now() - interval '41 days'))`
  const run = (apply: boolean) => service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply } })
  assert.equal((await run(false)).body.idempotency_keys, 1)
  assert.equal((await run(true)).body.idempotency_keys, 1)
  const again = await publish(tenant, 'old', '{"n":1}')
  assert.deepEqual([again.status, again.body.event_id], [200, old])

  await sql`update waybill.deliveries set status = 'delivered' where tenant_id = ${tenant.tenantId}`
  assert.equal((await run(true)).body.idempotency_keys, 1)
  assert.equal((await publish(tenant, 'old', '{"n":1}')).status, 202)
})
