import assert from 'node:assert/strict'
import { once } from 'node:events'
import { readFile } from 'node:fs/promises'
import { connect, type Socket } from 'node:net'
import { test } from 'node:test'
import { createDatabase, lock } from './support/database.ts'
import { ADMIN_KEY, createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const CLIENTS = 10_000
const PAYLOAD_BYTES = 256 * 1024

test('10,000 requests of 256 KiB at once are each stored or told to come back, within bounded memory', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const env = { RATE_LIMIT_EVENTS_WRITE: '0' }
  const service = await startService(t, { databaseUrl, mode: 'api', env })
  const tenant = await createTenant(service)
  const request = largeEvent(tenant)
  const sockets = await openMany(service.port, CLIENTS)
  const answers = await Promise.all(sockets.map((socket) => answerOn(socket, request)))

  const answered = (status: number) => answers.filter((answer) => answer.startsWith(`HTTP/1.1 ${status} `))
  const [accepted, refused] = [answered(202), answered(503)]
  // On a slow machine a request can be late: in arriving, or in the database, stored or not.
  const late = [...answered(408), ...answered(500)]
  assert.equal(accepted.length + refused.length + late.length, CLIENTS)
  for (const answer of refused) {
    assert.match(answer, /\r\nretry-after: 1\r\n/i)
    assert.match(answer, /{"ok":false,"error":"service overloaded"}$/)
  }
  assert.ok(late.length < CLIENTS / 2, `${late.length} were late`)
  const [stored] = await sql`select count(*)::int as n, min(length(payload)) as shortest from waybill.events`
  assert.ok(stored?.n >= accepted.length && stored?.n <= accepted.length + late.length, `${stored?.n} are stored`)
  assert.equal(stored?.shortest, PAYLOAD_BYTES)
  const peakMiB = await peakMemoryMiB(service)
  t.diagnostic(`${accepted.length} accepted; at most ${Math.round(peakMiB)} MiB`)
  assert.ok(peakMiB < 1024, `${Math.round(peakMiB)} MiB at most`)
  await Promise.all(Array.from({ length: 20 }, () => untilAccepted(service, request)))
})

test('while unknown keys are looked up, however many, a known tenant’s requests are served', async (t) => {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api' })
  const sockets = await openMany(service.port, 700)
  // Its key is known for five seconds from here.
  await tenant.publish()
  const unlock = await lock(sql, 'waybill.api_keys in access exclusive mode')
  const statuses: string[] = []
  const answers = sockets.map(async (socket, nth) => {
    // What it is counted as does not depend on how much comes.
    const head = `POST /v1/events HTTP/1.1\r\nhost: waybill\r\nauthorization: Bearer wb_live_${nth}\r\ntransfer-encoding: chunked\r\n`
    statuses.push((await answerOn(socket, Buffer.from(`${head}\r\n0\r\n\r\n`))).slice(9, 12))
  })
  // Half of 32 MiB, in pieces of 128 KiB, is as much as they get together; half of a thousand wait for it.
  const refused = 700 - 128 - 500
  await waitFor(() => statuses.length >= refused)
  assert.deepEqual(new Set(statuses.slice(0, refused)), new Set(['503']))
  await tenant.publish()
  // Now its key has to be looked up, too.
  const body = { tenant_id: 'another', tenant_slug: 'another' }
  assert.equal((await service.call('POST', '/v1/admin/tenants', { key: ADMIN_KEY, body })).status, 200)
  const published = tenant.publish()
  await unlock()
  await published
  await Promise.all(answers)
})

test('two tenants may send the largest bodies at once, and what comes too slowly makes room for a third', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  const service = await startService(t, { databaseUrl, mode: 'api' })
  const max_payload_bytes = 16_777_216
  const large = async () => {
    const { key } = await createTenant(service, { limits: { max_payload_bytes } })
    const socket = await open(service.port)
    let answer = ''
    socket.setEncoding('latin1').on('data', (text: string) => {
      answer += text
    })
    const head = `POST /v1/events HTTP/1.1\r\nhost: waybill\r\nauthorization: Bearer ${key}\r\ncontent-type: application/json\r\n`
    socket.write(`${head}expect: 100-continue\r\ncontent-length: ${max_payload_bytes + 65_536}\r\n\r\n`)
    t.after(() => socket.destroy())
    return () => (answer.match(/(?<=^HTTP\/1.1 )\d+/gm) ?? []).join()
  }
  const sent = [await large(), await large()]
  for (const statuses of sent) await waitFor(() => statuses() === '100', { what: 'both to be let in' })
  const third = await large()
  await waitFor(() => third() !== '', { what: 'an answer to the third' })
  assert.equal(third(), '100')
  for (const statuses of sent) await waitFor(() => statuses() === '100,408', { what: 'the others to be given up' })
})

test('bodies in pieces of one byte take no more memory than others', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  const service = await startService(t, { databaseUrl, mode: 'api' })
  const tenant = await createTenant(service)
  const body = `{"event_type":"pieces","payload":{"x":"${'x'.repeat(PAYLOAD_BYTES - 8)}"}}`
  const head =
    `POST /v1/events HTTP/1.1\r\nhost: waybill\r\nauthorization: Bearer ${tenant.key}\r\n` +
    'content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n'
  const request = Buffer.from(`${head}${body.replaceAll(/./g, '1\r\n$&\r\n')}0\r\n\r\n`)
  await untilAccepted(service, request)
  const before = await peakMemoryMiB(service)
  await Promise.all(Array.from({ length: 8 }, () => untilAccepted(service, request)))
  const grown = (await peakMemoryMiB(service)) - before
  t.diagnostic(`grown by ${Math.round(grown)} MiB`)
  assert.ok(grown < 150, `by ${Math.round(grown)} MiB`)
})

/** Sends it again and again: on a slow machine some come late, but who comes back is accepted. */
const untilAccepted = ({ port }: { port: number }, request: Buffer) =>
  waitFor(async () => /^HTTP\/1\.1 202 /.test(await answerOn(await open(port), request)), {
    timeoutMs: 60_000,
    what: 'a request to be accepted',
  })

async function peakMemoryMiB({ pid }: { pid: number }): Promise<number> {
  return Number(/VmHWM:\s+(\d+) kB/.exec(await readFile(`/proc/${pid}/status`, 'utf8'))?.[1]) / 1024
}

function largeEvent({ key }: { key: string }): Buffer {
  const body = `{"event_type":"large","payload":{"x":"${'x'.repeat(PAYLOAD_BYTES - 8)}"}}`
  return Buffer.from(
    `POST /v1/events HTTP/1.1\r\nhost: waybill\r\nauthorization: Bearer ${key}\r\n` +
      `content-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`,
  )
}

/** A hundred at a time: more could be refused by the system. */
async function openMany(port: number, count: number): Promise<Socket[]> {
  const sockets: Socket[] = []
  while (sockets.length < count) sockets.push(...(await Promise.all(Array.from({ length: 100 }, () => open(port)))))
  return sockets
}

async function open(port: number): Promise<Socket> {
  const socket = connect({ port, host: '127.0.0.1' })
  await once(socket, 'connect')
  return socket
}

/** What the service answers, head and body, until its content-length is there. */
function answerOn(socket: Socket, request: Buffer): Promise<string> {
  return new Promise((resolve, reject) => {
    let answer = ''
    socket.setEncoding('latin1').on('data', (chunk: string) => {
      answer += chunk
      const end = answer.indexOf('\r\n\r\n')
      const length = Number(/content-length: (\d+)/i.exec(answer)?.[1])
      if (end < 0 || answer.length < end + 4 + length) return
      resolve(answer)
      socket.destroy()
    })
    socket.on('error', reject).on('close', () => reject(new Error('closed without an answer')))
    socket.write(request)
  })
}

test('a batch makes some two thousand deliveries and no more, of event types that are new, too', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const env = { RATE_LIMIT_ENDPOINTS_WRITE: '0', MAX_ENDPOINTS: '100', MAX_FANOUT_ENDPOINTS: '100' }
  const service = await startService(t, { databaseUrl, mode: 'api', env })
  const tenant = await createTenant(service)
  for (let n = 0; n < 10; n++)
    await Promise.all(Array.from({ length: 10 }, () => tenant.createEndpoint('http://127.0.0.1:9/')))
  const publish = async (type: string) => {
    const { status } = await tenant.call('POST', '/v1/events', { body: { event_type: type, payload: {} } })
    assert.equal(status, 202)
  }
  await publish('first')
  // All of them in one batch would make 4,000; of more, the last might wait too long.
  await Promise.all(Array.from({ length: 40 }, (_, n) => publish(`new.${n}`)))
  // All of a batch have its moment.
  const batches = await sql<{ made: number }[]>`
    select count(*)::int as made from waybill.deliveries group by updated_at order by made desc`
  assert.equal(
    batches.reduce((sum, { made }) => sum + made, 0),
    4100,
  )
  assert.ok(batches[0]!.made <= 2048, `${batches[0]!.made} in one batch`)
})
