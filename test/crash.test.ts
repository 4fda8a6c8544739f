import assert from 'node:assert/strict'
import { connect, type Socket } from 'node:net'
import { suite, type TestContext, test } from 'node:test'
import { cleanUp } from './support/cleanup.ts'
import { lock, waitingFor } from './support/database.ts'
import { assertBooks, settled } from './support/deliveries.ts'
import { gate, type Reply, startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, startService, startTenant } from './support/service.ts'
import { listenTcp } from './support/tcp.ts'
import { waitFor } from './support/wait.ts'

type Attempt = { attempt_number: number; status_code: number | null; error: string | null; retry_state: string }

/** An API, a receiver and a tenant; workers come and go as the test says. */
async function start(t: TestContext, env: Record<string, string> = {}) {
  const receiver = await startReceiver(t)
  const { service: api, tenant, ...database } = await startTenant(t, { mode: 'api', env })
  const startWorker = () => startService(t, { databaseUrl: database.databaseUrl, mode: 'worker', env })
  await tenant.createEndpoint(receiver.url('/hook'))
  const deliveryOf = async (id: string) => (await tenant.call('GET', `/v1/deliveries/${id}`)).body
  const attemptsOf = async (id: string) => {
    const rows: Attempt[] = (await tenant.call('GET', `/v1/deliveries/${id}/attempts`)).body.data
    return rows.map((row) => [row.attempt_number, row.status_code, row.error, row.retry_state])
  }
  const becomes = (id: string, status: string) =>
    waitFor(
      async () => {
        const delivery = await deliveryOf(id)
        return delivery.status === status && delivery
      },
      { timeoutMs: 60_000, what: `the delivery to be ${status}` },
    )
  return { env, database, receiver, api, startWorker, tenant, deliveryOf, attemptsOf, becomes }
}

/**
 * Handing back has a second. On a machine that is too slow for that the claims lapse instead, which is as well, but not what is
 * tested: it is tried up to three times.
 */
async function handedBack<World extends Awaited<ReturnType<typeof start>>>(
  stopOne: () => Promise<World>,
): Promise<World> {
  for (let tries = 1; ; tries++) {
    const world = await stopOne()
    const claimed = await world.database.sql`select from pgboss.job where name = 'deliveries' and state = 'active'`
    if (claimed.length === 0) return world
    assert.ok(tries < 3, `${claimed.length} claims were not handed back`)
  }
}

/** Most of these tests are waiting for a claim to lapse, so they wait together. */
suite('crashes and shutdowns', { concurrency: 4 }, () => {
  for (const failures of [0, 2]) {
    test(`a delivery whose worker was killed after ${failures} failed attempts is soon sent again by another`, async (t) => {
      const { receiver, startWorker, tenant, attemptsOf, becomes } = await start(t, {
        RETRY_DELAY_SECONDS: failures === 0 ? '60' : '1',
      })
      const hang = gate().reply
      const replies: [Reply, ...Reply[]] = failures === 0 ? [hang, 200] : [500, 500, hang, 200]
      receiver.script('/hook', ...replies)
      const doomed = await startWorker()
      const { delivery_ids } = await tenant.publish()
      await receiver.until(failures + 1)
      await startWorker()
      await doomed.kill()
      // It takes some 10 seconds. By pg-boss's own heartbeat it would be 60.
      const receipts = await receiver.until(failures + 2, { timeoutMs: 30_000 })
      const [lost, again] = receipts.slice(-2)
      assert.deepEqual(again!.body, lost!.body)
      assert.equal(again!.headers['service-delivery-id'], lost!.headers['service-delivery-id'])
      const { attempt_count } = await becomes(delivery_ids[0]!, 'delivered')
      assert.equal(attempt_count, failures + 2)
      assert.deepEqual((await attemptsOf(delivery_ids[0]!)).slice(-2), [
        [failures + 1, null, 'worker_lost', 'will_retry'],
        [failures + 2, 200, null, 'succeeded'],
      ])
    })
  }

  test('a worker that is lost in an attempt is no failure of the endpoint', async (t) => {
    const { database, receiver, startWorker, tenant, attemptsOf } = await start(t, {
      RETRY_DELAY_SECONDS: '1',
      RETRY_LIMIT: '2',
    })
    receiver.script('/hook', 500, gate().reply, 500)
    const doomed = await startWorker()
    const id = (await tenant.publish()).delivery_ids[0]!
    await receiver.until(2)
    await startWorker()
    await doomed.kill()
    await waitFor(async () => (await attemptsOf(id)).length === 3, { timeoutMs: 30_000, what: 'three attempts' })
    const [standing] = await database.sql`select failure_streak from waybill.endpoint_stats`
    assert.equal(standing?.failure_streak, 2)
  })

  test('a delivery that ends every worker that attempts it is dead-lettered, and the others get through', async (t) => {
    const env = { RETRY_LIMIT: '1', ATTEMPT_TIMEOUT_SECONDS: '60' }
    const { receiver, startWorker, tenant, attemptsOf, becomes } = await start(t, env)
    await tenant.createEndpoint(receiver.url('/fatal'), { subscribed_events: ['fatal'] })
    const [everything] = (await tenant.call('GET', '/v1/endpoints')).body.data.filter(
      ({ url }: { url: string }) => url === receiver.url('/hook'),
    )
    await tenant.call('PATCH', `/v1/endpoints/${everything.endpoint_id}`, { body: { subscribed_events: ['harmless'] } })
    let worker: Awaited<ReturnType<typeof startWorker>>
    let mayKill = Promise.resolve()
    receiver.script('/fatal', async () => {
      await mayKill
      await worker.kill()
      return 200
    })
    worker = await startWorker()
    const id = (await tenant.publish('fatal')).delivery_ids[0]!
    for (const times of [1, 2]) {
      await receiver.until(times, { path: '/fatal', timeoutMs: 30_000 })
      await worker.exited
      const harmlessIsDelivered = Promise.withResolvers<void>()
      mayKill = harmlessIsDelivered.promise
      worker = await startWorker()
      const harmless = await tenant.publish('harmless')
      await becomes(harmless.delivery_ids[0]!, 'delivered')
      harmlessIsDelivered.resolve()
    }
    const dead = await becomes(id, 'dead_lettered')
    assert.deepEqual([dead.dead_letter_reason, dead.attempt_count], ['worker_lost', 2])
    assert.deepEqual(await attemptsOf(id), [
      [1, null, 'worker_lost', 'will_retry'],
      [2, null, 'worker_lost', 'exhausted'],
    ])
    assert.equal(receiver.at('/fatal').length, 2)
  })

  test('a delivery whose worker was killed in the last attempt is dead-lettered, and can be replayed', async (t) => {
    const { receiver, startWorker, tenant, attemptsOf, becomes } = await start(t, { RETRY_LIMIT: '0' })
    receiver.script('/hook', gate().reply, 200)
    const doomed = await startWorker()
    const { delivery_ids } = await tenant.publish()
    const id = delivery_ids[0]!
    await receiver.until(1)
    await doomed.kill()
    await startWorker()
    const dead = await becomes(id, 'dead_lettered')
    assert.equal(dead.dead_letter_reason, 'worker_lost')
    assert.deepEqual(await attemptsOf(id), [[1, null, 'worker_lost', 'exhausted']])
    const health = (await tenant.call('GET', `/v1/endpoints/${dead.endpoint_id}/health`)).body
    assert.deepEqual([health.attempts, health.recent_status_codes], [1, [null]])
    assert.notEqual(health.last_failure_at, null)
    const [listed] = (await tenant.call('GET', '/v1/dlq')).body.data
    assert.equal(listed.delivery_id, id)
    await tenant.call('POST', `/v1/deliveries/${id}/replay`)
    await becomes(id, 'delivered')
    assert.deepEqual((await attemptsOf(id)).at(-1), [2, 200, null, 'succeeded'])
  })

  test('a worker that slept while another took its delivery over changes nothing when it wakes', async (t) => {
    const { receiver, startWorker, tenant, deliveryOf, attemptsOf, becomes } = await start(t, {
      RETRY_DELAY_SECONDS: '1',
      ATTEMPT_TIMEOUT_SECONDS: '60',
    })
    const [stale, fresh] = [gate(410), gate(200)]
    receiver.script('/hook', stale.reply, fresh.reply)
    const zombie = await startWorker()
    const { delivery_ids } = await tenant.publish()
    const id = delivery_ids[0]!
    await receiver.until(1)
    zombie.signal('SIGSTOP')
    await startWorker()
    await receiver.until(2, { timeoutMs: 45_000 })

    // It wakes while the other's attempt is under way, with an answer that would end the delivery and the endpoint.
    stale.open()
    zombie.signal('SIGCONT')
    const line = await zombie.logged('delivery.attempted')
    assert.deepEqual([line.status_code, line.settled], [410, false])
    assert.equal((await deliveryOf(id)).status, 'pending')
    assert.deepEqual(await attemptsOf(id), [])

    fresh.open()
    await becomes(id, 'delivered')
    assert.deepEqual(await attemptsOf(id), [
      [1, null, 'worker_lost', 'will_retry'],
      [2, 200, null, 'succeeded'],
    ])
    const [endpoint] = (await tenant.call('GET', '/v1/endpoints')).body.data
    assert.equal(endpoint.is_active, true)
    assert.equal(receiver.receipts.length, 2)
  })

  test('a worker that slept does not send what others have delivered meanwhile', async (t) => {
    const { receiver, startWorker, tenant, becomes } = await start(t, { ATTEMPT_TIMEOUT_SECONDS: '60' })
    await tenant.createEndpoint(receiver.url('/paced'), { subscribed_events: ['paced'], max_per_second: 5 })
    const asked = gate(200)
    receiver.script('/hook', asked.reply, 200)
    const events = await Promise.all(Array.from({ length: 10 }, () => tenant.publish('paced')))
    const zombie = await startWorker()
    // Where it is stopped in the moment between its last look at the time and sending, it sends: so while it sends nothing.
    await Promise.all([receiver.until(10, { path: '/hook' }), receiver.until(1, { path: '/paced' })])
    // It has claimed others too, which wait in it for their time.
    zombie.signal('SIGSTOP')
    await startWorker()
    for (const id of events.flatMap(({ delivery_ids }) => delivery_ids)) await becomes(id, 'delivered')

    const before = receiver.receipts.length
    asked.open()
    zombie.signal('SIGCONT')
    await waitFor(() => zombie.logs.some(({ settled }) => settled === false), { what: 'it to have woken' })
    assert.deepEqual(await zombie.stop(), { code: 0, signal: null })
    assert.equal(receiver.receipts.length, before)
  })

  test('SIGTERM lets 50 attempts in flight finish, takes no new ones, and exits 0', async (t) => {
    const { receiver, startWorker, tenant, deliveryOf, attemptsOf } = await start(t)
    const { reply, open } = gate(200)
    receiver.script('/hook', reply)
    const worker = await startWorker()
    const inFlight = await Promise.all(Array.from({ length: 50 }, () => tenant.publish()))
    await receiver.until(50)
    worker.signal('SIGTERM')
    await worker.logged('service.stopping')
    const late = await tenant.publish()
    open()
    assert.deepEqual(await worker.exited, { code: 0, signal: null })
    for (const { delivery_ids } of inFlight) {
      assert.equal((await deliveryOf(delivery_ids[0]!)).status, 'delivered')
      assert.deepEqual(await attemptsOf(delivery_ids[0]!), [[1, 200, null, 'succeeded']])
    }
    assert.equal((await deliveryOf(late.delivery_ids[0]!)).status, 'pending')
    assert.equal(receiver.receipts.length, 50)
  })

  test('a second SIGTERM hands back what is in flight and ends the worker at once, with 1', async (t) => {
    const { inFlight, startWorker, attemptsOf, becomes } = await handedBack(async () => {
      const world = await start(t, {
        SHUTDOWN_GRACE_SECONDS: '60',
        ATTEMPT_TIMEOUT_SECONDS: '120',
        RETRY_LIMIT: '0',
      })
      const hang = gate().reply
      world.receiver.script('/hook', hang, hang, hang, hang, hang, 200)
      const worker = await world.startWorker()
      const inFlight = await Promise.all(Array.from({ length: 5 }, () => world.tenant.publish()))
      await world.receiver.until(5)
      worker.signal('SIGTERM')
      await worker.logged('service.stopping')
      const hurried = Date.now()
      worker.signal('SIGTERM')
      assert.deepEqual(await worker.exited, { code: 1, signal: null })
      assert.ok(Date.now() - hurried < 30_000, `it took ${Date.now() - hurried} ms`)
      return { ...world, inFlight }
    })
    await startWorker()
    for (const { delivery_ids } of inFlight) {
      await becomes(delivery_ids[0]!, 'delivered')
      assert.deepEqual(await attemptsOf(delivery_ids[0]!), [[1, 200, null, 'succeeded']])
    }
  })

  test('hundreds of attempts are handed back in time, although the database is far away', async (t) => {
    await handedBack(async () => {
      const world = await start(t, {
        SHUTDOWN_GRACE_SECONDS: '1',
        WORKER_CONCURRENCY: '1000',
        ENDPOINT_CONCURRENCY: '1000',
      })
      world.receiver.script('/hook', gate().reply)
      const near = new URL(world.database.databaseUrl)
      const late = (from: Socket, to: Socket) =>
        from.on('data', (bytes) => setTimeout(() => to.writable && to.write(bytes), 20)).on('close', () => to.destroy())
      const far = await listenTcp((client) => {
        const database = connect(Number(near.port), near.hostname)
        database.on('error', () => client.destroy())
        late(client, database)
        late(database, client)
      })
      cleanUp(t, far.close)
      const databaseUrl = Object.assign(new URL(near), { port: far.port }).href
      const worker = await startService(t, { databaseUrl, mode: 'worker', env: world.env })
      await Promise.all(Array.from({ length: 250 }, () => world.tenant.publish()))
      await world.receiver.until(250, { timeoutMs: 30_000 })
      assert.deepEqual(await worker.stop(), { code: 0, signal: null })
      return world
    })
  })

  test('an attempt that is waited for after SIGTERM stays in the hands of its worker', async (t) => {
    const { database, receiver, startWorker, tenant, attemptsOf } = await start(t, { SHUTDOWN_GRACE_SECONDS: '120' })
    const { reply, open } = gate(200)
    receiver.script('/hook', reply)
    const worker = await startWorker()
    const { delivery_ids } = await tenant.publish()
    await receiver.until(1)
    worker.signal('SIGTERM')
    await worker.logged('service.stopping')
    const touched = async () =>
      (await database.sql`select heartbeat_on as at from pgboss.job where name = 'deliveries'`)[0]!.at
    for (let times = 0, last = await touched(); times < 2; times++)
      last = await waitFor(async () => Number(await touched()) > Number(last) && touched(), {
        what: 'its claim to be touched',
      })
    open()
    assert.deepEqual(await worker.exited, { code: 0, signal: null })
    assert.deepEqual(await attemptsOf(delivery_ids[0]!), [[1, 200, null, 'succeeded']])
  })

  test('what waits for a slot of its endpoint at SIGTERM is handed back', async (t) => {
    const { database, receiver, startWorker, tenant } = await start(t, { ENDPOINT_CONCURRENCY: '1' })
    const { reply, open } = gate(200)
    receiver.script('/hook', 200, ...Array<Reply>(39).fill(200), reply)
    for (let n = 0; n < 100; n++) await tenant.publish()
    const read = async () => {
      const [row] = await database.sql`
        select count(*) filter (where status = 'delivered')::int as delivered,
          (select count(*)::int from pgboss.job where name = 'deliveries' and state = 'active') as claimed from waybill.deliveries`
      return { ...row } as { delivered: number; claimed: number }
    }
    const worker = await startWorker()
    // Others wait behind the last one, for about a second.
    const wait = async () => {
      const { delivered, claimed } = await read()
      return delivered === 40 && claimed > 1
    }
    await waitFor(wait, { intervalMs: 5, what: 'some to wait' })
    worker.signal('SIGTERM')
    await worker.logged('service.stopping')
    await waitFor(async () => (await read()).claimed === 1, { what: 'these to be handed back' })
    open()
    assert.deepEqual(await worker.exited, { code: 0, signal: null })
  })

  test('an attempt that outlasts the grace is handed back, told of in the log, and costs nothing', async (t) => {
    const { id, database, startWorker, deliveryOf, attemptsOf, becomes } = await handedBack(async () => {
      const world = await start(t, {
        SHUTDOWN_GRACE_SECONDS: '1',
        ATTEMPT_TIMEOUT_SECONDS: '60',
        RETRY_LIMIT: '0',
      })
      world.receiver.script('/hook', gate().reply, 200)
      const worker = await world.startWorker()
      const { delivery_ids } = await world.tenant.publish()
      await world.receiver.until(1)
      assert.deepEqual(await worker.stop('SIGTERM'), { code: 0, signal: null })
      const told = worker.logs.filter(({ msg }) => msg === 'delivery.interrupted')
      assert.deepEqual(
        told.map((line) => [line.tenant_id, line.delivery_id]),
        [[world.tenant.tenantId, delivery_ids[0]]],
      )
      return { ...world, id: delivery_ids[0]! }
    })
    const waiting = await deliveryOf(id)
    assert.deepEqual([waiting.status, waiting.attempt_count], ['pending', 0])

    await startWorker()
    await becomes(id, 'delivered')
    assert.deepEqual(await attemptsOf(id), [[1, 200, null, 'succeeded']])
    const [usage] = await database.sql`select count::int from waybill.usage where metric = 'attempts'`
    assert.equal(usage?.count, 1, 'the interrupted attempt is not billed')
  })

  test('SIGTERM lets requests finish and turns new ones away', async (t) => {
    const { database, api, tenant } = await start(t, { SHUTDOWN_GRACE_SECONDS: '120' })
    const unlock = await lock(database.sql, 'waybill.idempotency_keys in share mode')
    // They have no deadline, however slow the machine is.
    const run = () => api.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
    const answers = Promise.all([run(), run()])
    const areWaiting = async () => (await waitingFor(database.sql, 'waybill.idempotency_keys')) === 2
    await waitFor(areWaiting, { what: 'both requests to be under way' })
    api.signal('SIGTERM')
    await api.logged('service.stopping')
    await assert.rejects(tenant.publish())
    await unlock()
    for (const answer of await answers) assert.equal(answer.status, 200)
    assert.deepEqual(await api.exited, { code: 0, signal: null })
  })

  test('what an API had accepted before it was killed is stored whole, and repeating the rest is safe', async (t) => {
    const { database, api, tenant, receiver, startWorker } = await start(t)
    const keys = Array.from({ length: 200 }, (_, n) => `key-${n}`)
    const accepted = new Map<string, string>()
    const publish = async (key: string) => {
      const { event_id } = await tenant.publish('a.b', { key }, key)
      accepted.set(key, event_id)
    }
    await Promise.all(keys.slice(0, 50).map(publish))
    // The rest is cut off: some in the database, which stores it although nobody hears of it, and some before.
    const unlock = await lock(database.sql, 'waybill.events in share mode')
    const cutOff = Promise.allSettled(keys.slice(50).map(publish))
    await waitFor(async () => (await waitingFor(database.sql, 'waybill.events')) > 0, {
      what: 'some to be in the database',
    })
    await api.kill()
    await unlock()
    await cutOff
    assert.equal(accepted.size, 50)

    const again = await startService(t, { databaseUrl: database.databaseUrl, mode: 'api' })
    for (const key of keys) {
      const reply = await again.call('POST', '/v1/events', {
        key: tenant.key,
        body: { event_type: 'a.b', payload: { key } },
        headers: { 'idempotency-key': key },
      })
      assert.ok(reply.status === 200 || reply.status === 202)
      if (accepted.has(key)) assert.equal(reply.body.event_id, accepted.get(key))
      assert.equal(reply.body.delivery_ids.length, 1)
    }
    await startWorker()
    await receiver.until(keys.length, { timeoutMs: 30_000 })
    const unfinished = () => database.sql`select from waybill.deliveries where status <> 'delivered' limit 1`
    await waitFor(async () => (await unfinished()).length === 0)
    const ids = receiver.receipts.map(({ headers }) => headers['webhook-id'])
    assert.equal(ids.length, keys.length)
    assert.equal(new Set(ids).size, keys.length)
  })
})

test('a replay that loses its worker and has no retry left is dead-lettered, counted and told of', async (t) => {
  const receiver = await startReceiver(t)
  const env = { RETRY_LIMIT: '0' }
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api', env })
  receiver.script('/hook', 200, gate().reply)
  await tenant.createEndpoint(receiver.url('/hook'), { subscribed_events: ['a'] })
  await tenant.createEndpoint(receiver.url('/told'), { subscribed_events: ['delivery.dead_lettered'] })
  const doomed = await startService(t, { databaseUrl, mode: 'worker', env })
  const id = (await tenant.publish('a')).delivery_ids[0]!
  await settled(sql)
  await tenant.call('POST', `/v1/deliveries/${id}/replay`)
  await receiver.until(2, { path: '/hook' })
  await doomed.kill()
  const worker = await startService(t, { databaseUrl, mode: 'worker', env })
  await worker.logged('delivery.worker_lost')
  const [told] = await receiver.until(1, { path: '/told', timeoutMs: 30_000 })
  assert.equal(JSON.parse(String(told!.body)).data.dead_letter_reason, 'worker_lost')
  const { data } = (await tenant.call('GET', `/v1/deliveries/${id}/attempts`)).body
  assert.deepEqual(
    data.map((row: { status_code: number; error: string; retry_state: string }) => [
      row.status_code,
      row.error,
      row.retry_state,
    ]),
    [
      [200, null, 'succeeded'],
      [null, 'worker_lost', 'exhausted'],
    ],
  )
  await settled(sql)
  const { body } = await tenant.call('GET', '/v1/metrics/summary')
  assert.deepEqual(body.attempts_by_status_code, { 200: 2, none: 1 })
  await assertBooks(sql)
})
