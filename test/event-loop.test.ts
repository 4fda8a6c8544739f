import assert from 'node:assert/strict'
import { once } from 'node:events'
import { connect } from 'node:net'
import { Readable } from 'node:stream'
import { suite, type TestContext, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { parseRange } from '../src/egress/address.ts'
import { createSender } from '../src/egress/send.ts'
import { readJson } from '../src/http/body.ts'
import { cleanUp } from './support/cleanup.ts'
import { startDns } from './support/dns.ts'
import { startTenant } from './support/service.ts'
import { listenTcp, onRequest } from './support/tcp.ts'
import { longestTurn, parsingTime, TELL_TURNS, watchTurns } from './support/turns.ts'

/** In milliseconds. Without bounds each of these takes one and a half times to sixty times as long in one turn. */
const mostMs = () => 40 * parsingTime()

const times = <T>(count: number, make: (index: number) => T) => Array.from({ length: count }, (_, index) => make(index))

/** Sends `whole` on each of `count` connections: all but its end, and then the ends of all at once. */
async function atOnce(port: number, whole: Buffer, count: number, scope: TestContext): Promise<void> {
  const sockets = times(count, () => connect(port, '127.0.0.1').on('error', () => {}))
  for (const socket of sockets) cleanUp(scope, () => void socket.destroy())
  await Promise.all(sockets.map((socket) => once(socket, 'connect')))
  const answered = sockets.map(
    (socket) => new Promise<unknown>((resolve) => void socket.once('data', resolve).once('close', resolve)),
  )
  for (const socket of sockets) socket.write(whole.subarray(0, -1))
  // Nothing tells that it has all been read; if it has not, less ends at once.
  await sleep(500)
  for (const socket of sockets) socket.write(whole.subarray(-1))
  await Promise.all(answered)
}

suite('nothing that a client may send at once stops the API', () => {
  const names = times(4000, (i) => i.toString(36))
  const numbers = `{"event_type":"a","payload":{"a":[${times(65_000, () => '1\t').join(', ')}]}}`
  const host = String.fromCharCode(...times(2000, (i) => 0x4e00 + i))
  const requests: [what: string, count: number, method: string, path: string, body?: string][] = [
    ['payloads of many numbers', 48, 'POST', '/v1/events', numbers],
    ['URLs with long hosts', 100, 'POST', '/v1/endpoints', `{"url":"https://${host}.com/","subscribed_events":["a"]}`],
    ['unknown fields', 100, 'POST', '/v1/endpoints', `{${times(7000, (i) => `"${i.toString(36)}":0`).join(',')}}`],
    ['unknown parameters', 100, 'GET', `/v1/deliveries?${names.slice(0, 3500).join('&')}`],
  ]
  for (const [what, count, method, path, body = ''] of requests) {
    test(what, async (t) => {
      const { service, tenant } = await startTenant(t, { mode: 'api', flags: TELL_TURNS })
      const head = [
        `${method} ${path} HTTP/1.1`,
        'host: waybill',
        `authorization: Bearer ${tenant.key}`,
        ...(body ? ['content-type: application/json', `content-length: ${Buffer.byteLength(body)}`] : []),
      ]
      const whole = Buffer.from(`${head.join('\r\n')}\r\n\r\n${body}`)
      const before = service.stderr()
      await atOnce(service.port, whole, count, t)
      await sleep(100)
      const longest = longestTurn(service.stderr(), before)
      t.diagnostic(`${longest} ms`)
      assert.ok(longest < mostMs(), `a turn took ${longest} ms`)
    })
  }

  test('requests sent ahead', async (t) => {
    const { service } = await startTenant(t, { mode: 'api', flags: TELL_TURNS })
    const before = service.stderr()
    await atOnce(service.port, Buffer.from('GET / HTTP/1.1\r\nhost:a\r\n\r\n'.repeat(2400)), 200, t)
    await sleep(500)
    const longest = longestTurn(service.stderr(), before)
    // Some 3,500 are made, and the others are not.
    t.diagnostic(`${longest} ms`)
    assert.ok(longest < 8 * mostMs(), `a turn took ${longest} ms`)
  })
})

suite('nothing that receivers may answer at once stops the worker', () => {
  const ok = 'HTTP/1.1 200 OK\r\n'
  const answers: [what: string, answer: string][] = [
    ['headers beyond the limit', `${ok}${'a:\r\n'.repeat(25_000)}\r\n`],
    ['trailers beyond the limit', `${ok}transfer-encoding: chunked\r\n\r\n0\r\n${'a:\r\n'.repeat(25_000)}\r\n`],
  ]
  for (const [what, answer] of answers) {
    test(what, async (t) => {
      const asked: (() => void)[] = []
      const receiver = await listenTcp((socket) => onRequest(socket, () => asked.push(() => socket.write(answer))))
      t.after(receiver.close)
      const sender = createSender({ allow: [parseRange('127.0.0.0/8')!], timeoutMs: 10_000 })
      t.after(sender.close)
      const sent = times(60, () => sender.send({ url: receiver.url, headers: {}, body: '{}' }))
      while (asked.length < sent.length) await sleep(10)
      const longest = watchTurns()
      for (const reply of asked) reply()
      await Promise.all(sent)
      const ms = longest()
      t.diagnostic(`${Math.round(ms)} ms`)
      // A hundredth of a second each, and once a sixth.
      assert.ok(ms < 12 * mostMs(), `a turn took ${ms} ms`)
    })
  }

  test('a name with a thousand addresses, that many need', async (t) => {
    const many = times(990, (i) => `2a00:1450:4001:${(i + 4096).toString(16)}:8000:1234:5678:9abc`)
    const dns = await startDns((_name, type) => ({ addresses: type === 'A' ? ['127.0.0.1'] : many }))
    t.after(dns.close)
    const receiver = await listenTcp((socket) =>
      onRequest(socket, () => socket.write(`${ok}content-length: 0\r\n\r\n`)),
    )
    t.after(receiver.close)
    const sender = createSender({ allow: [parseRange('127.0.0.0/8')!], timeoutMs: 10_000, dnsServers: [dns.address] })
    t.after(sender.close)
    const url = `http://many.example:${receiver.port}/`
    const longest = watchTurns()
    const outcomes = await Promise.all(times(60, () => sender.send({ url, headers: {}, body: '{}' })))
    const ms = longest()
    assert.deepEqual([...new Set(outcomes.map(({ error }) => error))], ['dns_error'])
    assert.ok(ms < mostMs(), `a turn took ${ms} ms`)
  })
})

test('a small body is parsed before large ones that came ahead of it', async () => {
  const parsed: number[] = []
  const parse = async (bytes: number) => {
    const incoming = Object.assign(Readable.from([Buffer.from(`{"payload":{"a":"${'x'.repeat(bytes - 20)}"}}`)]), {
      headers: { 'content-type': 'application/json', 'content-length': String(bytes) },
    })
    const context = { env: { incoming, outgoing: { askForBody() {} } }, get: () => 'tenant' }
    await readJson(context as unknown as Parameters<typeof readJson>[0], 262_144)
    parsed.push(bytes)
  }
  await Promise.all([...times(20, () => parse(262_144)), parse(4096)])
  assert.ok(parsed.indexOf(4096) < 10, `it was number ${parsed.indexOf(4096)}`)
})
