import assert from 'node:assert/strict'
import { suite, type TestContext, test } from 'node:test'
import { waitingForLocks } from './support/database.ts'
import { assertBooks, publishMany, settled, watchInFlight } from './support/deliveries.ts'
import { gate, type Receipt, startReceiver } from './support/receiver.ts'
import { createTenant, startTenant } from './support/service.ts'
import { verifyStandard } from './support/verify.ts'
import { waitFor } from './support/wait.ts'

const WAITING = 1000
/** What a worker has in hand when something changes is sent as it was: as many as it has slots (200), and as many that wait. */
const MAX_IN_HAND = 400

/**
 * A service, and a tenant with one endpoint, `/old`, for which `WAITING` deliveries are under way. A fifth of them arrive; the
 * others wait for `change`.
 */
async function start(t: TestContext) {
  const receiver = await startReceiver(t)
  const { sql, tenant } = await startTenant(t, { env: { ENDPOINT_CONCURRENCY: '10' } })
  const endpoint = await tenant.createEndpoint(receiver.url('/old'), { subscribed_events: ['thing.happened'] })
  const { reply, open } = gate()
  for (const path of ['/old', '/new'])
    receiver.script(path, () => (receiver.receipts.length < WAITING / 5 ? 200 : reply))
  await publishMany(sql, tenant.tenantId, WAITING)
  await receiver.until(WAITING / 5)
  /** Answers with what the API does, and when. */
  const change = async (method: string, path: string, body?: object) => {
    const answer = await tenant.call(method, `/v1/endpoints/${endpoint.endpoint_id}${path}`, { body })
    assert.equal(answer.status, 200)
    const at = Date.now()
    open()
    return { at, body: answer.body }
  }
  const patch = (body: object) => change('PATCH', '', body)
  const assertFewAfter = (changed: { at: number }, receipts: Receipt[]) => {
    const late = receipts.filter(({ at }) => at > changed.at).length
    assert.ok(late <= MAX_IN_HAND, `${late} were sent as it was before`)
  }
  /** Each arrived once, and each attempt is recorded with the URL it went to. */
  const assertAllSentOnce = async () => {
    await settled(sql)
    const ids = receiver.receipts.map(({ headers }) => headers['service-delivery-id'])
    assert.deepEqual([ids.length, new Set(ids).size], [WAITING, WAITING])
    const urls = await sql<
      { url: string; count: number }[]
    >`select url, count(*)::int from waybill.attempts group by url order by url`
    const paths = ['/new', '/old'].filter((path) => receiver.at(path).length > 0)
    assert.deepEqual(
      urls.map(({ url, count }) => [url, count]),
      paths.map((path) => [receiver.url(path), receiver.at(path).length]),
    )
    await assertBooks(sql)
  }
  return { sql, receiver, tenant, endpoint, change, patch, assertFewAfter, assertAllSentOnce }
}

suite(`changes while ${WAITING} deliveries wait`, { concurrency: 2 }, () => {
  test('a new URL gets all that is sent later', async (t) => {
    const { receiver, patch, assertFewAfter, assertAllSentOnce } = await start(t)
    const changed = await patch({ url: receiver.url('/new') })
    await assertAllSentOnce()
    assertFewAfter(changed, receiver.at('/old'))
  })

  test('another subscription changes nothing for what was accepted, and everything for what comes', async (t) => {
    const { sql, tenant, patch, assertAllSentOnce } = await start(t)
    await patch({ subscribed_events: ['other.thing'] })
    assert.equal((await tenant.publish('thing.happened')).delivery_ids.length, 0)
    await assertAllSentOnce()
    const [counted] = await sql`select sum(delivery_count)::int as n from waybill.events`
    assert.equal(counted?.n, WAITING)
  })

  test('through a rotation every request verifies with the old secret, and all that come later with the new one', async (t) => {
    const { receiver, endpoint, change, assertFewAfter, assertAllSentOnce } = await start(t)
    const rotated = await change('POST', '/rotate-secret')
    await assertAllSentOnce()
    for (const receipt of receiver.receipts) verifyStandard(receipt, endpoint.signing_secret)
    const isNew = ({ headers }: Receipt) => String(headers['webhook-signature']).includes(' ')
    for (const receipt of receiver.receipts.filter(isNew)) verifyStandard(receipt, rotated.body.signing_secret)
    assertFewAfter(
      rotated,
      receiver.receipts.filter((receipt) => !isNew(receipt)),
    )
  })
})

suite('an endpoint that changes', { concurrency: 2 }, () => {
  const begin = async (t: TestContext, env: Record<string, string> = {}) => {
    const receiver = await startReceiver(t)
    const { sql, tenant } = await startTenant(t, { env })
    const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/old'))
    const patch = async (body: object) =>
      assert.equal((await tenant.call('PATCH', `/v1/endpoints/${id}`, { body })).status, 200)
    const state = async () => (await tenant.call('GET', `/v1/endpoints/${id}`)).body.state
    return { sql, receiver, tenant, id, patch, state }
  }

  test('is not gone because its old URL is, and gets at its new one what that refused', async (t) => {
    const { sql, receiver, tenant, patch, state } = await begin(t, { RETRY_DELAY_SECONDS: '1' })
    const { reply, open } = gate(410)
    receiver.script('/old', reply)
    await tenant.publish()
    await receiver.until(1)
    await patch({ url: receiver.url('/new') })
    open()
    await receiver.until(1, { path: '/new' })
    await settled(sql)
    assert.equal(await state(), 'active')
    await tenant.publish()
    await receiver.until(2, { path: '/new' })
  })

  test('is tried at its new URL at once, although the old one failed', async (t) => {
    const { receiver, tenant, patch, state } = await begin(t, {
      BREAKER_FAILURES: '1',
      BREAKER_SECONDS: '0',
      BREAKER_PROBE_SECONDS: '3600',
      BREAKER_PROBE_MAX_SECONDS: '3600',
    })
    receiver.script('/old', 500)
    await tenant.publish()
    await waitFor(async () => (await state()) === 'failing')
    await tenant.publish()
    await patch({ url: receiver.url('/new') })
    await receiver.until(1, { path: '/new' })
    await waitFor(async () => (await state()) === 'active')
  })

  test('is tried at its new URL at once also where all wait for the first in order', async (t) => {
    const { receiver, tenant, id, patch, state } = await begin(t, {
      BREAKER_FAILURES: '1',
      BREAKER_SECONDS: '0',
      BREAKER_PROBE_SECONDS: '1',
      BREAKER_PROBE_MAX_SECONDS: '1',
      RETRY_DELAY_SECONDS: '3600',
    })
    receiver.script('/old', 500)
    await patch({ ordered: true })
    await tenant.publish()
    await tenant.publish()
    await waitFor(async () => (await state()) === 'failing')
    assert.equal((await tenant.call('GET', `/v1/endpoints/${id}`)).body.next_probe_at, null, 'its retry comes first')
    assert.equal(receiver.at('/old').length, 1)
    await patch({ url: receiver.url('/new') })
    await receiver.until(2, { path: '/new' })
    await waitFor(async () => (await state()) === 'active')
  })

  test('gets as much at once as before when it was switched off and on', async (t) => {
    const { sql, receiver, tenant, patch } = await begin(t, { ENDPOINT_CONCURRENCY: '10' })
    await patch({ is_active: false })
    await patch({ is_active: true })
    let mostLater = 0
    watchInFlight(receiver, '/old', 200, {
      delayMs: 600,
      // The first are sent from the queue; what comes later had to be held, and is released by what the endpoint may have.
      look: (inFlight, done) => {
        if (done >= 20) mostLater = Math.max(mostLater, inFlight)
      },
    })
    await publishMany(sql, tenant.tenantId, 60)
    await settled(sql)
    assert.equal(receiver.receipts.length, 60)
    assert.ok(mostLater > 4, `${mostLater} at once, as if it were recovering`)
  })
})

test('100 replays of a delivery at once make one new attempt of it, and never two at a time', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, service, tenant } = await startTenant(t, { env: { ATTEMPT_TIMEOUT_SECONDS: '60' } })
  const stranger = await createTenant(service)
  await tenant.createEndpoint(receiver.url('/hook'))
  const url = `/v1/deliveries/${(await tenant.publish()).delivery_ids[0]}`
  const isDelivered = async () => (await tenant.call('GET', url)).body.status === 'delivered'
  await waitFor(isDelivered)

  const { reply, open } = gate()
  receiver.script('/hook', reply)
  /** As a client does it: what is refused because too much waits comes again. */
  const replay = async () => {
    for (;;) {
      const answer = await tenant.call('POST', `${url}/replay`)
      if (answer.status !== 503) return answer
    }
  }
  const replays = () => Promise.all(Array.from({ length: 100 }, replay))
  for (const { status } of await replays()) assert.equal(status, 202)
  assert.equal((await stranger.call('POST', `${url}/replay`)).status, 404)
  await receiver.until(2)
  // What is under way stays as it is.
  for (const { status } of await replays()) assert.equal(status, 202)
  open()
  await waitFor(isDelivered)
  assert.equal(receiver.receipts.length, 2)

  // Where attempts end meanwhile, each of these replays may begin another one, after the last.
  const seen = watchInFlight(receiver, '/hook', 200, { delayMs: 5 })
  for (const { status, body } of await replays()) assert.deepEqual([status, body.status], [202, 'pending'])
  await settled(sql)
  assert.equal(seen.most, 1)
  const { attempt_count } = (await tenant.call('GET', url)).body
  assert.equal(attempt_count, receiver.receipts.length)
  assert.ok(attempt_count > 2 && attempt_count <= 102)
  await assertBooks(sql)
})

test('a change that meets the recording of an attempt crosswise is made all the same', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id: id } = await tenant.createEndpoint('http://127.0.0.1:9/hook')
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, failure_streak) values (${tenant.tenantId}, ${id}, 3)`
  let changing: ReturnType<typeof tenant.call> | undefined
  const recorded = sql.begin(async (recording) => {
    await recording`select from waybill.endpoint_stats where endpoint_id = ${id} for update`
    changing = tenant.call('PATCH', `/v1/endpoints/${id}`, { body: { url: 'http://127.0.0.1:9/other' } })
    await waitFor(() => waitingForLocks(sql), { what: 'the change to wait' })
    await recording`update waybill.endpoints set updated_at = now() where endpoint_id = ${id}`
  })
  // Should this begin to wait a second after the change, Postgres gives up this one.
  await recorded.catch((error) => assert.equal(error.code, '40P01'))
  assert.equal((await changing!).status, 200)
})

suite('an endpoint that has failed for days', () => {
  /** With one delivery held, and its breaker open. */
  async function begin(t: TestContext) {
    const { sql, tenant } = await startTenant(t, { mode: 'api' })
    const url = 'http://127.0.0.1:9/old'
    const { endpoint_id } = await tenant.createEndpoint(url)
    await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered: true } })
    await tenant.publish()
    await sql`
      update waybill.endpoint_stats set breaker = 'open', breaker_since = now(), failure_streak = 50, failed_probes = 9,
        failing_since = now() - interval '4 days', next_probe_at = now() + interval '5 minutes', probing = ${endpoint_id}`
    const patch = async (body: object) => (await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body })).body
    return { sql, url, patch }
  }

  for (const [how, change] of [
    ['moved', { url: 'http://127.0.0.1:9/new' }],
    ['set inactive and active', { is_active: true }],
  ] as const)
    test(`has its days, its failures and its probes anew when it is ${how}`, async (t) => {
      const { sql, patch } = await begin(t)
      if ('is_active' in change) await patch({ is_active: false })
      assert.equal((await patch(change)).state, 'recovering')
      const [stats] = await sql`
        select failure_streak, failed_probes, failing_since, next_probe_at, probing, ramp from waybill.endpoint_stats`
      const none = { failing_since: null, next_probe_at: null, probing: null }
      assert.deepEqual({ ...stats }, { failure_streak: 0, failed_probes: 0, ...none, ramp: 2 })
    })

  test('recovers no longer once nothing is held, although none of that has arrived', async (t) => {
    const { sql, url, patch } = await begin(t)
    assert.equal((await patch({ url: 'http://127.0.0.1:9/new' })).state, 'recovering')
    await sql`update waybill.endpoint_stats set held = 0`
    assert.equal((await patch({ description: url })).state, 'active')
  })

  test('goes on failing when it is told again what it is', async (t) => {
    const { url, patch } = await begin(t)
    assert.equal((await patch({ url, is_active: true, ordered: true })).state, 'failing')
  })

  test('that has not failed gets as much at once at a new URL as before', async (t) => {
    const { sql, patch } = await begin(t)
    await sql`update waybill.endpoint_stats set breaker = 'closed', breaker_since = null, failure_streak = 0, failing_since = null`
    assert.equal((await patch({ url: 'http://127.0.0.1:9/new' })).state, 'active')
  })

  test('and was set inactive for that says so, also after its tenant has set it inactive once more', async (t) => {
    const { sql, patch } = await begin(t)
    await sql`
      update waybill.endpoints set is_active = false, inactive_reason = 'gone', inactive_since = '2026-01-01T00:00:00Z'`
    const { state_reason, state_since } = await patch({ is_active: false })
    assert.deepEqual([state_reason, state_since], ['it answered 410 Gone', '2026-01-01T00:00:00.000Z'])
  })
})

test('an ordered endpoint that is told once more to be ordered makes its retry no sooner', async (t) => {
  const receiver = await startReceiver(t)
  const { tenant } = await startTenant(t, { env: { RETRY_DELAY_SECONDS: '3600' } })
  receiver.script('/hook', 500)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
  const order = () => tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered: true } })
  await order()
  const path = `/v1/deliveries/${(await tenant.publish()).delivery_ids[0]}`
  const read = async () => (await tenant.call('GET', path)).body
  const { next_attempt_at } = await waitFor(async () => {
    const delivery = await read()
    return delivery.status === 'retrying' ? delivery : undefined
  })
  await order()
  assert.equal((await read()).next_attempt_at, next_attempt_at)
  assert.equal(receiver.receipts.length, 1)
})

test('whoever publishes does not wait while an endpoint that gets a new URL and an order has its retries hurried', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, tenant } = await startTenant(t, { env: { RETRY_DELAY_SECONDS: '3600' } })
  receiver.script('/old', 500, 200)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/old'))
  const [delivery] = (await tenant.publish()).delivery_ids
  await waitFor(async () => (await sql`select from waybill.deliveries where status = 'retrying'`).length > 0)
  let moved: Promise<{ status: number }>
  await sql.begin(async (lock) => {
    await lock`select from pgboss.job where id = ${delivery!} for update`
    const body = { url: receiver.url('/new'), ordered: true }
    moved = tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body })
    await waitFor(async () => (await waitingForLocks(sql)) > 0, { what: 'the change to wait for the delivery’s job' })
    await tenant.publish()
  })
  assert.equal((await moved!).status, 200)
  await receiver.until(3)
  await receiver.until(1, { path: '/new' })
})

test('a tenant whose changes wait for each other keeps no other tenant waiting', async (t) => {
  const { sql, newSession, service, tenant } = await startTenant(t, { mode: 'api' })
  const other = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  const session = newSession()
  await session`begin`
  await session`select from waybill.endpoints where endpoint_id = ${endpoint_id} for update`
  const change = () => tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { description: 'new' } })
  const failed = new Set<number>()
  const changes = Promise.all(
    Array.from({ length: 50 }, (_, n) => change().then(({ status }) => status === 500 && failed.add(n))),
  )
  await waitFor(async () => (await waitingForLocks(sql)) > 0, { what: 'a change to wait' })
  await other.createEndpoint('http://127.0.0.1:9/')
  await other.publish()
  assert.equal(failed.size, 0, 'served while the changes wait, not once they are given up')
  await session`rollback`
  await changes
})

test('an endpoint that is changed shows when it was, and no longer what was taken from it', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const own = { description: 'mine', max_per_second: 5, ordered: true }
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/', own)
  const at = '2026-01-02T03:04:05.678Z'
  await sql`update waybill.endpoints set updated_at = ${at}`
  const taken = { description: null, max_per_second: null }
  const { body } = await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: taken })
  assert.deepEqual([body.description, body.max_per_second, body.ordered], [null, null, true])
  assert.ok(body.updated_at > at)
})
