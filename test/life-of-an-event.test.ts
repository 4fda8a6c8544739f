import assert from 'node:assert/strict'
import { after, suite, test } from 'node:test'
import { createDatabase } from './support/database.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, createTenant, ENCRYPTION_KEY, startService, type Tenant } from './support/service.ts'
import { verifyBothWays, verifyStandard } from './support/verify.ts'
import { waitFor } from './support/wait.ts'

const file = { after }
const database = await createDatabase(file)
const receiver = await startReceiver(file)
const service = await startService(file, {
  databaseUrl: database.url,
  env: { RETRY_LIMIT: '2', RETRY_DELAY_SECONDS: '1', LOG_LEVEL: 'trace' },
})

const secrets = [ADMIN_KEY, ENCRYPTION_KEY]

/** A tenant with one endpoint at a path of its own. Its keys are remembered, to be looked for in the log at the end. */
async function start({ events = ['*'] } = {}) {
  const tenant = await createTenant(service)
  const path = `/${tenant.tenantId}`
  const endpoint = await tenant.createEndpoint(receiver.url(path), { subscribed_events: events })
  secrets.push(tenant.key, endpoint.signing_secret)
  return { tenant, path, endpoint }
}

const deliveryOf = async (tenant: Tenant, id: string) => (await tenant.call('GET', `/v1/deliveries/${id}`)).body
const attemptsOf = async (tenant: Tenant, id: string) =>
  (await tenant.call('GET', `/v1/deliveries/${id}/attempts`)).body.data

const becomes = (tenant: Tenant, id: string, status: string, attempts?: number) =>
  waitFor(
    async () => {
      const delivery = await deliveryOf(tenant, id)
      return delivery.status === status && (attempts === undefined || delivery.attempt_count === attempts) && delivery
    },
    { what: `the delivery to be ${status}`, timeoutMs: 60_000 },
  )

/** The first attempt, once it is recorded; others may have followed. */
const firstAttempt = (tenant: Tenant, id: string) =>
  waitFor(async () => (await attemptsOf(tenant, id))[0], { what: 'the attempt to be recorded' })

suite('the life of an event', { concurrency: true }, () => {
  test('a published event arrives once, signed, at every endpoint that wants it', async () => {
    const { tenant, path, endpoint } = await start()
    const other = await tenant.createEndpoint(receiver.url(`${path}/typed`), {
      subscribed_events: ['x', 'invoice.paid'],
    })
    await tenant.createEndpoint(receiver.url(`${path}/deaf`), { subscribed_events: ['invoice', 'invoice.paid.late'] })
    const body = { event_type: 'invoice.paid', payload: { amount: 4200 } }

    const published = await tenant.call('POST', '/v1/events', { body, headers: { 'idempotency-key': 'key-1' } })
    assert.equal(published.status, 202)
    const { event_id, delivery_ids } = published.body
    assert.deepEqual(published.body, {
      ok: true,
      event_id,
      tenant_id: tenant.tenantId,
      idempotency_key: 'key-1',
      endpoint_count: 2,
      queued_delivery_count: 2,
      delivery_ids,
    })
    assert.equal(delivery_ids.length, 2)

    for (const id of delivery_ids) await becomes(tenant, id, 'delivered')
    const event = (await tenant.call('GET', `/v1/events/${event_id}`)).body
    const expected = `{"id":"${event_id}","type":"invoice.paid","timestamp":"${event.created_at}","data":{"amount":4200}}`
    for (const [at, secret] of [
      [path, endpoint.signing_secret],
      [`${path}/typed`, other.signing_secret],
    ] as const) {
      const [receipt, ...more] = receiver.at(at)
      assert.deepEqual(more, [])
      assert.equal(String(receipt!.body), expected)
      assert.equal(receipt!.headers['content-type'], 'application/json')
      assert.match(receipt!.headers['user-agent'] ?? '', /^Waybill\/\d+\.\d+\.\d+$/)
      assert.equal(receipt!.headers['service-event-id'], event_id)
      assert.ok(delivery_ids.includes(receipt!.headers['service-delivery-id']))
      verifyBothWays(receipt!, secret)
    }
    assert.deepEqual(receiver.at(`${path}/deaf`), [])
  })

  test('a delivery that succeeds at once shows its one attempt', async () => {
    const { tenant, path, endpoint } = await start()
    receiver.script(path, { status: 201, body: 'thanks' })
    const { event_id, delivery_ids } = await tenant.publish('user.created')
    const id = delivery_ids[0]!
    const delivery = await becomes(tenant, id, 'delivered')
    const { created_at, updated_at, last_attempt_at, completed_at, ...fields } = delivery
    assert.deepEqual(fields, {
      ok: true,
      delivery_id: id,
      tenant_id: tenant.tenantId,
      event_id,
      endpoint_id: endpoint.endpoint_id,
      event_type: 'user.created',
      status: 'delivered',
      attempt_count: 1,
      next_attempt_at: null,
      last_status_code: 201,
      last_error: null,
      dead_letter_reason: null,
    })
    assert.ok(created_at <= completed_at && completed_at <= updated_at)
    // The worker's clock, set by the database's as well as a round trip allows.
    const drift = Math.max(Date.parse(created_at) - Date.parse(last_attempt_at), 0)
    assert.ok(drift < 4000 && last_attempt_at <= completed_at, `attempted ${drift} ms before it was created`)
    const [attempt, ...more] = await attemptsOf(tenant, id)
    assert.deepEqual(more, [])
    const { duration_ms, started_at, ...rest } = attempt
    assert.deepEqual(rest, {
      attempt_number: 1,
      delivery_id: id,
      endpoint_id: endpoint.endpoint_id,
      url: receiver.url(path),
      status_code: 201,
      error: null,
      error_message: null,
      response_body: 'thanks',
      response_truncated: false,
      retry_state: 'succeeded',
      next_attempt_at: null,
    })
    assert.equal(started_at, last_attempt_at)
    assert.ok(duration_ms >= 0 && duration_ms < 60_000)
  })

  test('an endpoint that fails twice and recovers gets the same bytes three times', async () => {
    const { tenant, path, endpoint } = await start()
    // It stays as it is while the second attempt waits for its answer.
    const second = gate(404)
    receiver.script(path, { status: 500, body: 'no' }, second.reply, 200)
    const { delivery_ids } = await tenant.publish()
    const id = delivery_ids[0]!
    const retrying = await becomes(tenant, id, 'retrying', 1)
    assert.equal(retrying.last_status_code, 500)
    assert.equal(retrying.last_error, 'http_status')
    assert.ok(retrying.next_attempt_at > retrying.last_attempt_at)
    assert.equal(retrying.completed_at, null)
    second.open()

    await becomes(tenant, id, 'delivered', 3)
    const receipts = receiver.at(path)
    assert.equal(receipts.length, 3)
    for (const receipt of receipts) {
      assert.deepEqual(receipt.body, receipts[0]!.body)
      assert.equal(receipt.headers['service-delivery-id'], id)
      assert.equal(receipt.headers['webhook-id'], receipts[0]!.headers['webhook-id'])
      verifyBothWays(receipt, endpoint.signing_secret)
    }
    const stamps = receipts.map((receipt) => Number(receipt.headers['webhook-timestamp']))
    assert.ok(stamps[0]! < stamps[1]! && stamps[1]! < stamps[2]!, 'each attempt is signed at its own time')
    const attempts = await attemptsOf(tenant, id)
    assert.deepEqual(
      attempts.map((a: Record<string, unknown>) => [a.attempt_number, a.status_code, a.response_body, a.retry_state]),
      [
        [1, 500, 'no', 'will_retry'],
        [2, 404, '', 'will_retry'],
        [3, 200, '', 'succeeded'],
      ],
    )
  })

  test('an endpoint that always fails is backed off from and given up on; a replay delivers and goes on counting', async () => {
    const { tenant, path } = await start()
    receiver.script(path, { status: 500, body: 'broken' })
    const { delivery_ids } = await tenant.publish('order.placed')
    const id = delivery_ids[0]!
    const dead = await becomes(tenant, id, 'dead_lettered')
    assert.equal(dead.dead_letter_reason, 'retries_exhausted')
    assert.equal(dead.attempt_count, 3)
    assert.equal(dead.next_attempt_at, null)
    assert.ok(dead.completed_at)

    const attempts = await attemptsOf(tenant, id)
    assert.deepEqual(
      attempts.map((a: Record<string, unknown>) => [a.attempt_number, a.status_code, a.response_body, a.retry_state]),
      [
        [1, 500, 'broken', 'will_retry'],
        [2, 500, 'broken', 'will_retry'],
        [3, 500, 'broken', 'exhausted'],
      ],
    )
    for (const [index, attempt] of attempts.slice(0, -1).entries()) {
      const wait = Date.parse(attempts[index + 1].started_at) - Date.parse(attempt.started_at)
      const least = 1000 * 2 ** index
      assert.ok(wait >= least - 20, `retry ${index + 1} came after ${wait} ms`)
      assert.ok(attempts[index + 1].started_at >= attempt.next_attempt_at, 'not before the announced time')
      // From the log line, which comes after the plan is made: a slow attempt and its recording do not count.
      const line = service.logs.find(
        ({ delivery_id, attempt_number }) => delivery_id === id && attempt_number === index + 1,
      )
      const planned = Date.parse(attempt.next_attempt_at) - Date.parse(String(line?.time))
      assert.ok(planned <= 2 * least, `retry ${index + 1} was planned for ${planned} ms later`)
    }
    assert.equal(attempts.at(-1).next_attempt_at, null)

    const listed = (await tenant.call('GET', '/v1/dlq')).body.data
    assert.deepEqual(
      listed.map((row: { delivery_id: string }) => row.delivery_id),
      [id],
    )

    receiver.script(path, 503, 200)
    const replayed = await tenant.call('POST', `/v1/deliveries/${id}/replay`)
    assert.equal(replayed.status, 202)
    assert.equal(replayed.body.status, 'pending')
    assert.equal(replayed.body.dead_letter_reason, null)
    const delivered = await becomes(tenant, id, 'delivered')
    assert.equal(delivered.attempt_count, 5)
    const numbers = (await attemptsOf(tenant, id)).map((a: { attempt_number: number }) => a.attempt_number)
    assert.deepEqual(numbers, [1, 2, 3, 4, 5])
    assert.deepEqual((await tenant.call('GET', '/v1/dlq')).body.data, [])
    const bodies = new Set(receiver.at(path).map((receipt) => String(receipt.body)))
    assert.equal(bodies.size, 1, 'a replay sends the same bytes')
  })

  test('a replay of what waits for a retry makes it due now, and queues it once', async () => {
    const { tenant, path } = await start()
    const { reply, open } = gate(200)
    receiver.script(path, { status: 503, headers: { 'retry-after': '3600' } }, reply)
    const { delivery_ids } = await tenant.publish()
    const id = delivery_ids[0]!
    await becomes(tenant, id, 'retrying')
    const replays = await Promise.all(
      Array.from({ length: 5 }, () => tenant.call('POST', `/v1/deliveries/${id}/replay`)),
    )
    assert.deepEqual([...new Set(replays.map(({ status }) => status))], [202])
    await receiver.until(2, { path })
    open()
    const delivered = await becomes(tenant, id, 'delivered')
    assert.equal(delivered.attempt_count, 2)
    assert.equal(receiver.at(path).length, 2)
  })

  test('a replay of what has lost its job sends it once, and its attempts go on counting', async () => {
    const { tenant, path } = await start()
    receiver.script(path, { status: 503, headers: { 'retry-after': '3600' } }, 200)
    const { delivery_ids } = await tenant.publish()
    const id = delivery_ids[0]!
    await becomes(tenant, id, 'retrying')
    await database.sql`delete from pgboss.job where id = ${id}`
    assert.equal((await tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202)
    const delivered = await becomes(tenant, id, 'delivered')
    assert.equal(delivered.attempt_count, 2)
    assert.equal(receiver.at(path).length, 2)
  })

  test('410 gives the delivery up at once and makes the endpoint inactive', async () => {
    const { tenant, path, endpoint } = await start()
    receiver.script(path, 410)
    const { delivery_ids } = await tenant.publish()
    const dead = await becomes(tenant, delivery_ids[0]!, 'dead_lettered')
    assert.equal(dead.dead_letter_reason, 'endpoint_gone')
    assert.equal(dead.attempt_count, 1)
    assert.equal((await attemptsOf(tenant, delivery_ids[0]!))[0].retry_state, 'exhausted')
    assert.equal((await tenant.call('GET', `/v1/endpoints/${endpoint.endpoint_id}`)).body.is_active, false)
    assert.deepEqual((await tenant.publish()).delivery_ids, [], 'what is published then does not match it')
  })

  test('Retry-After makes a retry later, never earlier than the backoff', async () => {
    const { tenant, path } = await start()
    receiver.script(path, { status: 429, headers: { 'retry-after': '3' } }, 200)
    receiver.script(`${path}/hasty`, { status: 503, headers: { 'retry-after': '0' } }, 200)
    await tenant.createEndpoint(receiver.url(`${path}/hasty`))
    const { delivery_ids } = await tenant.publish()
    for (const id of delivery_ids) await becomes(tenant, id, 'delivered')
    const wait = (at: string) => receiver.at(at)[1]!.at - receiver.at(at)[0]!.at
    assert.ok(wait(path) >= 2990, `${wait(path)} ms`)
    assert.ok(wait(`${path}/hasty`) >= 990, `${wait(`${path}/hasty`)} ms`)
    const attempts = await Promise.all(delivery_ids.map((id) => attemptsOf(tenant, id)))
    const said = Object.fromEntries(attempts.map(([first]) => [first.status_code, first.error_message]))
    assert.deepEqual(said, {
      429: 'the receiver answered with a status other than 2xx, and asked to be tried later (Retry-After)',
      503: 'the receiver answered with a status other than 2xx',
    })
  })

  test('an inactive endpoint gets nothing; what waited for it goes on when it is active again', async () => {
    const { tenant, path, endpoint } = await start()
    receiver.script(path, { status: 503, headers: { 'retry-after': '3600' } }, 200)
    const url = `/v1/endpoints/${endpoint.endpoint_id}`
    const { delivery_ids } = await tenant.publish()
    const id = delivery_ids[0]!
    await becomes(tenant, id, 'retrying')
    assert.equal((await tenant.call('PATCH', url, { body: { is_active: false } })).body.is_active, false)
    assert.deepEqual((await tenant.publish()).delivery_ids, [])
    // Due now: it is claimed and put away.
    await tenant.call('POST', `/v1/deliveries/${id}/replay`)
    await waitFor(async () => (await deliveryOf(tenant, id)).next_attempt_at === null, {
      what: 'the delivery to be held',
    })
    await tenant.call('POST', `/v1/deliveries/${id}/replay`)
    // A second event to a listening endpoint shows that the worker has had its chance to send what is held.
    await tenant.createEndpoint(receiver.url(`${path}/probe`))
    await tenant.publish()
    await receiver.until(1, { path: `${path}/probe` })
    assert.equal(receiver.at(path).length, 1)
    assert.equal((await deliveryOf(tenant, id)).status, 'retrying')

    await tenant.call('PATCH', url, { body: { is_active: true } })
    const delivered = await becomes(tenant, id, 'delivered')
    assert.equal(delivered.attempt_count, 2)
    assert.equal(receiver.at(path).length, 2)
  })

  test('while a rotation overlaps, the old and the new secret verify; afterwards only the new one', async () => {
    const { tenant, path, endpoint } = await start()
    const rotated = await tenant.call('POST', `/v1/endpoints/${endpoint.endpoint_id}/rotate-secret`)
    assert.equal(rotated.status, 200)
    const { signing_secret: newer, previous_secret_expires_at } = rotated.body
    secrets.push(newer)
    assert.notEqual(newer, endpoint.signing_secret)
    const hours = (Date.parse(previous_secret_expires_at) - Date.now()) / 3_600_000
    assert.ok(hours > 23.9 && hours < 24.1)

    await tenant.publish()
    const [during] = await receiver.until(1, { path })
    assert.equal(during!.headers['webhook-signature']!.toString().split(' ').length, 2)
    verifyBothWays(during!, newer)
    verifyBothWays(during!, endpoint.signing_secret)

    await database.sql`update waybill.endpoints set previous_secret_expires_at = now() where endpoint_id = ${endpoint.endpoint_id}`
    await tenant.publish()
    const [, later] = await receiver.until(2, { path })
    verifyBothWays(later!, newer)
    assert.throws(() => verifyStandard(later!, endpoint.signing_secret), /No matching signature/)
  })

  test('a secret that is rotated again while its rotation overlaps ends the older one at once', async () => {
    const { tenant, path, endpoint } = await start()
    const rotate = async (): Promise<string> =>
      (await tenant.call('POST', `/v1/endpoints/${endpoint.endpoint_id}/rotate-secret`)).body.signing_secret
    const [newer, newest] = [await rotate(), await rotate()]
    secrets.push(newer, newest)
    await tenant.publish()
    const [receipt] = await receiver.until(1, { path })
    verifyBothWays(receipt!, newest)
    verifyBothWays(receipt!, newer)
    assert.throws(() => verifyStandard(receipt!, endpoint.signing_secret), /No matching signature/)
  })

  test('a redirect is a failure and is not followed', async () => {
    const { tenant, path, endpoint } = await start()
    receiver.script(path, { status: 302, headers: { location: receiver.url(`${path}/target`) } })
    const { delivery_ids } = await tenant.publish()
    const attempt = await firstAttempt(tenant, delivery_ids[0]!)
    assert.deepEqual([attempt.status_code, attempt.error, attempt.retry_state], [302, 'redirect', 'will_retry'])
    assert.deepEqual(receiver.at(`${path}/target`), [])
    const health = (await tenant.call('GET', `/v1/endpoints/${endpoint.endpoint_id}/health`)).body
    assert.deepEqual([health.success_rate, health.failure_rate, health.last_success_at], [0, 1, null])
  })

  test('an endpoint that nobody answers at becomes a recorded failure without a status', async () => {
    const { tenant } = await start({ events: ['none'] })
    await tenant.createEndpoint('http://127.0.0.1:1/')
    const { delivery_ids } = await tenant.publish()
    const attempt = await firstAttempt(tenant, delivery_ids[0]!)
    assert.deepEqual([attempt.status_code, attempt.error, attempt.response_body], [null, 'connection_refused', null])
    assert.ok(attempt.error_message)
  })

  test('a response that is too long, or holds what text cannot, is kept as far as it can be', async () => {
    const { tenant, path } = await start()
    receiver.script(path, { status: 500, body: `a\u0000b${'ä'.repeat(20_000)}` })
    const { delivery_ids } = await tenant.publish()
    const attempt = await firstAttempt(tenant, delivery_ids[0]!)
    assert.equal(attempt.response_truncated, true)
    assert.match(attempt.response_body, /^abä+\ufffd?$/)
    assert.ok(Buffer.byteLength(attempt.response_body) <= 16_384 + 3)
    assert.ok(attempt.response_body.length > 8000)
  })

  test('an event that nobody subscribed to is accepted and has no deliveries', async () => {
    const { tenant } = await start({ events: ['other'] })
    const { event_id, delivery_ids } = await tenant.publish()
    assert.deepEqual(delivery_ids, [])
    assert.equal((await tenant.call('GET', `/v1/events/${event_id}`)).body.delivery_count, 0)
  })
})

test('no secret is in any line of the log', () => {
  const log = service.stdout() + service.stderr()
  assert.match(log, /delivery\.attempted/)
  assert.ok(secrets.length > 20)
  for (const secret of secrets) {
    assert.ok(!log.includes(secret.replace(/^(whsec_|wb_live_)/, '')), 'a secret is in the log')
  }
})
