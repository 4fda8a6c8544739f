import assert from 'node:assert/strict'
import { connect, type Socket } from 'node:net'
import { after, test } from 'node:test'
import { peakMemory } from '../../scripts/bench/usage.ts'
import { rawRequest } from '../support/raw-http.ts'
import { startService, startTenant } from '../support/service.ts'

const { databaseUrl, service, tenant } = await startTenant({ after }, { mode: 'api' })

const HEAD = `Host: localhost\r\nContent-Type: application/json\r\n`
const CHUNKED = `POST /v1/events HTTP/1.1\r\n${HEAD}Transfer-Encoding: chunked\r\n\r\n`
const EVENT = '{"event_type":"a.b","payload":{}}'

/** All that comes until the connection ends. */
const everything = (first: string, then?: string) =>
  new Promise<string>((resolve) => {
    let text = ''
    const socket = connect(service.port, '127.0.0.1', () => socket.write(first))
    socket.on('data', (chunk) => {
      text += chunk
      if (then !== undefined && text.endsWith('}')) socket.write(then)
      then = undefined
    })
    socket.on('error', () => {}).on('close', () => resolve(text))
  })

const write = (socket: Socket, text: string) => new Promise((resolve) => socket.write(text, resolve))

test('a request that breaks off behind one that is not answered yet ends the connection, and is not taken for its answer', async () => {
  const publish = `POST /v1/events HTTP/1.1\r\n${HEAD}Authorization: Bearer ${tenant.key}\r\nContent-Length: ${EVENT.length}\r\n\r\n${EVENT}`
  const tooLong = `0\r\nx: ${'y'.repeat(20_000)}\r\n\r\n`
  for (const rest of ['zz\r\n', tooLong])
    for (let n = 0; n < 5; n++) {
      const answer = await rawRequest(service.port, publish + CHUNKED + rest)
      assert.ok(answer === null || answer.status === 202, answer?.text)
    }
})

test('a request that is answered before it has arrived gets no second answer when it breaks off', async () => {
  const text = await everything(`${CHUNKED}1\r\na\r\n`, 'zz\r\n')
  assert.equal(text.match(/HTTP\/1\.1 401/g)?.length, 1)
  assert.equal(text.match(/HTTP\/1\.1/g)?.length, 1, text)
})

test('a request that breaks off after the one before was answered is refused', async () => {
  const text = await everything(
    `GET /health HTTP/1.1\r\n${HEAD}\r\n${CHUNKED.replace(HEAD, `${HEAD}Authorization: Bearer ${tenant.key}\r\n`)}1\r\na\r\n`,
    'zz\r\n',
  )
  assert.deepEqual(text.match(/HTTP\/1\.1 \d+/g), ['HTTP/1.1 200', 'HTTP/1.1 400'])
})

test('a refused HEAD has no body', async () => {
  const chunked = `HEAD /health HTTP/1.1\r\n${HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n`
  for (const request of ['HEAD /health HTTP/1.1\r\n\r\n', chunked]) {
    const text = await everything(request)
    assert.match(text, /^HTTP\/1\.1 400 .*\r\n\r\n$/s)
  }
})

test('the scripts of the reference page are zipped once, however many ask for them at once', async (t) => {
  const fresh = await startService(t, { databaseUrl, mode: 'api', args: ['--no-migrate'] })
  const page = await (await fetch(`${fresh.url}/docs`)).text()
  const [script] = /docs\/[\d.]+\/swagger-ui-bundle\.js/.exec(page) ?? []
  const ask = () => rawRequest(fresh.port, `GET /${script} HTTP/1.1\r\nHost: localhost\r\n\r\n`)
  const before = peakMemory(fresh.pid) ?? 0
  const answers = await Promise.all(Array.from({ length: 200 }, ask))
  assert.deepEqual(new Set(answers.map((answer) => answer?.status)), new Set([200]))
  const more = (peakMemory(fresh.pid) ?? 0) - before
  assert.ok(more < 150, `${more} MiB more`)
})

for (const [version, header] of [
  ['1.0', ''],
  ['1.1', 'Connection: close\r\n'],
])
  for (const [key, what, status] of [
    [tenant.key, 'is too large', 400],
    ['nobody’s', 'has no right key', 401],
  ] as const)
    test(`who leaves with the answer (HTTP/${version}) and reads it once all is sent gets it, if the request ${what}`, async () => {
      const head = `POST /v1/events HTTP/${version}\r\n${HEAD}${header}Authorization: Bearer ${key}\r\nContent-Length: 2000000\r\n\r\n`
      const socket = connect(service.port, '127.0.0.1')
      const failed = new Promise<string>((resolve) => socket.on('error', ({ message }) => resolve(message)))
      const sendAll = async () => {
        await write(socket, head)
        await new Promise((resolve) => socket.once('readable', resolve))
        for (let left = 2_000_000; left > 0; left -= 200_000) await write(socket, 'x'.repeat(200_000))
      }
      assert.equal(await Promise.race([failed, sendAll()]), undefined)
      let text = ''
      socket.on('data', (chunk) => {
        text += chunk
      })
      await new Promise((resolve) => socket.on('close', resolve))
      assert.match(text, new RegExp(`^HTTP/1.1 ${status} `))
    })
