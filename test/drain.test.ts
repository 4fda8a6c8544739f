import assert from 'node:assert/strict'
import { once } from 'node:events'
import { connect, createServer } from 'node:net'
import { type TestContext, test } from 'node:test'
import { drain } from '../src/http/server/drain.ts'
import { lock, waitingFor } from './support/database.ts'
import { startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

async function start(t: TestContext) {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api' })
  const ask = `GET /v1/endpoints HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${tenant.key}\r\n\r\n`
  return { sql, service, ask }
}

/** A kept connection; `answered` is called for each answer with all of their `Connection` headers, the newest last. */
function open(port: number, answered: (headers: string[]) => void = () => {}) {
  const socket = connect(port, '127.0.0.1')
  let text = ''
  const headers = () => [...text.matchAll(/^connection: (\S+)/gim)].map(([, value]) => value as string)
  socket.on('data', (chunk) => {
    text += chunk
    answered(headers())
  })
  socket.on('error', () => {})
  const closed = new Promise<void>((resolve) => socket.on('close', () => resolve()))
  return { write: (bytes: string, sent?: () => void) => socket.write(bytes, sent), headers, closed }
}

test('the last answer on a connection tells its client to leave, also if it was asked for before SIGTERM', async (t) => {
  const { sql, service, ask } = await start(t)
  const unlock = await lock(sql, 'waybill.endpoints')
  const [one, two] = [open(service.port), open(service.port)]
  one.write(ask)
  two.write(ask.repeat(2))
  await waitFor(async () => (await waitingFor(sql, 'waybill.endpoints')) === 2)
  service.signal('SIGTERM')
  await service.logged('service.stopping')
  await unlock()
  await Promise.all([one.closed, two.closed])
  assert.deepEqual(one.headers(), ['close'])
  assert.deepEqual(two.headers(), ['keep-alive', 'close'])
  assert.deepEqual(await service.exited, { code: 0, signal: null })
})

test('who asks again after each answer loses no request at SIGTERM', async (t) => {
  const { service, ask } = await start(t)
  const clients = Array.from({ length: 5 }, () => {
    let sent = 1
    const client = open(service.port, (headers) => {
      if (headers.length < sent || headers.at(-1) === 'close') return
      sent++
      client.write(ask)
    })
    client.write(ask)
    return { ...client, sent: () => sent }
  })
  await waitFor(() => clients.every(({ sent }) => sent() > 3))
  service.signal('SIGTERM')
  await Promise.all(clients.map(({ closed }) => closed))
  for (const { headers, sent } of clients) assert.deepEqual([headers().length, headers().at(-1)], [sent(), 'close'])
  assert.deepEqual(await service.exited, { code: 0, signal: null })
})

test('who keeps asking ahead leaves with the first answer to what came after the idle ones had left', async (t) => {
  const { sql, service, ask } = await start(t)
  const idle = open(service.port)
  idle.write(ask)
  await waitFor(() => idle.headers().length === 1)
  const unlock = await lock(sql, 'waybill.endpoints')
  const client = open(service.port)
  client.write(ask.repeat(2))
  await waitFor(async () => (await waitingFor(sql, 'waybill.endpoints')) === 1)
  service.signal('SIGTERM')
  await idle.closed
  client.write(ask.repeat(2))
  await unlock()
  await client.closed
  assert.deepEqual(client.headers(), ['keep-alive', 'keep-alive', 'close'])
  assert.deepEqual(await service.exited, { code: 0, signal: null })
})

test('who is still reading answers when the idle ones leave gets them all', async (t) => {
  const { service, ask } = await start(t)
  const idle = open(service.port)
  idle.write(ask)
  await waitFor(() => idle.headers().length === 1)
  const reader = connect(service.port, '127.0.0.1')
  const closed = new Promise((resolve) => reader.on('close', resolve))
  // More than the system takes for a client that does not read.
  reader.write('GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n'.repeat(90))
  await new Promise((resolve) => reader.once('readable', resolve))
  service.signal('SIGTERM')
  await idle.closed
  let text = ''
  reader.on('data', (chunk) => {
    text += chunk
  })
  await closed
  assert.equal(text.match(/HTTP\/1.1 200 OK\r/g)?.length, 90)
  assert.deepEqual(await service.exited, { code: 0, signal: null })
})

test('connections that wait to be taken at SIGTERM are taken, and their requests answered', async (t) => {
  const { service, ask } = await start(t)
  service.signal('SIGSTOP')
  const clients = Array.from({ length: 50 }, () => {
    const client = open(service.port)
    const sent = new Promise<void>((resolve) => client.write(ask, () => resolve()))
    return { ...client, sent }
  })
  await Promise.all(clients.map(({ sent }) => sent))
  service.signal('SIGTERM')
  service.signal('SIGCONT')
  await Promise.all(clients.map(({ closed }) => closed))
  for (const { headers } of clients) assert.equal(headers().length, 1)
  assert.deepEqual(await service.exited, { code: 0, signal: null })
})

test('a connection whose last request was answered before it had arrived is idle once it has', async (t) => {
  const { service } = await start(t)
  const openInTwo = async (head: string, rest: string) => {
    const socket = connect(service.port, '127.0.0.1')
    socket.write(head)
    await new Promise((resolve) => socket.once('data', resolve))
    socket.write(rest)
    return { closed: new Promise<number>((resolve) => socket.on('close', () => resolve(performance.now()))) }
  }
  const head = 'POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n'
  const connections = [await openInTwo(`${head}{}`, ''), await openInTwo(head, '{}')]
  // Its body has been read once this is answered.
  await fetch(`${service.url}/health`)
  service.signal('SIGTERM')
  const [whole, early] = await Promise.all(connections.map(({ closed }) => closed))
  assert.ok(early! - whole! < 1000, `${early! - whole!} ms later`)
})

test('a server is closed in time although there are always more connections to take', {
  timeout: 20_000,
}, async (t) => {
  const server = createServer().listen(0, '127.0.0.1')
  await once(server, 'listening')
  const state = { isDraining: false, haveIdleLeft: false, taken: 0 }
  // As a flood of new connections would have it: one in each turn.
  let flood = setImmediate(function take() {
    state.taken++
    flood = setImmediate(take)
  })
  t.after(() => [clearImmediate(flood), server.close()])
  await drain(server, new Map(), state, 200)
  assert.equal(server.listening, false)
})
