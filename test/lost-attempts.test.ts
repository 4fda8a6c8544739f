import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createClaim } from '../src/flow/claim-due.ts'
import { unbundle } from '../src/flow/give-back.ts'
import { createInHand } from '../src/flow/in-hand.ts'
import { createLog } from '../src/log.ts'
import { createDatabase, lock, waitingFor, waitingForLocks } from './support/database.ts'
import { assertBooks, settled } from './support/deliveries.ts'
import { startFailing } from './support/queue.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

test('an attempt that a lost worker was making is shown, also while its delivery is held', {
  timeout: 120_000,
}, async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const api = await startService(t, { databaseUrl, mode: 'api' })
  const worker = await startService(t, { databaseUrl, mode: 'worker' })
  const receiver = await startReceiver(t)
  const tenant = await createTenant(api)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/a'))
  receiver.script('/a', () => new Promise(() => {}), 200)
  const [id] = (await tenant.publish()).delivery_ids
  await receiver.until(1)
  assert.equal((await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { is_active: false } })).status, 200)
  await worker.kill()
  await startService(t, { databaseUrl, mode: 'worker' })
  await waitFor(async () => (await sql`select from waybill.deliveries where held`).length === 1, {
    timeoutMs: 60_000,
    what: 'it to be held',
  })
  const get = async (path: string) => (await tenant.call('GET', path)).body
  const delivery = await get(`/v1/deliveries/${id}`)
  const { data: attempts } = await get(`/v1/deliveries/${id}/attempts`)
  const usage = await get('/v1/usage/current')
  const metrics = await get('/v1/metrics/summary')
  const health = await get(`/v1/endpoints/${endpoint_id}/health`)
  assert.equal(attempts.length, 1)
  assert.deepEqual([attempts[0].error, attempts[0].retry_state], ['worker_lost', 'will_retry'])
  assert.deepEqual(
    [delivery.status, delivery.attempt_count, delivery.last_error, delivery.next_attempt_at],
    ['retrying', 1, 'worker_lost', null],
  )
  assert.deepEqual(
    [metrics.attempts_by_status_code, health.attempts, health.held_count, usage.attempts_count],
    [{ none: 1 }, 1, 1, 1],
  )
  await assertBooks(sql)
  await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { is_active: true } })
  await settled(sql)
  const { data } = await get(`/v1/deliveries/${id}/attempts`)
  assert.deepEqual(
    data.map((made: { attempt_number: number; error: string | null }) => [made.attempt_number, made.error]),
    [
      [1, 'worker_lost'],
      [2, null],
    ],
  )
  await assertBooks(sql)
})

test('a delivery that is held between losses of its worker is known for what it does to workers', {
  timeout: 120_000,
}, async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  const [id] = (await tenant.publish()).delivery_ids
  const claim = createClaim(sql, 1000)
  const counted: number[] = []
  const claimAny = async () => {
    const first = await claim({ kind: 'first', thorough: true, max: 10 })
    return first.send.length + first.unsendable.length > 0
      ? first
      : await claim({ kind: 'retry', thorough: true, max: 10 })
  }
  for (let n = 0; n < 4; n++) {
    const { send } = await claimAny()
    assert.equal(send.length, 1)
    await sql`update pgboss.job set heartbeat_on = now() - interval '30 seconds' where id in (select coalesce(bundle, delivery_id) from waybill.deliveries)`
    const [taken] = await sql`select * from waybill.take_back(interval '10 seconds', 100, 100, 10, true)`
    counted.push(taken!.crashes)
    // Its endpoint takes nothing for a moment.
    await sql`update waybill.endpoints set is_active = false`
    const { unsendable } = await claimAny()
    await sql`select waybill.hold_claims(${[tenant.tenantId]}::text[], ${[id!]}::uuid[], ${[endpoint_id]}::uuid[], ${[null]}::uuid[], ${[unsendable[0]!.retryCount]}::int[], false)`
    await sql`update waybill.endpoints set is_active = true`
    const released =
      await sql`select * from waybill.release_held(${[tenant.tenantId]}::text[], ${[endpoint_id]}::uuid[], ${[0]}::int[], ${[5]}::int[], interval '1 minute')`
    assert.equal(released.length, 1)
    await assertBooks(sql)
  }
  assert.deepEqual(counted, [1, 2, 3, 4])
})

test('deliveries are held, one after a lost attempt, while another of them is replayed', async (t) => {
  const { sql, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  for (let nth = 0; nth < 2; nth++) await tenant.publish()
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 10 })
  const [lost, other] = send.map(({ deliveryId }) => deliveryId)
  await sql`update pgboss.job set retry_count = 1 where id = ${lost!}`
  let holding: Promise<unknown> | undefined
  // What a replay does: it locks the delivery, then the endpoint's counters.
  await newSession().begin(async (replay) => {
    // The other one is to give way.
    await replay`set local deadlock_timeout = '1h'`
    await replay`select from waybill.deliveries where delivery_id = ${other!} for update`
    holding = sql`
      select waybill.hold_claims(array_agg(tenant_id), array_agg(delivery_id), array_agg(endpoint_id), array[null, null]::uuid[],
        array_agg(case when delivery_id = ${lost!} then 1 else 0 end), true) from waybill.deliveries`
    await waitFor(() => waitingForLocks(newSession(), '%hold_claims%'), { what: 'the holding to wait' })
    await replay`update waybill.endpoint_stats set held = held`
  })
  await holding
  await assertBooks(sql)
})

test('claims of two endpoints are held, one after a lost attempt, while others of both are, and at the first try', async (t) => {
  const { sql, newSession, openPool, tenant } = await startTenant(t, { mode: 'api' })
  const [first, second] = [
    await tenant.createEndpoint('http://127.0.0.1:9/1'),
    await tenant.createEndpoint('http://127.0.0.1:9/2'),
  ]
  const events = [(await tenant.publish()).event_id, (await tenant.publish()).event_id]
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 10 })
  await unbundle(sql, send)
  for (const claim of send) claim.bundle = null
  const lost = send.find(({ eventId, endpointId }) => eventId === events[1] && endpointId === second.endpoint_id)!
  lost.retryCount = 1
  await sql`update pgboss.job set retry_count = 1 where id = ${lost.deliveryId}`
  const log = createLog('silent')
  const warned = t.mock.method(log, 'warn')
  const inHand = createInHand({ pool: openPool({ max: 2 }), slots: 10, closing: new AbortController().signal, log })
  const holding: Promise<void>[] = []
  await newSession().begin(async (lock) => {
    await lock`select from waybill.endpoint_stats where endpoint_id = ${first.endpoint_id} for update`
    // The second has the counters of the endpoint that lost its attempt already when it waits behind the first.
    for (const [nth, event] of events.entries()) {
      const claims = send.filter(({ eventId }) => eventId === event)
      holding.push(inHand.hold(claims, { counted: true }))
      await waitFor(async () => (await waitingForLocks(sql, '%hold_claims%')) > nth, { what: 'it to wait' })
    }
  })
  await Promise.all(holding)
  assert.deepEqual(
    warned.mock.calls.map(({ arguments: [, message] }) => message),
    [],
  )
  await assertBooks(sql)
})

test('who holds a delivery after a lost attempt has no counters while waiting for the tables', async (t) => {
  const { sql, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  await tenant.publish()
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 10 })
  await sql`update pgboss.job set retry_count = 1`
  // As waybill.rebase_queue does, which then wants the counters.
  const unlock = await lock(newSession(), 'only waybill.deliveries in share row exclusive mode')
  const holding = sql`
    select waybill.hold_claims(array[${tenant.tenantId}], array[${send[0]!.deliveryId}]::uuid[], array[${send[0]!.endpointId}]::uuid[],
      array[null]::uuid[], array[1], true)`
  await waitFor(async () => (await waitingFor(sql, 'waybill.deliveries')) > 0, { what: 'the holding to wait' })
  assert.equal((await sql`select from waybill.endpoint_stats for update skip locked`).length, 1)
  await unlock()
  await holding
  await assertBooks(sql)
})

test('an attempt that lost its worker after a replay is numbered on from those before, when its delivery is held', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false])
  await sql`update waybill.deliveries set earlier_attempts = 3, attempt_count = 3`
  await sql`update pgboss.job set state = 'active', retry_count = 1 where name = 'deliveries'`
  await sql`
    select waybill.hold_claims('{acme}', array[${ids[0]!}]::uuid[], array[${endpoint}]::uuid[], array[null]::uuid[], '{1}', false)`
  assert.deepEqual(
    [
      ...(await sql`select attempt_number, error, attempt_count from waybill.attempts join waybill.deliveries using (delivery_id)`),
    ],
    [{ attempt_number: 4, error: 'worker_lost', attempt_count: 4 }],
  )
})
