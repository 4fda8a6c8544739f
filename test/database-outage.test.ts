import assert from 'node:assert/strict'
import { suite, type TestContext, test } from 'node:test'
import { createDatabase, PASSWORD } from './support/database.ts'
import { startProxy } from './support/proxy.ts'
import { gate, startReceiver } from './support/receiver.ts'
import {
  createTenant,
  type LogLine,
  runProgram,
  startService,
  startTenant,
  testEnvironment,
} from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** A whole service whose only way to its database is a proxy that the test can cut. */
async function start(t: TestContext) {
  const database = await createDatabase(t)
  const proxy = await startProxy(t, database.url)
  const receiver = await startReceiver(t)
  const service = await startService(t, { databaseUrl: proxy.url, env: { LOG_LEVEL: 'debug' } })
  const tenant = await createTenant(service)
  await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  await receiver.until(1)
  const recovered = () => waitFor(async () => (await service.call('GET', '/health')).status === 200)
  return { proxy, receiver, service, tenant, recovered }
}

suite('a database that goes away', { concurrency: true }, () => {
  test('makes requests fail in the error shape and health say so, and both recover by themselves', async (t) => {
    const { proxy, receiver, service, tenant, recovered } = await start(t)
    await proxy.cut()
    const health = await service.call('GET', '/health')
    assert.equal(health.status, 503)
    assert.equal(health.body.ok, false)
    assert.equal(health.body.database, 'unreachable')
    for (const [method, path, body] of [
      ['POST', '/v1/events', { event_type: 'a.b', payload: {} }],
      ['GET', '/v1/deliveries', undefined],
      ['GET', '/v1/endpoints', undefined],
    ] as const) {
      const reply = await tenant.call(method, path, { body, headers: { 'x-request-id': 'req-1' } })
      assert.equal(reply.status, 500)
      assert.deepEqual(reply.body, { ok: false, error: 'internal error' })
      assert.equal(reply.headers.get('x-request-id'), 'req-1')
    }
    const failed = () => service.logs.filter((line) => line.msg === 'request.failed' && line.request_id === 'req-1')
    await waitFor(() => failed().length === 3, { what: 'each failure to be logged with its request' })

    await proxy.restore()
    await recovered()
    assert.doesNotMatch(service.stdout(), new RegExp(`secretKey|${PASSWORD}`), 'no error is logged with its connection')
    const { delivery_ids } = await tenant.publish()
    await receiver.until(2)
    await waitFor(async () => {
      const { body } = await tenant.call('GET', `/v1/deliveries/${delivery_ids[0]}`)
      return body.status === 'delivered'
    })
  })

  test('lets no worker claim anything that it does not stay for', async (t) => {
    const receiver = await startReceiver(t)
    const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
    await tenant.createEndpoint(receiver.url('/hook'))
    for (const n of [1, 2, 3]) await tenant.publish('a.b', { n })
    const proxy = await startProxy(t, databaseUrl)
    proxy.cutAt('listen "waybill_due"')
    const worker = runProgram(t, { args: ['--mode', 'worker'], env: testEnvironment(proxy.url) })
    assert.equal((await worker.exited).code, 1)
    await worker.logged('service.failed')
    assert.deepEqual([...(await sql`select from pgboss.job where started_on is not null`)], [])
    assert.equal(receiver.receipts.length, 0)
  })

  test('does not end a process that was just opening a connection', async (t) => {
    const { proxy, service, tenant, recovered } = await start(t)
    // The driver's own first query on a new connection, whose failure nobody catches.
    proxy.cutAt('pg_catalog.pg_type')
    await Promise.allSettled(Array.from({ length: 20 }, () => tenant.call('GET', '/v1/endpoints')))
    await proxy.cut()
    assert.equal((await service.call('GET', '/health')).status, 503)
    await proxy.restore()
    await recovered()
  })

  test('does not lose the attempt that was under way, nor make it twice', async (t) => {
    const { proxy, receiver, service, tenant, recovered } = await start(t)
    const { reply, open } = gate({ status: 200, body: 'got it' })
    receiver.script('/hook', reply)
    const { delivery_ids } = await tenant.publish()
    await receiver.until(2)
    await proxy.cut()
    open()
    await service.logged('record.waiting')
    await service.logged('touch.failed')
    await proxy.restore()
    await recovered()
    const url = `/v1/deliveries/${delivery_ids[0]}`
    const delivered = await waitFor(async () => {
      const { body } = await tenant.call('GET', url)
      return body.status === 'delivered' && body
    })
    assert.equal(delivered.attempt_count, 1)
    const [attempt, ...more] = (await tenant.call('GET', `${url}/attempts`)).body.data
    assert.deepEqual([attempt.status_code, attempt.response_body, more], [200, 'got it', []])
    assert.equal(receiver.receipts.length, 2)
  })

  test('and one that hangs without closing is reported by health within its patience', async (t) => {
    const { proxy, service, tenant, receiver, recovered } = await start(t)
    proxy.freeze()
    assert.equal((await service.call('GET', '/health')).status, 503)
    const isHealth = ({ msg, path }: LogLine) => msg === 'request.answered' && path === '/health'
    const answered = await waitFor(() => service.logs.find(isHealth), { what: 'the answer to be logged' })
    // Its patience is 750 ms; without it the query would be given up after 3.5 s.
    assert.ok(Number(answered.duration_ms) < 2500, `it took ${answered.duration_ms} ms`)
    await proxy.restore()
    await recovered()
    await tenant.publish()
    await receiver.until(2)
  })
})

test('of a database that is far away all who ask for health at once share one answer', async (t) => {
  const { url } = await createDatabase(t)
  const proxy = await startProxy(t, url)
  const service = await startService(t, { databaseUrl: proxy.url, mode: 'api' })
  assert.equal((await service.call('GET', '/health')).status, 200)
  proxy.disturb({ delayMs: 50, resets: 0, random: () => 1 })
  const answers = await Promise.all(Array.from({ length: 200 }, () => service.call('GET', '/health')))
  assert.deepEqual([...new Set(answers.map(({ status }) => status))], [200])
})
