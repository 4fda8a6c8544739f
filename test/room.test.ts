import assert from 'node:assert/strict'
import { once } from 'node:events'
import { createServer as createHttpServer } from 'node:http'
import { type AddressInfo, connect, createServer } from 'node:net'
import { after, suite, test } from 'node:test'
import { readJson } from '../src/http/body.ts'
import { createRoom } from '../src/room.ts'
import { createDatabase } from './support/database.ts'
import { rawRequest } from './support/raw-http.ts'
import { ADMIN_KEY, createTenant, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const MiB = 1024 * 1024
const file = { after }
const { url: databaseUrl } = await createDatabase(file)
const EVENT = '{"event_type":"a.b","payload":{}}'

const headOf = (key: string, bytes: number, path = '/v1/events') =>
  `POST ${path} HTTP/1.1\r\nhost: waybill\r\nauthorization: Bearer ${key}\r\ncontent-type: application/json\r\ncontent-length: ${bytes}\r\n\r\n`

/** A room of 100 for work that a test ends, and the names of what has been let in so far. */
function openRoom(maxWaitMs = 60_000, maxWaiting = Infinity) {
  const wanted: string[] = []
  const refusal = () => new Error('refused')
  const room = createRoom(100, { maxWaitMs, maxWaiting, refusal, onWanted: (tenantId) => wanted.push(tenantId) })
  const entered: string[] = []
  const ends = new Map<string, () => void>()
  const hold = (name: string, tenantId: string, bytes: number, signal?: AbortSignal) =>
    room.run(
      tenantId,
      bytes,
      () => {
        entered.push(name)
        return new Promise<void>((end) => ends.set(name, end))
      },
      signal,
    )
  const end = async (name: string) => {
    ends.get(name)?.()
    await new Promise((resolve) => setImmediate(resolve))
  }
  return { hold, end, entered, wanted }
}

suite('room', () => {
  test('is shared first come, first served, and a tenant gets at most half of what the others leave', async () => {
    const { hold, end, entered } = openRoom()
    for (const name of ['a1', 'a2', 'a3']) void hold(name, 'a', 25)
    void hold('b1', 'b', 20)
    void hold('a4', 'a', 10)
    await end('none')
    assert.deepEqual(entered, ['a1', 'a2', 'b1'])
    await end('a2')
    assert.deepEqual(entered, ['a1', 'a2', 'b1'], 'a third of 25 would be more than half of what b leaves')
    await end('a1')
    assert.deepEqual(entered, ['a1', 'a2', 'b1', 'a3', 'a4'])
  })

  test('is not kept from others by a tenant that waits for its share', async () => {
    const { hold, end, entered } = openRoom()
    void hold('a1', 'a', 60)
    void hold('a2', 'a', 60)
    void hold('b1', 'b', 1)
    await end('none')
    assert.deepEqual(entered, ['a1', 'b1'])
    await end('a1')
    assert.deepEqual(entered, ['a1', 'b1', 'a2'])
  })

  test('lets in alone what is larger than all of it', async () => {
    const { hold, end, entered } = openRoom()
    void hold('first', 'a', 1)
    void hold('huge', 'b', 200)
    void hold('last', 'c', 1)
    await end('none')
    assert.deepEqual(entered, ['first'])
    await end('first')
    assert.deepEqual(entered, ['first', 'huge'])
    await end('huge')
    assert.deepEqual(entered, ['first', 'huge', 'last'])
  })

  test('has a line, of which a tenant gets at most half of what the others leave', async () => {
    const { hold, end, entered } = openRoom(60_000, 4)
    void hold('a1', 'a', 100)
    const refused: string[] = []
    for (const name of ['a2', 'a3', 'a4', 'b1', 'b2']) hold(name, name.slice(0, 1), 1).catch(() => refused.push(name))
    await end('none')
    assert.deepEqual(refused, ['a4', 'b2'])
    await end('a1')
    assert.deepEqual(entered, ['a1', 'a2', 'a3', 'b1'])
  })

  test('is waited for until a signal aborts, or for so long, and what stood behind is let in then', async () => {
    const closing = new AbortController()
    const { hold, end, entered } = openRoom()
    void hold('first', 'a', 90)
    const second = hold('second', 'b', 50, closing.signal)
    void hold('third', 'c', 5)
    await end('none')
    assert.deepEqual(entered, ['first'])
    closing.abort(new Error('closed'))
    await assert.rejects(second, /closed/)
    await assert.rejects(hold('late', 'd', 1, closing.signal), /closed/)
    await end('none')
    assert.deepEqual(entered, ['first', 'third'])

    const impatient = openRoom(1)
    void impatient.hold('first', 'a', 90)
    await assert.rejects(impatient.hold('second', 'b', 50), /refused/)
  })

  test('keeps nobody out who waits when a signal aborts whose own work was let in before', async () => {
    const closing = new AbortController()
    const { hold, end, entered } = openRoom()
    void hold('first', 'a', 90)
    void hold('second', 'b', 50, closing.signal)
    void hold('third', 'c', 90)
    await end('none')
    await end('first')
    closing.abort()
    await end('second')
    assert.deepEqual(entered, ['first', 'second', 'third'])
  })

  test('tells who has waited for half of its time for what others have', async () => {
    const { hold, end, entered, wanted } = openRoom(200)
    void hold('a1', 'a', 40)
    void hold('c1', 'c', 10)
    // Of these one waits for its tenant's share, and the other behind it.
    const second = hold('a2', 'a', 50)
    void hold('a3', 'a', 5)
    await assert.rejects(second, /refused/)
    await end('none')
    assert.deepEqual([entered, wanted], [['a1', 'c1', 'a3'], []])
    void hold('b1', 'b', 60)
    await waitFor(() => wanted.length > 0)
    assert.deepEqual([entered, wanted], [['a1', 'c1', 'a3'], ['b']])
    await end('a1')
    assert.deepEqual(entered, ['a1', 'c1', 'a3', 'b1'])
  })

  test('reads what came while the process stood still before it tells that', async (t) => {
    const { hold, end, entered, wanted } = openRoom(1000)
    const server = createServer((socket) => socket.on('data', () => void end('a1'))).listen(0, '127.0.0.1')
    await once(server, 'listening')
    const connected = once(server, 'connection')
    const client = connect((server.address() as AddressInfo).port, '127.0.0.1')
    const [socket] = await connected
    t.after(() => [client.destroy(), socket.destroy(), server.close()])
    void hold('a1', 'a', 90)
    await end('none')
    void hold('b1', 'b', 50)
    client.write('the end of a1')
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 600)
    await waitFor(() => entered.includes('b1'))
    assert.deepEqual(wanted, [])
  })

  test('tells nothing of who was let in before that', async (t) => {
    t.mock.timers.enable({ apis: ['setTimeout'] })
    const { hold, end, entered, wanted } = openRoom(200)
    void hold('a1', 'a', 45)
    void hold('b1', 'b', 10)
    void hold('c1', 'c', 50)
    await end('none')
    await end('a1')
    assert.deepEqual(entered, ['a1', 'b1', 'c1'])
    t.mock.timers.tick(200)
    await end('none')
    assert.deepEqual(wanted, [])
  })
})

suite('bodies that do not arrive', { concurrency: 3 }, () => {
  test('of one tenant are given up, and keep nobody else out', async (t) => {
    const service = await startService(t, { databaseUrl, mode: 'api' })
    const [greedy, other] = [await createTenant(service), await createTenant(service)]
    // All of the room divides by this: without bounds, nothing would be left.
    const stuck = Array.from({ length: 400 }, () => rawRequest(service.port, headOf(greedy.key, MiB / 4)))
    // The first answer tells that the room is full.
    assert.equal((await Promise.race(stuck))?.status, 503)
    assert.equal((await other.call('POST', '/v1/events', { body: EVENT })).status, 202)
    const tenant = { tenant_id: 'one-more', tenant_slug: 'one-more' }
    assert.equal((await service.call('POST', '/v1/admin/tenants', { key: ADMIN_KEY, body: tenant })).status, 200)

    const answers = await Promise.all(stuck)
    const late = answers.filter((answer) => answer?.status === 408)
    assert.ok(late.length >= 40, `${late.length} were given up`)
    assert.equal(late.length + answers.filter((answer) => answer?.status === 503).length, answers.length)
    assert.equal(late[0]!.headers.get('connection'), 'close')
    assert.deepEqual(JSON.parse(late[0]!.body), {
      ok: false,
      error: 'invalid request',
      details: [{ path: '', message: 'the request took too long to arrive' }],
    })
    assert.equal((await greedy.call('POST', '/v1/events', { body: EVENT })).status, 202)
  })

  test('and of which nobody says how large they are take room as if they were as large as may be', async (t) => {
    const service = await startService(t, { databaseUrl, mode: 'api' })
    const { key } = await createTenant(service)
    const head = headOf(key, 0).replace('content-length: 0', 'transfer-encoding: chunked')
    const stuck = Array.from({ length: 100 }, () => rawRequest(service.port, head))
    assert.equal((await Promise.race(stuck))?.status, 503)
  })

  test('slowly, but go on arriving, are waited for', async (t) => {
    const service = await startService(t, { databaseUrl, mode: 'api' })
    const { key } = await createTenant(service)
    const answer = await rawRequest(service.port, headOf(key, EVENT.length), (write) => {
      for (const [index, part] of EVENT.match(/.{1,9}/g)!.entries()) setTimeout(() => write(part), index * 4000)
    })
    assert.equal(answer?.status, 202)
  })

  test('are waited for half a minute at most, however they drip', async (t) => {
    const service = await startService(t, { databaseUrl, mode: 'api' })
    const { key } = await createTenant(service)
    const answer = await rawRequest(service.port, headOf(key, 100_000), (write) => {
      const drip = setInterval(() => write(' '), 1000)
      t.after(() => clearInterval(drip))
    })
    assert.equal(answer?.status, 408)
  })

  test('because their clients left while they waited for room are not waited for', async (t) => {
    const server = createHttpServer().listen(0, '127.0.0.1')
    await once(server, 'listening')
    t.after(() => server.close())
    const client = connect((server.address() as AddressInfo).port, '127.0.0.1')
    client.write(headOf('key', 100))
    const [incoming] = await once(server, 'request')
    client.destroy()
    await new Promise((gone) => incoming.once('close', gone))
    const outgoing = { askForBody() {} }
    const context = { env: { incoming, outgoing }, get: () => 'tenant' } as unknown as Parameters<typeof readJson>[0]
    await assert.rejects(readJson(context, 0), { code: 'invalid_json', details: 'the body ended early' })
  })

  test('and were waited for in vain let smaller ones behind them in', async (t) => {
    const service = await startService(t, { databaseUrl, mode: 'api' })
    // Two of these, and no third, have room together.
    const limits = { max_payload_bytes: 16 * MiB }
    const large = [
      await createTenant(service, { limits }),
      await createTenant(service, { limits }),
      await createTenant(service, { limits }),
    ]
    const [other, small] = [await createTenant(service), await createTenant(service)]
    for (const { key } of large.slice(0, 2))
      void rawRequest(service.port, headOf(key, 16 * MiB + 1000), (write) => {
        // It goes on arriving, and fast enough, so that what ends is the other's waiting.
        const drip = setInterval(() => write(' '.repeat(50_000)), 200)
        t.after(() => clearInterval(drip))
      })
    const medium = { event_type: 'a.b', payload: { x: 'x'.repeat(100_000) } }
    for (const { key } of large.slice(0, 2))
      await waitFor(async () => (await rawRequest(service.port, headOf(key, 100_000)))?.status === 503, {
        what: 'both to be let in',
      })
    for (const { call } of [large[2]!, other, small]) await call('GET', '/v1/dlq')
    const waiting = rawRequest(service.port, headOf(large[2]!.key, 16 * MiB + 1000))
    await service.call('GET', '/health')
    const behind = other.call('POST', '/v1/events', { body: medium })
    const body = { tenant_id: 'not-behind', tenant_slug: 'not-behind' }
    const operators = service.call('POST', '/v1/admin/tenants', { key: ADMIN_KEY, body })
    assert.equal((await Promise.race([waiting, operators]))?.status, 200, 'the operator has room of its own')
    const first = Promise.race([waiting, small.call('POST', '/v1/events', { body: EVENT })])
    assert.equal((await first)?.status, 202, 'small ones have room of their own')
    assert.equal((await waiting)?.status, 503)
    assert.equal((await behind).status, 202)
  })
})
