import assert from 'node:assert/strict'
import { connect, type Socket } from 'node:net'
import { type TestContext, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { residentMemory } from '../scripts/bench/usage.ts'
import type { Pool } from '../src/db/open.ts'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase } from './support/database.ts'
import { createTenant, type Service, startService, startTenant, type Tenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** An attempts page of 4 MiB, more than the kernel keeps of one on its way. */
const ROWS = 250
const BODY_BYTES = 16 * 1024
const SOCKETS = 60
/** It takes a hundred or so, and what is unread for 30 s is cut off: one by one, a slow machine would never get there. */
const AT_ONCE = 10
/** Of the answers that nobody reads, a tenant's may come to 32 MiB; what is on its way through comes on top. */
const GROWTH_MIB = 250

test('answers that nobody reads are bounded and cut off; who reads slowly gets all of its own', async (t) => {
  const database = await createDatabase(t)
  const service = await startService(t, { databaseUrl: database.url, mode: 'api' })
  const tenants = [await createTenant(service), await createTenant(service), await createTenant(service)] as const
  const [greedy, slow, other] = tenants
  const page = new Map<Tenant, string>()
  for (const tenant of tenants) page.set(tenant, await addAttempts(database.sql, tenant))
  const read = (tenant: Tenant) => tenant.call('GET', page.get(tenant)!)
  const { text } = await read(slow)
  assert.ok(text.length > ROWS * BODY_BYTES)
  await read(other)
  const before = memoryMiB(service)

  // Some 35 seconds in all: longer than an answer may stand still.
  const slowSocket = open(t, service, ask(slow, page.get(slow)!).repeat(3))
  const slowly = readSlowly(slowSocket, { bytes: 3 * text.length, everyMs: 180 })
  // Before the others come, or it might wait in vain for its turns like them.
  await waitFor(() => slowSocket.bytesRead > 0, { what: 'the first answer to begin' })
  const began = performance.now()
  const leave = () => open(t, service, ask(greedy, page.get(greedy)!)).pause()
  const unread = Array.from({ length: SOCKETS }, leave)
  const fill = async () => {
    // On a slow machine most of the first ones were refused.
    unread.push(leave())
    return (await read(greedy)).status === 503
  }
  await waitFor(fill, { what: 'the share of the tenant to be taken' })
  const isCut = async () => {
    await other.publish()
    assert.equal((await read(other)).status, 200)
    const grownMiB = memoryMiB(service) - before
    assert.ok(grownMiB < GROWTH_MIB, `it has grown by ${grownMiB} MiB`)
    // An empty line means nothing to the service, and shows whether the connection is still there.
    for (const socket of unread) socket.write('\r\n')
    return unread.some((socket) => socket.destroyed)
  }
  while (!(await isCut())) {
    assert.ok(performance.now() - began < 60_000, 'but in time')
    await sleep(1000)
  }
  assert.ok(performance.now() - began > 28_000, 'not at once')
  await waitFor(async () => (await read(greedy)).status === 200, { what: 'room' })

  const received = await slowly
  assert.equal(received.split(text).length - 1, 3, 'three whole answers')
})

test('answers one behind the other on a connection that is lost take no room any more', async (t) => {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api' })
  const path = await addAttempts(sql, tenant)
  const many = ask(tenant, path.replace(`limit=${ROWS}`, `limit=${ROWS / 5}`)).repeat(30)
  const status = async () => (await tenant.call('GET', path)).status
  for (let round = 0; round < 3; round++) {
    const sockets: Socket[] = []
    const fill = async () => {
      for (let n = 0; n < AT_ONCE; n++) sockets.push(open(t, service, many).pause())
      return (await status()) === 503
    }
    await waitFor(fill, { what: 'the share of the tenant to be taken', timeoutMs: 60_000 })
    for (const socket of sockets) socket.resetAndDestroy()
    await waitFor(async () => (await status()) === 200, { what: 'it to be given back' })
  }
  assert.equal(service.stderr(), '')
})

test('nor do answers that CONNECT came behind', async (t) => {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api' })
  const path = await addAttempts(sql, tenant)
  const many = ask(tenant, path.replace(`limit=${ROWS}`, `limit=${ROWS / 5}`)).repeat(30)
  for (let round = 0; round < 4; round++) {
    const sockets: Socket[] = []
    const fill = async () => {
      for (let n = 0; n < AT_ONCE; n++) sockets.push(open(t, service, many).pause())
      return (await tenant.call('GET', path)).status === 503
    }
    await waitFor(fill, { what: 'the share to be taken', timeoutMs: 60_000 })
    const closed = sockets.map((socket) => new Promise<void>((gone) => socket.once('close', () => gone())))
    for (const socket of sockets) socket.resume().write('CONNECT a.example:443 HTTP/1.1\r\nhost: a.example\r\n\r\n')
    await Promise.all(closed)
    await waitFor(async () => (await tenant.call('GET', path)).status === 200, { what: 'it to be given back' })
  }
  assert.equal(service.stderr(), '')
})

/** A delivery of the tenant with as many attempts as a page holds, each with a body of the largest size; the page's path. */
async function addAttempts(sql: Pool, tenant: Tenant): Promise<string> {
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  const id = (await tenant.publish()).delivery_ids[0]!
  await sql`
    insert into waybill.attempts (tenant_id, delivery_id, attempt_number, endpoint_id, url, status_code, error, error_message,
      response_body, response_truncated, duration_ms, retry_state, next_attempt_at, started_at)
    select ${tenant.tenantId}, ${id}, n, ${endpoint_id}, 'http://127.0.0.1:9/', 500, 'http_status', null,
      repeat('x', ${BODY_BYTES}), false, 1, 'will_retry', null, now() from generate_series(1, ${ROWS}) n`
  return `/v1/deliveries/${id}/attempts?limit=${ROWS}`
}

const ask = ({ key }: Tenant, path: string) =>
  `GET ${path} HTTP/1.1\r\nhost: waybill\r\nauthorization: Bearer ${key}\r\n\r\n`

function open(t: TestContext, { port }: Service, requests: string): Socket {
  const socket = connect(port, '127.0.0.1')
  cleanUp(t, () => socket.destroy())
  socket.on('error', () => {}).write(requests)
  return socket
}

/** Reads a little every so often, until there are `bytes` and one answer's end, or the connection ends. */
async function readSlowly(socket: Socket, { bytes, everyMs }: { bytes: number; everyMs: number }): Promise<string> {
  let received = ''
  for await (const chunk of socket.setEncoding('latin1')) {
    received += chunk
    if (received.length > bytes && received.endsWith('}')) break
    await sleep(everyMs)
  }
  return received
}

const memoryMiB = ({ pid }: Service) => Math.round(residentMemory(pid) ?? 0)
