import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { suite, type TestContext, test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { createSecretBox, ownerOf } from '../src/secrets.ts'
import { waitingForLocks } from './support/database.ts'
import { assertBooks, publishMany, secondsAhead, settled, watchInFlight } from './support/deliveries.ts'
import { gate, type Receipt, type Receiver, startReceiver } from './support/receiver.ts'
import { createTenant, ENCRYPTION_KEY, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** An API, a receiver and a tenant; workers come and go as the test says. */
async function start(t: TestContext, env: Record<string, string> = {}) {
  const receiver = await startReceiver(t)
  const all = { RETRY_DELAY_SECONDS: '1', RETRY_DELAY_MAX_SECONDS: '1', ...env }
  const { databaseUrl, sql, openPool, service, tenant } = await startTenant(t, { mode: 'api', env: all })
  const startWorker = () => startService(t, { databaseUrl, mode: 'worker', env: all })
  const addTenant = () => createTenant(service)
  return { sql, receiver, startWorker, addTenant, tenant, claim: createClaim(openPool({ max: 2 }), 1e9) }
}

const eventOf = ({ headers }: Receipt) => String(headers['webhook-id'])

/** An ordered endpoint and a worker. `deliver` takes so many milliseconds for so many deliveries, and `alone` for 30. */
async function startOrdered(t: TestContext) {
  const { sql, receiver, startWorker, tenant } = await start(t)
  await tenant.createEndpoint(receiver.url('/hook'))
  await sql`update waybill.endpoints set ordered = true`
  await startWorker()
  const deliver = async (count: number) => {
    const begun = Date.now()
    const path = '/hook'
    // Before they are published: the first may arrive before that is known here.
    const all = receiver.at(path).length + count
    await publishMany(sql, tenant.tenantId, count)
    await receiver.until(all, { path, timeoutMs: 60_000 })
    return Date.now() - begun
  }
  await deliver(5)
  return { sql, receiver, deliver, alone: await deliver(30) }
}

/** Adds 3,000 endpoints that hang, whose breakers are open and whose first delivery is due as a probe. */
async function addHanging(sql: Pool, receiver: Receiver, { tenants }: { tenants: number }): Promise<void> {
  receiver.script('/hangs', () => new Promise(() => {}))
  const ids = Array.from({ length: 3000 }, (_, nth) => ({ tenant: `hanging-${nth % tenants}`, id: randomUUID() }))
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) select id, id from (select 'hanging-' || generate_series(0, ${tenants - 1})) as t (id)`
  await sql`
    with failing as (
      insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
      select tenant_id, id, ${receiver.url('/hangs')}, array['other'], secret
      from unnest(${ids.map(({ tenant }) => tenant)}::text[], ${ids.map(({ id }) => id)}::uuid[], ${sealAll(ids)}::bytea[]) as u (tenant_id, id, secret)
      returning tenant_id, endpoint_id
    ), made as (
      select *, waybill.make_id(clock_timestamp()) as event_id from failing
    ), stored as (
      insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
      select tenant_id, event_id, 'other', '{}', 1 from made
    ), waiting as (
      insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
      select tenant_id, waybill.make_delivery_id(event_id), event_id, endpoint_id, 'other', true, now() from made
    )
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, breaker, breaker_since, next_probe_at)
    select tenant_id, endpoint_id, 1, 1, 10, 'open', now(), now() from made`
}

function sealAll(ids: { tenant: string; id: string }[]): Buffer[] {
  const box = createSecretBox([Buffer.from(ENCRYPTION_KEY, 'base64')])
  return ids.map(({ tenant, id }) => box.seal(`whsec_${'A'.repeat(43)}=`, ownerOf(tenant, id)))
}

suite('pace and order', { concurrency: 3 }, () => {
  test('max_per_second holds across two workers', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.endpoints set max_per_second = 20 where endpoint_id = ${endpoint_id}`
    await Promise.all([startWorker(), startWorker()])
    await publishMany(sql, tenant.tenantId, 120)
    await receiver.until(120, { timeoutMs: 60_000 })
    await settled(sql)
    assert.equal(receiver.receipts.length, 120)
    // When they were sent: this process may be late to see it.
    const sent = await sql<{ at: number }[]>`
      select extract(epoch from started_at)::float8 * 1000 as at from waybill.attempts order by started_at`
    const ahead = secondsAhead([...sent], 20)
    // None goes before its moment, but on a busy machine some are late, and the others seem early beside them. Each worker at
    // a pace of its own would be 3 seconds ahead.
    assert.ok(ahead <= 2, `up to ${ahead} seconds’ worth too many`)
    await assertBooks(sql)
  })

  test('a worker that was stopped does not send what has missed its moment', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'), { max_per_second: 100 })
    const worker = await startWorker()
    await publishMany(sql, tenant.tenantId, 500)
    await receiver.until(100)
    worker.signal('SIGSTOP')
    const path = `/v1/endpoints/${endpoint_id}`
    await tenant.call('PATCH', path, { body: { is_active: false } })
    const missed = () => sql`select from waybill.endpoint_stats where next_slot < now() - interval '700 milliseconds'`
    await waitFor(async () => (await missed()).length === 1, { what: 'the moments of all to pass' })
    const goesOnAt = new Date()
    worker.signal('SIGCONT')
    const held = () => sql`select from waybill.endpoint_stats where held = pending + retrying`
    await waitFor(async () => (await held()).length === 1, { what: 'everything to be held' })
    // What had begun when it was stopped is another thing. A single one may have been past its last look at the time.
    const late = await sql`select from waybill.attempts where started_at > ${goesOnAt}`
    assert.ok(late.length <= 1, `${late.length} were late`)
    await tenant.call('PATCH', path, { body: { is_active: true } })
    await receiver.until(500, { timeoutMs: 60_000 })
    await settled(sql)
    await assertBooks(sql)
  })

  for (const what of ['ordered', 'failing'])
    test(`an endpoint that is paced and ${what} does not wait for where the clock was before it was set back`, async (t) => {
      const { sql, receiver, startWorker, tenant } = await start(t)
      const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'), { max_per_second: 10 })
      await tenant.publish()
      if (what === 'ordered') await sql`update waybill.endpoints set ordered = true`
      else await sql`update waybill.endpoint_stats set breaker = 'open', failure_streak = 9, next_probe_at = now()`
      await sql`update waybill.endpoint_stats set next_slot = now() + interval '1 day'`
      // A worker would have it mended sooner or later (upkeep/clock-set-back.ts).
      await sql`select from waybill.release_held(array[${tenant.tenantId}], array[${endpoint_id}]::uuid[], array[0], array[9], '1 minute')`
      const soon = await sql`
        select from pgboss.job where name = 'deliveries' and to_timestamp((data ->> 'slot')::float8 / 1000) < now() + interval '5 seconds'`
      assert.equal(soon.length, 1)
      await startWorker()
      await receiver.until(1)
      await settled(sql)
      await assertBooks(sql)
    })

  for (const [what, max_per_second] of [
    ['is paced', 10],
    ['was', null],
  ] as const)
    test(`nor does a delivery that was queued for a moment before that, for an endpoint that ${what}`, async (t) => {
      const { sql, receiver, startWorker, tenant } = await start(t)
      const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'), { max_per_second: 10 })
      await tenant.publish()
      await sql`select from waybill.release_held(array[${tenant.tenantId}], array[${endpoint_id}]::uuid[], array[0], array[9], '1 minute')`
      const moved = await sql`
        update pgboss.job set data = jsonb_set(data, '{slot}', to_jsonb((data ->> 'slot')::float8 + 86400e3))
        where name = 'deliveries' and data ? 'slot' returning id`
      assert.equal(moved.length, 1)
      await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { max_per_second } })
      await startWorker()
      await receiver.until(1)
      await settled(sql)
      await assertBooks(sql)
    })

  test('a worker that stops hands back what waits for its moment', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.endpoints set max_per_second = 10 where endpoint_id = ${endpoint_id}`
    const worker = await startWorker()
    await publishMany(sql, tenant.tenantId, 40)
    await receiver.until(5)
    assert.deepEqual(await worker.stop(), { code: 0, signal: null })
    assert.equal((await sql`select from pgboss.job where name = 'deliveries' and state = 'active'`).length, 0)
    await startWorker()
    await receiver.until(40, { timeoutMs: 60_000 })
    await settled(sql)
    assert.equal(receiver.receipts.length, 40)
    const numbers = await sql`select distinct attempt_number from waybill.attempts`
    assert.deepEqual([...numbers], [{ attempt_number: 1 }])
    await assertBooks(sql)
  })

  test('an ordered endpoint gets one at a time in publish order, though two workers run and one is killed', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.endpoints set ordered = true where endpoint_id = ${endpoint_id}`
    const [doomed] = await Promise.all([startWorker(), startWorker()])
    const published: string[] = []
    let failures = 0
    const seen = watchInFlight(
      receiver,
      '/hook',
      (receipt) => (eventOf(receipt) === published[4] && failures++ < 2 ? 500 : 200),
      { delayMs: 10 },
    )
    for (let n = 0; n < 40; n++) published.push((await tenant.publish()).event_id)
    await receiver.until(20, { timeoutMs: 30_000 })
    await doomed!.kill()
    await settled(sql, 90_000)
    assert.equal(seen.most, 1)
    const order = receiver.receipts.map(eventOf)
    assert.deepEqual([...new Set(order)], published, 'first arrivals are in publish order')
    const repeats = order.filter((id, at) => order.indexOf(id) !== at)
    assert.deepEqual(repeats.slice(0, 2), [published[4], published[4]])
    order.forEach((id, at) => {
      if (at > 0) assert.ok(published.indexOf(id) >= published.indexOf(order[at - 1]!), 'none is passed by another')
    })
    await assertBooks(sql)
  })

  test('an endpoint that is made ordered while it waits for retries does not wait for them, whatever it asked for', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/old'))
    receiver.script('/old', { status: 503, headers: { 'retry-after': '3600' } })
    await startWorker()
    await publishMany(sql, tenant.tenantId, 3)
    await waitFor(async () => (await sql`select from waybill.deliveries where status = 'retrying'`).length === 3)
    const change = { url: receiver.url('/new'), ordered: true }
    assert.equal((await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: change })).status, 200)
    const receipts = await receiver.until(3, { path: '/new', timeoutMs: 60_000 })
    assert.deepEqual(receipts.map(eventOf), receipts.map(eventOf).toSorted())
    await settled(sql)
    await assertBooks(sql)
  })

  test('an endpoint can be made ordered however many retries wait for it', async (t) => {
    const { sql, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
    await publishMany(sql, tenant.tenantId, 15_000)
    await sql`delete from pgboss.job where name = 'deliveries'`
    // With these statistics, joins went through all of them for each.
    await sql.text('analyze waybill.deliveries, pgboss.job')
    await sql`
      select waybill.enqueue(json_agg(json_build_object('id', delivery_id, 'priority', waybill.retry_priority(now() + interval '1 hour'),
        'data', json_build_object('tenant_id', tenant_id)))::text) from waybill.deliveries`
    await sql`
      update pgboss.job set state = 'retry', started_on = now(), start_after = now() + interval '1 hour' where name = 'deliveries'`
    await sql`update waybill.deliveries set status = 'retrying', bundle = null, next_attempt_at = now() + interval '1 hour'`
    await sql`update waybill.endpoint_stats set pending = 0, retrying = 15000`
    const { status } = await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered: true } })
    assert.equal(status, 200)
    const [due] = await sql`
      select count(*) filter (where next_attempt_at <= now())::int as now,
        max(delivery_id::text) filter (where next_attempt_at <= now()) < min(delivery_id::text) filter (where next_attempt_at > now()) as oldest
      from waybill.deliveries`
    assert.deepEqual({ ...due }, { now: 10_000, oldest: true })
  })

  test('an endpoint that is made ordered with a backlog gets it in publish order, one at a time', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    const seen = watchInFlight(receiver, '/hook', (receipt) =>
      eventOf(receipt) === first && failures++ < 1 ? 500 : 200,
    )
    const first = (await tenant.publish()).event_id
    let failures = 0
    await publishMany(sql, tenant.tenantId, 150)
    await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered: true } })
    await Promise.all([startWorker(), startWorker()])
    await settled(sql, 90_000)
    assert.equal(seen.most, 1)
    const order = receiver.receipts.map(eventOf)
    assert.deepEqual(order, [first, ...order.slice(1).sort()])
    assert.equal(order.length, 152)
    await assertBooks(sql)
  })

  test('the queue is as old as what is held behind others, but for what waits for a retry', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t, {
      RETRY_DELAY_SECONDS: '60',
      RETRY_DELAY_MAX_SECONDS: '60',
    })
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered: true } })
    const [first, second] = [gate(), gate(500)]
    receiver.script('/hook', first.reply, second.reply)
    await startWorker()
    // At once: the third one's age is asked for as soon as the first one's is known.
    await publishMany(sql, tenant.tenantId, 3)
    const age = async (): Promise<number> => (await tenant.call('GET', '/v1/metrics/summary')).body.queue_age_seconds
    await waitFor(async () => (await age()) > 1, { what: 'the queue to get a second old' })
    first.open()
    await receiver.until(2)
    assert.ok((await age()) > 1, 'the third one still waits')
    second.open()
    await waitFor(async () => (await age()) === 0, { what: 'the third one not to be due before the second’s retry' })
  })

  test('a paced endpoint gets its slots, and an ordered one its turns, while others have a backlog', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t, { WORKER_CONCURRENCY: '8' })
    const make = async (name: string) => {
      watchInFlight(receiver, `/${name}`, 200, { delayMs: 20 })
      return (await tenant.createEndpoint(receiver.url(`/${name}`), { subscribed_events: [name] })).endpoint_id
    }
    // All its own: a tenant's endpoints share its turn.
    for (let n = 0; n < 8; n++) await make(`busy.${n}`)
    await sql`update waybill.endpoints set max_per_second = 10 where endpoint_id = ${await make('paced')}`
    await sql`update waybill.endpoints set ordered = true where endpoint_id = ${await make('ordered')}`
    for (let n = 0; n < 8; n++) await publishMany(sql, tenant.tenantId, 300, `busy.${n}`)
    for (const name of ['paced', 'ordered']) await publishMany(sql, tenant.tenantId, 12, name)
    await startWorker()
    for (const name of ['paced', 'ordered']) await receiver.until(12, { path: `/${name}`, timeoutMs: 60_000 })
    const others = receiver.receipts.length - 24
    assert.ok(others < 2000, `they came after ${others} of the 2,400 others`)
    await settled(sql)
    await assertBooks(sql)
  })

  test('what is held has no next attempt, when it is published and when it is replayed', async (t) => {
    const { sql, receiver, tenant } = await start(t)
    const fields = { url: receiver.url('/hook'), subscribed_events: ['*'], ordered: true }
    assert.equal((await tenant.call('POST', '/v1/endpoints', { body: fields })).status, 201)
    const [id] = (await tenant.publish()).delivery_ids
    const shown = async () => (await tenant.call('GET', `/v1/deliveries/${id}`)).body.next_attempt_at
    assert.equal(await shown(), null)
    await sql`update waybill.deliveries set status = 'delivered', held = false, next_attempt_at = null`
    await sql`update waybill.endpoint_stats set pending = 0, held = 0, delivered = 1`
    const { status, body } = await tenant.call('POST', `/v1/deliveries/${id}/replay`)
    assert.deepEqual([status, body.status, body.next_attempt_at], [202, 'pending', null])
  })

  test('slots that have passed are not made up for', async (t) => {
    const { sql, receiver, tenant, claim } = await start(t)
    const fields = { url: receiver.url('/hook'), subscribed_events: ['*'], max_per_second: 10 }
    const { endpoint_id } = (await tenant.call('POST', '/v1/endpoints', { body: fields })).body
    await publishMany(sql, tenant.tenantId, 5)
    const release = () => sql`
      select released from waybill.release_held(array[${tenant.tenantId}], array[${endpoint_id}]::uuid[], array[0], array[50], interval '25 seconds')`
    assert.deepEqual([...(await release())], [{ released: 5 }])
    // As if no worker had run for a while.
    await sql`
      update pgboss.job set data = jsonb_set(data, '{slot}', to_jsonb((data ->> 'slot')::float8 - 3000)) where name = 'deliveries'`
    const { send, unsendable } = await claim({ kind: 'first', thorough: true, max: 100 })
    assert.deepEqual([send.length, unsendable.length], [0, 5])
  })

  test('a probe is claimed as a retry, though its delivery was never attempted', async (t) => {
    const { sql, tenant, claim } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/failing', { subscribed_events: ['a'] })
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, failure_streak, breaker, breaker_since, next_probe_at)
      values (${tenant.tenantId}, ${endpoint_id}, 10, 'open', now(), now())`
    const [probe] = (await tenant.publish('a')).delivery_ids
    await tenant.createEndpoint('http://127.0.0.1:9/hook', { subscribed_events: ['b'] })
    for (let n = 0; n < 5; n++) await tenant.publish('b')
    await sql`
      select released from waybill.release_held(array[${tenant.tenantId}], array[${endpoint_id}]::uuid[], array[0], array[1], interval '25 seconds')`
    const claimed = async (kind: 'first' | 'retry') =>
      (await claim({ kind, thorough: true, max: 10 })).send.map(({ deliveryId, standing }) => ({
        deliveryId,
        standing,
      }))
    assert.deepEqual(await claimed('retry'), [{ deliveryId: probe, standing: 'failing' }])
    const others = await claimed('first')
    assert.deepEqual([others.length, new Set(others.map(({ standing }) => standing))], [5, new Set(['unsure'])])
  })

  test('what is queued for an endpoint that is ordered since a moment ago does not pass what is held', async (t) => {
    const { sql, receiver, tenant, claim } = await start(t)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    for (let n = 0; n < 2; n++) await tenant.publish()
    const { send: first } = await claim({ kind: 'first', thorough: true, max: 1 })
    await sql`
      select waybill.hold_claims(array[${tenant.tenantId}], array[${first[0]!.deliveryId}]::uuid[], array[${endpoint_id}]::uuid[], array[null]::uuid[], array[0], true)`
    assert.equal((await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered: true } })).status, 200)
    const { send, unsendable } = await claim({ kind: 'first', thorough: true, max: 10 })
    assert.deepEqual([send.length, unsendable.length], [0, 1])
  })

  test('a dead letter lets its successors go', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t, { RETRY_LIMIT: '1' })
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.endpoints set ordered = true where endpoint_id = ${endpoint_id}`
    const published: string[] = []
    watchInFlight(receiver, '/hook', (receipt) => (eventOf(receipt) === published[1] ? 500 : 200))
    for (let n = 0; n < 4; n++) published.push((await tenant.publish()).event_id)
    await startWorker()
    await settled(sql)
    const [a, b, c, d] = published
    assert.deepEqual(receiver.receipts.map(eventOf), [a, b, b, c, d])
    await assertBooks(sql)
  })

  test('fresh events pass a storm of due retries, and a retry gets through a flood of fresh events', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t, {
      WORKER_CONCURRENCY: '8',
      ENDPOINT_CONCURRENCY: '8',
      BREAKER_FAILURES: '1000000',
      RETRY_LIMIT: '100',
    })
    await tenant.createEndpoint(receiver.url('/storm'), { subscribed_events: ['storm'] })
    await tenant.createEndpoint(receiver.url('/fresh'), { subscribed_events: ['fresh'] })
    await tenant.createEndpoint(receiver.url('/flood'), { subscribed_events: ['flood'] })
    await tenant.createEndpoint(receiver.url('/once'), { subscribed_events: ['once'] })
    receiver.script('/storm', 500)
    await startWorker()
    await publishMany(sql, tenant.tenantId, 400, 'storm')
    await receiver.until(400, { path: '/storm', timeoutMs: 30_000 })
    watchInFlight(receiver, '/storm', 500, { delayMs: 50 })
    await receiver.until(450, { path: '/storm' })
    for (let n = 1; n <= 10; n++) {
      const before = receiver.at('/storm').length
      await tenant.publish('fresh')
      await receiver.until(n, { path: '/fresh' })
      const others = receiver.at('/storm').length - before
      // Behind the retries it would come after all that are due, some 400.
      assert.ok(others < 200, `a fresh event came after ${others} retries`)
    }
    receiver.script('/storm', 200)
    await settled(sql)

    watchInFlight(receiver, '/flood', 200, { delayMs: 20 })
    receiver.script('/once', 500, 200)
    await tenant.publish('once')
    await receiver.until(1, { path: '/once' })
    await publishMany(sql, tenant.tenantId, 3000, 'flood')
    await receiver.until(2, { path: '/once' })
    assert.ok(receiver.at('/flood').length < 2900, `the retry came after ${receiver.at('/flood').length} of the flood`)
    await settled(sql)
    await assertBooks(sql)
  })

  test('ordered endpoints that wait for a retry do not have others wait to be released', async (t) => {
    const { sql, deliver, alone } = await startOrdered(t)
    await sql`
      with waiting as (
        insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret, ordered)
        select tenant_id, gen_random_uuid(), url, array['other'], signing_secret, true from waybill.endpoints, generate_series(1, 3000)
        returning tenant_id, endpoint_id
      )
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, retrying, pending, held) select tenant_id, endpoint_id, 1, 1, 1 from waiting`
    const beside = await deliver(30)
    // Where they are looked at as well, five looks of six have no place for this one: twenty times as long.
    assert.ok(beside < 5 * Math.max(alone, 1000), `${alone} ms alone, ${beside} ms beside them`)
  })

  test('endpoints for which there is no room do not have those of other tenants wait to be released', async (t) => {
    const { sql, receiver, deliver, alone } = await startOrdered(t)
    await addHanging(sql, receiver, { tenants: 30 })
    await receiver.until(40, { path: '/hangs', timeoutMs: 60_000 })
    const beside = await deliver(30)
    // Where chance alone decides which are looked at, it is seventy times as long.
    assert.ok(beside < 8 * Math.max(alone, 1000), `${alone} ms alone, ${beside} ms beside them`)
  })

  test('first attempts and retries find room beside endpoints of a thousand tenants that hang', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    await tenant.createEndpoint(receiver.url('/hook'))
    await startWorker()
    await addHanging(sql, receiver, { tenants: 1000 })
    await receiver.until(50, { path: '/hangs' })
    receiver.script('/hook', 500, 500, 200)
    for (let n = 0; n < 5; n++) await tenant.publish()
    // A probe that hangs does so for a minute. Whoever had to wait for all would wait for hours.
    await receiver.until(7, { path: '/hook', timeoutMs: 30_000 })
    const hanging = receiver.at('/hangs').length
    // Where the machine is slow, some come late.
    assert.ok(hanging >= 50 && hanging <= 75, `${hanging}, and not a quarter of the slots or half as many more`)
  })

  test('what is held comes out of a database that takes long to release it', async (t) => {
    const { sql, receiver, startWorker, tenant, addTenant } = await start(t)
    // A tenant alone gets at most half of the slots.
    const tenants = [tenant, await addTenant(), await addTenant(), await addTenant()]
    for (const one of tenants) for (let nth = 0; nth < 50; nth++) await one.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.endpoints set ordered = true`
    for (const one of tenants) await publishMany(sql, one.tenantId, 1)
    // Five seconds for all at once, where a statement may take three.
    await sql.text(`
      create function slow() returns trigger language plpgsql as $$ begin
        if old.held and not new.held then perform pg_sleep(0.03); end if;
        return new;
      end $$;
      create trigger slow before update on waybill.deliveries for each row execute function slow()`)
    await startWorker()
    await receiver.until(200, { timeoutMs: 60_000 })
    await settled(sql)
    await assertBooks(sql)
  })

  test('what was held by mistake is found and sent', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    await tenant.createEndpoint(receiver.url('/hook'))
    for (let n = 0; n < 3; n++) await tenant.publish()
    // As a publish leaves it that saw others being held, when the last of these goes.
    await sql`delete from pgboss.job where name = 'deliveries'`
    await sql`update waybill.deliveries set held = true`
    await sql`update waybill.endpoint_stats set held = 3`
    await startWorker()
    await receiver.until(3)
    await settled(sql)
    await assertBooks(sql)
  })

  test('what is published while a line is emptied does not make a new one', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'))
    for (let n = 0; n < 3; n++) await tenant.publish()
    await sql`delete from pgboss.job where name = 'deliveries'`
    await sql`update waybill.deliveries set held = true`
    await sql`update waybill.endpoint_stats set held = 3`
    let publishing: Promise<unknown> | undefined
    await sql.begin(async (release) => {
      await release`
        select from waybill.release_held(array[${tenant.tenantId}], array[${id}]::uuid[], array[0], array[50], interval '25 seconds')`
      publishing = tenant.publish()
      await waitFor(() => waitingForLocks(sql))
    })
    await publishing
    const [waiting] = await sql`
      select count(*)::int as deliveries, count(*) filter (where held)::int as held from waybill.deliveries where status = 'pending'`
    assert.deepEqual({ ...waiting }, { deliveries: 4, held: 0 })
    await startWorker()
    await receiver.until(4)
    await settled(sql)
    await assertBooks(sql)
  })

  test('the queue clock is set back before it runs out, and order is kept', async (t) => {
    const { sql, receiver, startWorker, tenant } = await start(t)
    await tenant.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.queue_clock set tag = 150000000`
    await publishMany(sql, tenant.tenantId, 300)
    const [done] = await sql`select waybill.rebase_queue() as done`
    assert.equal(done!.done, true)
    const [range] = await sql`
      select min(priority) as lowest, max(priority) as highest, max((data ->> 'tag')::float8) as tag from pgboss.job where name = 'deliveries'`
    assert.deepEqual({ ...range }, { lowest: -4, highest: 0, tag: 300 / 64 })
    const [stats] = await sql`select tag from waybill.endpoint_stats`
    assert.equal(stats!.tag, 300 / 64)
    await startWorker()
    await waitFor(() => receiver.receipts.length === 300)
    await settled(sql)
    const [again] = await sql`select waybill.rebase_queue() as done`
    assert.equal(again!.done, false)
  })

  test('what is published while the queue clock is set back is not left behind', async (t) => {
    const { sql, receiver, tenant } = await start(t)
    const { endpoint_id: early } = await tenant.createEndpoint(receiver.url('/early'))
    await sql`update waybill.queue_clock set tag = 150000000`
    let publishing: Promise<unknown> | undefined
    await sql.begin(async (rebasing) => {
      await rebasing`select waybill.rebase_queue()`
      publishing = publishMany(sql, tenant.tenantId, 3)
      await waitFor(async () => (await waitingForLocks(sql)) === 1)
    })
    await publishing
    const places = () => sql`
      select (select min(priority) from pgboss.job where name = 'deliveries') as job,
        (select floor(tag)::int from waybill.endpoint_stats where endpoint_id = ${early}) as endpoint`
    assert.deepEqual({ ...(await places())[0] }, { job: -150000000, endpoint: 150000000 })
    assert.equal((await sql`select waybill.gather_strays() as found`)[0]!.found, 2)
    assert.deepEqual({ ...(await places())[0] }, { job: 0, endpoint: 0 })
    assert.equal((await sql`select waybill.gather_strays() as found`)[0]!.found, 0)
  })

  test('setting the queue clock back and a claim that takes a bundle apart do not wait for each other', async (t) => {
    const { sql, receiver, tenant } = await start(t)
    await tenant.createEndpoint(receiver.url('/hook'))
    await publishMany(sql, tenant.tenantId, 16)
    await sql`update waybill.queue_clock set tag = 2`
    await sql.begin(async (claiming) => {
      const [job] = await claiming<
        { id: string; data: { ids: string[] } }[]
      >`select id, data from waybill.fetch_due(-1399999999, 2147483647, 1)`
      const [rebased] = await sql.begin(async (rebasing) => {
        await rebasing`set local statement_timeout = '10s'`
        return await rebasing`select waybill.rebase_queue(0, 0) as done`
      })
      assert.equal(rebased?.done, true)
      await claiming`
        select waybill.unbundle(array[${tenant.tenantId}]::text[], array[${job!.id}]::uuid[], array[${job!.data.ids[0]!}]::uuid[], false)`
    })
  })

  test('setting the queue clock back waits for nobody, and nobody long for it', async (t) => {
    const { sql, receiver, tenant } = await start(t)
    await tenant.createEndpoint(receiver.url('/hook'))
    await sql`update waybill.queue_clock set tag = 150000000`
    const rebase = async () => (await sql`select waybill.rebase_queue() as done`)[0]!.done
    await sql.begin(async (publisher) => {
      await publisher`lock table only waybill.deliveries in row exclusive mode`
      const [done] = await Promise.all([rebase(), tenant.publish()])
      assert.equal(done, false)
    })
    // As making an index of a day does, or an analysis.
    await sql.begin(async (indexer) => {
      await indexer`lock table waybill.events_default, waybill.deliveries_default in share update exclusive mode`
      assert.equal(await rebase(), true)
    })
  })
})

test('max_per_second lets none go before its moment', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, tenant } = await startTenant(t)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url())
  assert.equal(
    (await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { max_per_second: 20 } })).status,
    200,
  )
  await publishMany(sql, tenant.tenantId, 61)
  await settled(sql)
  // Later than its moment each may be.
  const [row] = await sql`
    select extract(epoch from max(started_at) - min(waybill.made_at(delivery_id)))::float8 as seconds from waybill.attempts`
  assert.ok(row!.seconds > 2.9, `the last of 61 went after ${row!.seconds} s`)
})
