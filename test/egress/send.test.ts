import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { constants } from 'node:crypto'
import { once } from 'node:events'
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { createServer as createHttpServer } from 'node:http'
import { createServer as createHttpsServer } from 'node:https'
import { connect, createServer as createTcpServer, Socket } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type TestContext, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import {
  createServer as createTlsServer,
  getCACertificates,
  setDefaultCACertificates,
  type TLSSocket,
  type TlsOptions,
} from 'node:tls'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import { Worker } from 'node:worker_threads'
import { gzipSync } from 'node:zlib'
import { parseRange } from '../../src/egress/address.ts'
import { type AttemptError, LocalFault } from '../../src/egress/failure.ts'
import { createSender, type Outcome, type SendRequest } from '../../src/egress/send.ts'
import { AUTHORITY, EXPIRED, KEY, OTHER_HOST, SELF_SIGNED, TRUSTED } from '../support/certificates.ts'
import { startDns } from '../support/dns.ts'
import { listen, listenTcp, onRequest, type TcpReceiver } from '../support/tcp.ts'
import { waitFor } from '../support/wait.ts'

const TIMEOUT_MS = 2000
const LOOPBACK = [parseRange('127.0.0.0/8')!]
const HEADERS = { 'content-type': 'application/json', 'webhook-id': 'evt_1' }
const BODY = '{"hello":"world"}'

const SLOW_RECEIVER = `
  const server = require('node:http').createServer((request, response) => response.end())
  server.listen({ port: 0, host: '127.0.0.1', backlog: 1 }, () => process.stdout.write(String(server.address().port)))`

/** Tells its port, how many connections it has had, in each answer, and how many requests it has answered, in `answered`. */
const TLS_RECEIVER = `
  const { parentPort, workerData } = require('node:worker_threads')
  let connections = 0
  const server = require('node:https').createServer(workerData, (request, response) => {
    response.end(String(connections), () => {
      Atomics.add(workerData.answered, 0, 1)
      Atomics.notify(workerData.answered, 0)
    })
  })
  server.on('secureConnection', () => connections++)
  server.listen(0, '127.0.0.1', () => parentPort.postMessage(server.address().port))`

setDefaultCACertificates([...getCACertificates(), AUTHORITY])

function startSender(t: TestContext, options: Partial<Parameters<typeof createSender>[0]> = {}) {
  const sender = createSender({ allow: LOOPBACK, timeoutMs: TIMEOUT_MS, ...options })
  t.after(() => sender.close())
  const post = (url: string, more: Partial<SendRequest> = {}) =>
    sender.send({ url, headers: HEADERS, body: BODY, ...more })
  return { ...sender, post }
}

async function startTcp(t: TestContext, onConnection: (socket: Socket) => void): Promise<TcpReceiver> {
  const receiver = await listenTcp(onConnection)
  t.after(() => receiver.close())
  return receiver
}

/** A receiver that answers each request with these bytes. */
const startRaw = (t: TestContext, answer: string | Buffer, then: (socket: Socket) => void = () => {}) =>
  startTcp(t, (socket) =>
    onRequest(socket, () => {
      socket.write(answer)
      then(socket)
    }),
  )

async function startTls(t: TestContext, options: TlsOptions): Promise<TcpReceiver> {
  const answer = (socket: Socket) => {
    socket.on('error', () => {})
    onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok'))
  }
  const receiver = await listen(createTlsServer({ key: KEY, ...options }), 'secureConnection', answer)
  t.after(() => receiver.close())
  return { ...receiver, url: receiver.url.replace('http:', 'https:') }
}

/** Waits until the sender has let go of every connection; not by `once`, which a reset would make reject. */
async function allClosed({ sockets }: TcpReceiver): Promise<void> {
  for (const socket of sockets) if (!socket.closed) await new Promise((resolve) => socket.once('close', resolve))
}

/** A failure tells the endpoint's owner what happened and nothing about the network it was seen from. */
function assertFailed(outcome: Outcome, ...classes: Outcome['error'][]) {
  assert.ok(classes.includes(outcome.error), `${outcome.error} (${outcome.errorMessage})`)
  assert.match(outcome.errorMessage ?? '', /^[\w ,;/.()'-]{10,120}$/)
  assert.doesNotMatch(outcome.errorMessage ?? '', /\d+\.\d+\.\d+\.\d+|::|E[A-Z]{4,}|UND_/)
  // A deadline for each stage would make twice of it.
  assert.ok(outcome.durationMs < 2 * TIMEOUT_MS - 100, `took ${outcome.durationMs} ms`)
  assert.ok(Number.isInteger(outcome.durationMs))
}

test('a POST arrives with its headers and its exact bytes, and the answer is recorded', async (t) => {
  const received: string[] = []
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, (head, body) => {
      received.push(head, body)
      socket.write('HTTP/1.1 202 Accepted\r\ncontent-length: 4\r\n\r\nfine')
    }),
  )
  const { post } = startSender(t)
  const outcome = await post(`${receiver.url}?a=b%20c#hash`)
  assert.deepEqual(
    { ...outcome, startedAt: 0, durationMs: 0 },
    {
      startedAt: 0,
      durationMs: 0,
      statusCode: 202,
      error: null,
      errorMessage: null,
      responseBody: 'fine',
      responseTruncated: false,
      retryAfter: null,
    },
  )
  const [head = '', body] = received
  assert.equal(body, BODY)
  assert.match(head, /^POST \/hook\?a=b%20c HTTP\/1\.1\r\n/)
  assert.match(head, new RegExp(`\r\nhost: 127\\.0\\.0\\.1:${receiver.port}\r\n`))
  assert.match(head, /\r\nwebhook-id: evt_1(\r\n|$)/)
})

/** A receiver that keeps the bodies it gets. */
async function startKeeping(t: TestContext) {
  const received: string[] = []
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, (_head, body) => {
      received.push(body)
      socket.write('HTTP/1.1 204 No Content\r\n\r\n')
    }),
  )
  return { url: receiver.url, received }
}

test('a body is sent as UTF-8', async (t) => {
  const { url, received } = await startKeeping(t)
  const { post } = startSender(t)
  assert.equal((await post(url, { body: 'grün' })).error, null)
  assert.equal(Buffer.from(received[0] ?? '', 'latin1').toString(), 'grün')
})

test('a connection is used again, at most one request at a time', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
  const { post } = startSender(t)
  for (let count = 0; count < 5; count += 1) assert.equal((await post(receiver.url)).error, null)
  assert.equal(receiver.sockets.length, 1)
  await Promise.all(Array.from({ length: 20 }, () => post(receiver.url)))
  assert.ok(receiver.sockets.length <= 20)
})

test('what is too late once there is a connection is not sent, neither on a new one nor on one that was kept', async (t) => {
  const { url, received } = await startKeeping(t)
  const { post } = startSender(t)
  for (const body of ['new', 'kept']) {
    await assert.rejects(post(url, { body, isLate: () => true }), LocalFault)
    assert.equal((await post(url, { body: 'in time' })).error, null)
  }
  assert.deepEqual(received, ['in time', 'in time'])
})

test('localhost is answered without DNS', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
  const { post } = startSender(t, { dnsServers: ['127.0.0.1:1'] })
  assert.equal((await post(`http://localhost:${receiver.port}/`)).error, null)
  assert.equal((await post(`http://app.localhost.:${receiver.port}/`)).error, null)
})

test('an address that takes a second to connect is not given up for one that refuses', async (t) => {
  // Its queue of connections is full while it stands still, and the system tries again after a second.
  const child = spawn(process.execPath, ['-e', SLOW_RECEIVER], { stdio: ['ignore', 'pipe', 'inherit'] })
  t.after(() => child.kill('SIGKILL'))
  const [port] = await once(child.stdout, 'data')
  child.kill('SIGSTOP')
  const waiting = Array.from({ length: 8 }, () => connect(Number(port), '127.0.0.1').on('error', () => {}))
  t.after(() => waiting.forEach((socket) => void socket.destroy()))
  await sleep(200)
  const { post } = startSender(t, { allow: [...LOOPBACK, parseRange('::1/128')!], timeoutMs: 10_000 })
  const answer = post(`http://localhost:${port}/`)
  // Just until the first packet is out: the second, after a second, must find the child at work.
  await sleep(50)
  child.kill('SIGCONT')
  const { statusCode, durationMs } = await answer
  assert.equal(statusCode, 200)
  assert.ok(durationMs > 700, `it connected after ${durationMs} ms`)
})

test('a URL that the rules refuse is not contacted, even if it is in the database', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
  const { post } = startSender(t, { allow: [] })
  for (const url of [
    receiver.url,
    `http://localhost:${receiver.port}/`,
    `http://[::ffff:127.0.0.1]:${receiver.port}/`,
    'http://metadata.google.internal/',
    'ftp://example.com/',
    'http://user:secret@example.com/',
    'not a url',
  ]) {
    const outcome = await post(url)
    assertFailed(outcome, 'blocked_destination')
    assert.equal(outcome.statusCode, null)
  }
  assert.equal(receiver.sockets.length, 0)
})

test('proxies in the environment are not used', async (t) => {
  const proxy = await startTcp(t, () => {})
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
  for (const name of ['http_proxy', 'HTTP_PROXY', 'ALL_PROXY']) process.env[name] = proxy.url
  process.env.NODE_USE_ENV_PROXY = '1'
  t.after(() => {
    for (const name of ['http_proxy', 'HTTP_PROXY', 'ALL_PROXY', 'NODE_USE_ENV_PROXY']) delete process.env[name]
  })
  const { post } = startSender(t)
  assert.equal((await post(receiver.url)).error, null)
  assert.equal(proxy.sockets.length, 0)
})

// Slow receivers.

test('a receiver that never answers costs the deadline and no more', async (t) => {
  const receiver = await startTcp(t, (socket) => socket.resume())
  const { post } = startSender(t)
  const outcomes = await Promise.all(Array.from({ length: 50 }, () => post(receiver.url)))
  for (const outcome of outcomes) {
    assertFailed(outcome, 'timeout')
    assert.ok(outcome.durationMs >= TIMEOUT_MS - 5)
    assert.equal(outcome.responseBody, null)
  }
})

test('dripped headers, a dripped body and endless 1xx answers do not stretch the deadline', async (t) => {
  const drip = (start: string, drop: string) =>
    startRaw(t, start, (socket) => {
      const timer = setInterval(() => socket.write(drop), 100)
      socket.on('close', () => clearInterval(timer))
    })
  const { post } = startSender(t)
  const [headers, interim, success, failed] = await Promise.all([
    post((await drip('HTTP/1.1 200 OK\r\n', 'x')).url),
    post((await drip('', 'HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n')).url),
    post((await drip('HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nab', 'c')).url),
    post((await drip('HTTP/1.1 503 Busy\r\ncontent-length: 1000\r\n\r\nab', 'c')).url),
  ])
  assertFailed(headers, 'timeout')
  assertFailed(interim, 'timeout')
  assertFailed(failed, 'http_status')
  assert.equal(failed.statusCode, 503)
  // The receiver has said 2xx; what it would still have added to the body changes nothing.
  assert.equal(success.error, null)
  assert.equal(success.responseTruncated, true)
  assert.match(success.responseBody ?? '', /^abc+$/)
})

test('1xx answers without an end are cut off long before the deadline', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 103 Early Hints\r\n\r\n'.repeat(100))
  assertFailed(await startSender(t).post(receiver.url), 'protocol_error')
})

for (const [what, answer] of [
  ['of 1xx answers', `HTTP/1.1 102 Processing\r\n${'a:\r\n'.repeat(60)}\r\n`.repeat(5)],
  ['of one answer', `HTTP/1.1 200 OK\r\n${'a:\r\n'.repeat(300)}content-length: 0\r\n\r\n`],
] as const)
  test(`headers ${what} without number are cut off long before the deadline`, async (t) => {
    const receiver = await startRaw(t, answer)
    assertFailed(await startSender(t).post(receiver.url), 'response_too_large')
  })

test('a success with trailers without number is a failed attempt', async (t) => {
  const chunked = 'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n'
  for (const [count, error] of [
    [200, null],
    [300, 'response_too_large'],
  ] as const) {
    const receiver = await startRaw(t, `${chunked}${'a:\r\n'.repeat(count)}\r\n`)
    const outcome = await startSender(t).post(receiver.url)
    assert.deepEqual([outcome.statusCode, outcome.error, outcome.responseBody], [200, error, 'ok'])
  }
})

test('a body that stalls right after a 2xx is a success that was cut off', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n')
  const outcome = await startSender(t).post(receiver.url)
  assert.deepEqual([outcome.error, outcome.responseBody, outcome.responseTruncated], [null, '', true])
})

test('a 2xx with white space behind its length is a success', async (t) => {
  for (const [length, body] of [
    ['2 ', 'ok'],
    ['2  ', 'ok'],
    ['0 ', ''],
  ]) {
    const receiver = await startRaw(t, `HTTP/1.1 200 OK\r\ncontent-length: ${length}\r\n\r\n${body}`)
    const outcome = await startSender(t).post(receiver.url)
    assert.deepEqual([outcome.error, outcome.responseBody, outcome.responseTruncated], [null, body, false])
  }
  const short = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 2 \r\n\r\no', (socket) => socket.end())
  assertFailed(await startSender(t).post(short.url), 'connection_reset')
})

test('a 2xx whose body is not written as HTTP says is a success, with as much of it as could be read', async (t) => {
  for (const [body, read] of [
    ['2   \r\nok\r\n0   \r\n\r\n', ''],
    ['2\r\nok\r\n0 \r\n\r\n', 'ok'],
    ['2\r\nok\r\nxyz', 'ok'],
    ['2\r\nok\r\n0\r\na b: c\r\n\r\n', 'ok'],
  ]) {
    const answer = (status: number) => `HTTP/1.1 ${status} x\r\ntransfer-encoding: chunked\r\n\r\n${body}`
    const outcome = await startSender(t).post((await startRaw(t, answer(200))).url)
    assert.deepEqual([outcome.error, outcome.responseBody, outcome.responseTruncated], [null, read, true], body)
    assertFailed(await startSender(t).post((await startRaw(t, answer(500))).url), 'http_status')
  }
})

test('an answer after 1xx answers is taken', async (t) => {
  const receiver = await startRaw(
    t,
    'HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok',
  )
  const outcome = await startSender(t).post(receiver.url)
  assert.deepEqual([outcome.statusCode, outcome.error, outcome.responseBody], [200, null, 'ok'])
})

test('a 100 that nobody asked for is not taken for the answer, which comes after it', async (t) => {
  for (const [before, body] of [
    ['HTTP/1.1 100 Continue\r\n\r\n', 'ok'],
    ['HTTP/1.1 100\r\nserver: x\r\n\r\n', 'ok'],
    ['HTTP/1.1 100 Continue\r\n\r\n'.repeat(2), 'ok'],
    ['HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n', 'ok'],
    ['', 'HTTP/1.1 100 Continue'],
  ]) {
    const receiver = await startRaw(t, `${before}HTTP/1.1 200 OK\r\ncontent-length: ${body?.length}\r\n\r\n${body}`)
    const { post } = startSender(t)
    for (let count = 0; count < 2; count += 1) {
      const outcome = await post(receiver.url)
      assert.deepEqual([outcome.statusCode, outcome.error, outcome.responseBody], [200, null, body])
    }
    assert.equal(receiver.sockets.length, 1)
  }
})

test('a body is kept as it came, also where it begins like an announcement', async (t) => {
  const body = 'HTTP/1.1 100 Continue'
  const receiver = await startRaw(t, `HTTP/1.1 200 OK\r\ncontent-length: ${body.length}\r\n\r\n`, (socket) => {
    setTimeout(() => socket.write(body), 50)
  })
  assert.equal((await startSender(t).post(receiver.url)).responseBody, body)
})

// Large bodies.

test('an endless body is read to 16 KiB, counted by its status, and its socket closed at once', async (t) => {
  for (const [status, error] of [
    [200, null],
    [500, 'http_status'],
  ] as const) {
    const receiver = await startRaw(t, `HTTP/1.1 ${status} X\r\n\r\n`, (socket) => {
      const block = Buffer.alloc(65536, 'é')
      const pump = () => {
        while (!socket.destroyed && socket.write(block));
      }
      socket.on('drain', pump)
      pump()
    })
    const outcome = await startSender(t, { timeoutMs: 20_000 }).post(receiver.url)
    assert.equal(outcome.error, error)
    assert.equal(outcome.responseTruncated, true)
    assert.equal(outcome.responseBody, 'é'.repeat(8192))
    assert.ok(outcome.durationMs < 19_000, 'not when its time was over')
    await allClosed(receiver)
  }
})

test('a body is read to a thousand chunks or so, however small they are, and counted by its status', async (t) => {
  for (const [count, isCut] of [
    [1000, false],
    [5000, true],
  ] as const) {
    const chunks = `${'1\r\nx\r\n'.repeat(count)}0\r\n\r\n`
    const receiver = await startRaw(t, `HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n${chunks}`)
    const outcome = await startSender(t).post(receiver.url)
    assert.deepEqual([outcome.error, outcome.responseTruncated], [null, isCut])
    assert.equal(outcome.responseBody?.length === count, !isCut)
  }
})

test('a body of exactly 16 KiB is whole, one byte more is not, and no character is cut in two', async (t) => {
  const answer = (body: string) =>
    startRaw(t, `HTTP/1.1 200 OK\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`)
  const { post } = startSender(t)
  const exact = await post((await answer('a'.repeat(16_384))).url)
  assert.deepEqual([exact.responseBody?.length, exact.responseTruncated], [16_384, false])
  const longer = await post((await answer('a'.repeat(16_385))).url)
  assert.deepEqual([longer.responseBody?.length, longer.responseTruncated], [16_384, true])
  const split = await post((await answer(`a${'é'.repeat(9000)}`)).url)
  assert.equal(split.responseBody, `a${'é'.repeat(8191)}`)
  const unfinished = Buffer.concat([
    Buffer.from('HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\na'),
    Buffer.from([0xe2, 0x82]),
  ])
  const { responseBody, responseTruncated } = await post((await startRaw(t, unfinished)).url)
  assert.deepEqual([responseBody, responseTruncated], ['a\ufffd', false], 'one that the receiver cut is replaced')
})

test('a body in a thousand small chunks is put together', async (t) => {
  const receiver = await startRaw(
    t,
    `HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n${'3\r\nabc\r\n'.repeat(1000)}0\r\n\r\n`,
  )
  const outcome = await startSender(t).post(receiver.url)
  assert.deepEqual([outcome.responseBody, outcome.responseTruncated], ['abc'.repeat(1000), false])
})

test('a gzip bomb stays compressed', async (t) => {
  const bomb = gzipSync(Buffer.alloc(100 * 1024 * 1024))
  const head = `HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: ${bomb.length}\r\n\r\n`
  const receiver = await startRaw(t, Buffer.concat([Buffer.from(head), bomb]))
  const outcome = await startSender(t).post(receiver.url)
  assert.equal(outcome.error, null)
  assert.equal(outcome.responseTruncated, true)
  assert.ok((outcome.responseBody?.length ?? 0) <= 16_384)
})

test('a hundred endless bodies at once take less than 32 MiB', async (t) => {
  const script = `require('node:http').createServer((_, res) => {
    const block = Buffer.alloc(65536, 'x'); const pump = () => { while (!res.destroyed && res.write(block)); }
    res.on('drain', pump); pump()
  }).listen(0, '127.0.0.1', function () { console.log(this.address().port) })`
  const server = spawn(process.execPath, ['-e', script], { stdio: ['ignore', 'pipe', 'inherit'] })
  t.after(() => server.kill())
  const [port] = await once(server.stdout, 'data')
  const { post } = startSender(t, { timeoutMs: 30_000 })
  const url = `http://127.0.0.1:${Number(port)}/`
  await post(url)
  const before = process.memoryUsage().rss
  let peak = before
  const timer = setInterval(() => {
    peak = Math.max(peak, process.memoryUsage().rss)
  }, 5)
  const outcomes = await Promise.all(Array.from({ length: 100 }, () => post(url)))
  clearInterval(timer)
  for (const outcome of outcomes) assert.deepEqual([outcome.error, outcome.responseTruncated], [null, true])
  const grown = (Math.max(peak, process.memoryUsage().rss) - before) / 2 ** 20
  t.diagnostic(`grown by ${grown.toFixed(1)} MiB`)
  assert.ok(grown <= 32, `${grown} MiB`)
})

// Answers that are not HTTP.

test('answers that break the protocol are failed attempts', async (t) => {
  const ok = 'HTTP/1.1 200 OK\r\n'
  const { post } = startSender(t)
  for (const [what, answer] of Object.entries({
    'a bad status line': 'HELLO\r\n\r\n',
    'a status of two digits': 'HTTP/1.1 20 OK\r\n\r\n',
    'a status of four digits': 'HTTP/1.1 2000 OK\r\n\r\n',
    'a status below 100': 'HTTP/1.1 099 No\r\ncontent-length: 0\r\n\r\n',
    'HTTP/0.9': '<html>hello</html>',
    'another version': 'HTTP/3.0 200 OK\r\ncontent-length: 0\r\n\r\n',
    'two different lengths': `${ok}content-length: 2\r\ncontent-length: 3\r\n\r\nabc`,
    'length and chunks': `${ok}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n`,
    'a negative length': `${ok}content-length: -1\r\n\r\n`,
    'a NUL in a header': `${ok}x: a\0b\r\ncontent-length: 0\r\n\r\n`,
    'a switch of protocols': 'HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n',
    'HTTP/2': 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
    'TLS bytes': Buffer.from([0x15, 3, 1, 0, 2, 2, 0x46]),
  })) {
    const receiver = await startRaw(t, answer)
    const outcome = await post(receiver.url)
    assert.equal(outcome.error, 'protocol_error', `${what}: ${outcome.error}`)
    assertFailed(outcome, 'protocol_error')
    const said: Record<string, RegExp> = {
      'a switch of protocols': /another protocol/,
      'a NUL in a header': /Invalid header value char/,
    }
    assert.match(outcome.errorMessage ?? '', said[what] ?? /not valid HTTP/, what)
  }
})

test('headers of more than 16 KiB are a failed attempt', async (t) => {
  const { post } = startSender(t)
  for (const headers of [`x: ${'a'.repeat(80 * 1024)}\r\n`, 'some-header: 0123456789\r\n'.repeat(1000)]) {
    const receiver = await startRaw(t, `HTTP/1.1 200 OK\r\n${headers}content-length: 0\r\n\r\n`)
    assertFailed(await post(receiver.url), 'response_too_large')
  }
})

for (const [what, head, filler] of [
  ['an extension of a chunk', 'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;', 'a'],
  [
    'extensions of many chunks',
    'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n',
    `1;${'x'.repeat(15_000)}\r\na\r\n`,
  ],
  ['the size of a chunk', 'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n', '0'],
  ['a reason', 'HTTP/1.1 200 ', 'a'],
  ['white space before a header’s value', 'HTTP/1.1 200 OK\r\nx:', ' '],
  ['empty lines before the status', '', '\r\n'],
] as const)
  test(`${what} that does not end is read for 128 KiB or so, and is a failed attempt`, async (t) => {
    const block = Buffer.alloc(65_536 - (65_536 % filler.length), filler)
    const receiver = await startRaw(t, head, (socket) => {
      const pump = () => {
        while (!socket.destroyed && socket.write(block));
      }
      socket.on('drain', pump)
      pump()
    })
    const outcome = await startSender(t, { timeoutMs: 20_000 }).post(receiver.url)
    assert.equal(outcome.error, 'response_too_large')
    await allClosed(receiver)
    // What the buffers between the two hold was sent as well.
    const [sent = 0] = receiver.sockets.map(({ bytesWritten }) => bytesWritten)
    assert.ok(sent < 16 * 1024 * 1024, `${sent} bytes`)
  })

test('so is one over TLS', async (t) => {
  const server = createTlsServer({ key: KEY, cert: TRUSTED })
  const receiver = await listen(server, 'secureConnection', (socket: Socket) => {
    socket.on('error', () => {})
    onRequest(socket, () => {
      socket.write('HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;')
      const pump = () => {
        while (!socket.destroyed && socket.write('a'.repeat(1000)));
      }
      socket.on('drain', pump)
      pump()
    })
  })
  t.after(() => receiver.close())
  const outcome = await startSender(t, { timeoutMs: 20_000 }).post(receiver.url.replace('http:', 'https:'))
  assert.equal(outcome.error, 'response_too_large')
})

test('each request of a connection may be answered by so much', async (t) => {
  const answer = `HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n${'a'.repeat(9000)}`
  const receiver = await startRaw(t, answer)
  const { post } = startSender(t)
  for (let nth = 0; nth < 150; nth++) assert.equal((await post(receiver.url)).error, null)
  assert.equal(receiver.sockets.length, 1)
})

test('statuses that nobody has defined are recorded and fail', async (t) => {
  const { post } = startSender(t)
  for (const status of [400, 404, 410, 429, 500, 503, 600, 999]) {
    const receiver = await startRaw(t, `HTTP/1.1 ${status} Whatever\r\ncontent-length: 3\r\n\r\nwhy`)
    const outcome = await post(receiver.url)
    assertFailed(outcome, 'http_status')
    assert.deepEqual([outcome.statusCode, outcome.responseBody, outcome.responseTruncated], [status, 'why', false])
  }
})

test('redirects are not followed', async (t) => {
  const target = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
  const { post } = startSender(t)
  for (const status of [300, 301, 302, 303, 304, 307, 308]) {
    for (const location of [target.url, 'file:///etc/passwd', '/hook']) {
      const receiver = await startRaw(
        t,
        `HTTP/1.1 ${status} Moved\r\nlocation: ${location}\r\nconnection: close\r\n${status === 304 ? '' : 'content-length: 0\r\n'}\r\n`,
        (socket) => socket.end(),
      )
      const outcome = await post(receiver.url)
      assertFailed(outcome, 'redirect')
      assert.equal(outcome.statusCode, status)
      assert.equal(receiver.sockets.length, 1)
    }
  }
  assert.equal(target.sockets.length, 0)
})

test('Retry-After is handed on as it came, the first one of several', async (t) => {
  const { post } = startSender(t)
  const date = 'Wed, 21 Oct 2099 07:28:00 GMT'
  for (const [headers, expected] of [
    ['', null],
    ['retry-after: 5\r\n', '5'],
    ['Retry-After: 1.5\r\n', '1.5'],
    [`retry-after: ${date}\r\n`, date],
    ['retry-after: -1\r\n', '-1'],
    ['retry-after: soon\r\n', 'soon'],
    ['retry-after: 7\r\nretry-after: 9\r\n', '7'],
  ] as const) {
    const receiver = await startRaw(t, `HTTP/1.1 429 Slow\r\n${headers}content-length: 0\r\n\r\n`)
    assert.equal((await post(receiver.url)).retryAfter, expected)
  }
})

test('a body of any bytes becomes text that JSON and Postgres can hold', async (t) => {
  const body = Buffer.concat([
    Buffer.from('a\0b'),
    Buffer.from([0xff, 0xc3, 0x28, 0xed, 0xa0, 0x80]),
    Buffer.from('\u202e😀é'),
  ])
  const head = Buffer.from(`HTTP/1.1 200 OK\r\ncontent-length: ${body.length}\r\n\r\n`)
  const receiver = await startRaw(t, Buffer.concat([head, body]))
  const { responseBody } = await startSender(t).post(receiver.url)
  assert.match(responseBody ?? '', /^ab\ufffd+\(\ufffd+\u202e😀é$/u)
  assert.ok(responseBody?.isWellFormed())
  assert.equal(JSON.parse(JSON.stringify(responseBody)), responseBody)
})

// Connections that break.

test('a refused connection is a failed attempt', async (t) => {
  assertFailed(await startSender(t).post('http://127.0.0.1:1/'), 'connection_refused')
})

test('a connection that breaks before or within the answer is a failed attempt', async (t) => {
  const { post } = startSender(t)
  const receivers = [
    await startTcp(t, (socket) => socket.resetAndDestroy()),
    await startTcp(t, (socket) => socket.end()),
    await startTcp(t, (socket) => onRequest(socket, () => socket.resetAndDestroy())),
    await startTcp(t, (socket) => onRequest(socket, () => socket.end())),
    await startRaw(t, 'HTTP/1.1 200 OK\r\n', (socket) => socket.end()),
  ]
  for (const receiver of receivers) {
    const outcome = await post(receiver.url)
    assertFailed(outcome, 'connection_reset')
    assert.equal(outcome.statusCode, null)
    assert.equal(receiver.sockets.length, 1, 'a new connection is not tried twice')
  }
})

test('a 2xx that the receiver breaks off is not a delivery', async (t) => {
  const { post } = startSender(t)
  const end = (socket: Socket) => socket.end()
  const reset = (socket: Socket) => socket.resetAndDestroy()
  const rests = {
    'content-length: 100\r\n\r\nabc': [end, reset],
    'transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n': [end, reset],
    // Such a body ends with its connection.
    '\r\nabc': [reset],
  }
  for (const connection of ['keep-alive', 'close'])
    for (const [rest, ways] of Object.entries(rests))
      for (const breakOff of ways) {
        const start = `HTTP/1.1 200 OK\r\nconnection: ${connection}\r\n${rest}`
        // The reset takes with it what has not been read: between a timer and an immediate everything is.
        const receiver = await startRaw(t, start, (socket) => setTimeout(() => setImmediate(breakOff, socket), 50))
        const outcome = await post(receiver.url)
        assertFailed(outcome, 'connection_reset')
        assert.deepEqual([outcome.statusCode, outcome.responseBody, outcome.responseTruncated], [200, 'abc', true])
      }
})

test('a body that ends with the connection is whole', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.0 200 OK\r\n\r\nall of it', (socket) => socket.end())
  const outcome = await startSender(t).post(receiver.url)
  assert.deepEqual([outcome.error, outcome.responseBody, outcome.responseTruncated], [null, 'all of it', false])
})

test('a receiver that answers before it has read the request is taken at its word', async (t) => {
  const receiver = await startTcp(t, (socket) => socket.write('HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n'))
  const outcome = await startSender(t).post(receiver.url, { body: 'x'.repeat(1_000_000) })
  assertFailed(outcome, 'http_status', 'protocol_error', 'connection_reset')
})

for (const tls of [false, true]) {
  test(`what a receiver has not read when it answers${tls ? ' over TLS' : ''} holds up no other request, nor memory`, async (t) => {
    // More than the system takes for a socket.
    const body = 'x'.repeat(16_000_000)
    const server = tls ? createTlsServer({ key: KEY, cert: TRUSTED }) : createTcpServer()
    const receiver = await listen(server, tls ? 'secureConnection' : 'connection', (socket) => {
      socket.on('error', () => {})
      socket.once('readable', () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok'))
    })
    t.after(() => receiver.close())
    const { post } = startSender(t)
    const url = tls ? receiver.url.replace('http:', 'https:') : receiver.url
    for (let nth = 0; nth < 3; nth++) assert.equal((await post(url, { body })).error, null)
    assert.equal(receiver.sockets.length, 3)
  })
}

// Connections that are used again.

test('a kept connection that the receiver closes as the next request arrives is not a failed attempt', async (t) => {
  for (const breakOff of [(socket: Socket) => socket.end(), (socket: Socket) => socket.resetAndDestroy()]) {
    let requests = 0
    const receiver = await startTcp(t, (socket) => {
      let answered = false
      onRequest(socket, () => {
        requests += 1
        if (answered) breakOff(socket)
        else socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
        answered = true
      })
    })
    const { post } = startSender(t)
    assert.equal((await post(receiver.url)).error, null)
    assert.equal((await post(receiver.url)).error, null)
    assert.deepEqual([requests, receiver.sockets.length], [3, 2])
  }
})

test('a connection over TLS is kept when its answer is there before TLS says that the request has been sent', async (t) => {
  const answered = new Int32Array(new SharedArrayBuffer(4))
  const receiver = new Worker(TLS_RECEIVER, { eval: true, workerData: { key: KEY, cert: TRUSTED, answered } })
  t.after(() => receiver.terminate())
  const [port] = await once(receiver, 'message')
  const { post } = startSender(t)
  const url = `https://127.0.0.1:${port}/`
  assert.equal((await post(url)).responseBody, '1')
  for (let nth = 0; nth < 5; nth++) {
    const before = Atomics.load(answered, 0)
    const outcome = new Promise<Outcome>((resolve) => setImmediate(() => resolve(post(url))))
    // It goes out in the turn after that, in which nothing else is done until the receiver has answered.
    const wait = () => assert.notEqual(Atomics.wait(answered, 0, before, TIMEOUT_MS / 2), 'timed-out')
    setImmediate(() => setImmediate(wait))
    assert.equal((await outcome).responseBody, '1')
  }
})

test('the second try is the last', async (t) => {
  let requests = 0
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, () => {
      requests += 1
      if (requests > 1) socket.resetAndDestroy()
      else socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
    }),
  )
  const { post } = startSender(t)
  assert.equal((await post(receiver.url)).error, null)
  assertFailed(await post(receiver.url), 'connection_reset')
  assert.equal(requests, 3)
})

test('a request that the receiver had in hand for a second is not sent again', async (t) => {
  let requests = 0
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, () => {
      requests += 1
      if (requests > 1) setTimeout(() => socket.resetAndDestroy(), 1100)
      else socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
    }),
  )
  const { post } = startSender(t, { timeoutMs: 3000 })
  assert.equal((await post(receiver.url)).error, null)
  assert.equal((await post(receiver.url)).error, 'connection_reset')
  assert.equal(requests, 2)
})

test('a request that the receiver has begun to answer is not sent again', async (t) => {
  const answers: [answer: string, error: AttemptError | null][] = [
    ['HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n', 'connection_reset'],
    ['HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n', null],
  ]
  for (const [answer, error] of answers) {
    let requests = 0
    const receiver = await startTcp(t, (socket) =>
      onRequest(socket, () => {
        requests += 1
        if (requests === 1) socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
        else socket.write(answer, () => error === 'connection_reset' && socket.resetAndDestroy())
      }),
    )
    const { post } = startSender(t)
    assert.equal((await post(receiver.url)).error, null)
    assert.equal((await post(receiver.url)).error, error)
    assert.equal(requests, 2)
  }
})

test('an answer that came while the process stood still counts, even if the attempt’s time is up', async (t) => {
  const answered = new Int32Array(new SharedArrayBuffer(4))
  const receiver = new Worker(TLS_RECEIVER, { eval: true, workerData: { key: KEY, cert: TRUSTED, answered } })
  t.after(() => receiver.terminate())
  const [port] = await once(receiver, 'message')
  const { post } = startSender(t, { timeoutMs: 500 })
  const url = `https://127.0.0.1:${port}/`
  assert.equal((await post(url)).responseBody, '1')
  const begun = performance.now()
  const outcome = post(url)
  // As above, but until the attempt's time is up, too.
  setImmediate(() =>
    setImmediate(() => {
      assert.notEqual(Atomics.wait(answered, 0, 1, TIMEOUT_MS), 'timed-out')
      while (performance.now() < begun + 600);
    }),
  )
  const { error, statusCode } = await outcome
  assert.deepEqual({ error, statusCode }, { error: null, statusCode: 200 })
})

test('an attempt that is over leaves no timer', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
  const { post } = startSender(t)
  const timers = () => process.getActiveResourcesInfo().filter((kind) => kind === 'Timeout').length
  await post(receiver.url)
  const before = timers()
  for (let nth = 0; nth < 10; nth++) await post(receiver.url)
  assert.ok(timers() <= before + 1, `${timers()} after ${before}`)
})

test('a receiver that closes idle connections at any moment causes no failed attempt', async (t) => {
  const receiver = await startTcp(t, (socket) => {
    let timer: NodeJS.Timeout
    onRequest(socket, () => {
      clearTimeout(timer)
      socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
      timer = setTimeout(() => socket.destroy(), 5)
    })
  })
  const { post } = startSender(t)
  const flows = Array.from({ length: 20 }, async (_, flow) => {
    for (let count = 0; count < 60; count += 1) {
      assert.equal((await post(receiver.url)).error, null)
      await new Promise((resolve) => setTimeout(resolve, 3 + ((flow + count) % 5)))
    }
  })
  await Promise.all(flows)
  t.diagnostic(`${receiver.sockets.length} connections for 1200 requests`)
  assert.ok(receiver.sockets.length > 20)
})

test('a kept connection that is found to be of no use before the request is written is not a failed attempt', async (t) => {
  for (const spoil of [
    (socket: Socket) => socket.resetAndDestroy(),
    (socket: Socket) => socket.write('nobody asked for this'),
  ]) {
    let requests = 0
    const receiver = await startTcp(t, (socket) =>
      onRequest(socket, () => {
        requests += 1
        socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
      }),
    )
    const { post } = startSender(t)
    assert.equal((await post(receiver.url)).error, null)
    // From a timer, after which the event loop looks at connections first.
    await sleep(10)
    spoil(receiver.sockets[0]!)
    assert.equal((await post(receiver.url)).error, null)
    assert.deepEqual([requests, receiver.sockets.length], [2, 2])
  }
})

test('what is left of the last answer on a kept connection is not taken for an answer to the next request', async (t) => {
  let requests = 0
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, () => {
      requests += 1
      // A body that a 204 cannot have, and that comes late.
      if (requests === 2) socket.write('thank you')
      socket.write('HTTP/1.1 204 No Content\r\n\r\n')
    }),
  )
  const { post } = startSender(t)
  for (let count = 0; count < 2; count += 1) {
    const { statusCode, error } = await post(receiver.url)
    assert.deepEqual([statusCode, error], [204, null])
  }
  assert.deepEqual([requests, receiver.sockets.length], [3, 2])
})

test('a 408 for a kept connection that was idle is not taken for an answer to the next request; one for a request is', async (t) => {
  let requests = 0
  let laterMs = 0
  let before = ''
  let connection = 'close'
  const receiver = await startTcp(t, (socket) => {
    let answered = false
    onRequest(socket, () => {
      requests += 1
      const late = `${before}HTTP/1.1 408 Request Timeout\r\nconnection: ${connection}\r\ncontent-length: 0\r\n\r\n`
      if (answered) setTimeout(() => socket.write(late), laterMs)
      else if (requests === 5) socket.end(late)
      else socket.write('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
      answered = true
    })
  })
  const { post } = startSender(t, { timeoutMs: 3000 })
  const statusOf = async () => (await post(receiver.url)).statusCode
  assert.equal(await statusOf(), 200)
  assert.equal(await statusOf(), 200)
  assert.deepEqual([requests, receiver.sockets.length], [3, 2])
  laterMs = 1100
  assert.equal(await statusOf(), 408, 'after it had the request for a second')
  assert.equal(await statusOf(), 408, 'on a new connection')
  assert.equal(requests, 5)
  laterMs = 0
  assert.equal(await statusOf(), 200)
  before = 'HTTP/1.1 102 Processing\r\n\r\n'
  assert.equal(await statusOf(), 408, 'after it had begun to answer')
  before = ''
  assert.equal(await statusOf(), 200)
  connection = 'keep-alive'
  assert.equal(await statusOf(), 408, 'on a connection that stays')
  assert.equal(requests, 9)
})

test('of many connections no more are kept than others leave files for', async (t) => {
  let requests = 0
  // Nobody is answered before all are there.
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, () => {
      if (++requests < 8) return
      for (const one of receiver.sockets) one.write('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
    }),
  )
  const { post } = startSender(t, { maxConnections: 2 })
  const outcomes = await Promise.all(Array.from({ length: 8 }, () => post(receiver.url)))
  assert.ok(outcomes.every(({ statusCode }) => statusCode === 200))
  await waitFor(() => receiver.sockets.filter(({ closed }) => !closed).length === 2)
})

test('connection: close and Keep-Alive hints are respected', async (t) => {
  const { post } = startSender(t)
  const closing = await startRaw(t, 'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n', (s) => s.end())
  for (let count = 0; count < 3; count += 1) assert.equal((await post(closing.url)).error, null)
  assert.equal(closing.sockets.length, 3)
  // A second is too short for a request to be sure to come before it is over.
  const hinting = await startRaw(t, 'HTTP/1.1 200 OK\r\nkeep-alive: timeout=1\r\ncontent-length: 0\r\n\r\n')
  for (let count = 0; count < 3; count += 1) assert.equal((await post(hinting.url)).error, null)
  assert.equal(hinting.sockets.length, 3)
})

/** A receiver that answers its first five requests when all of them are there. */
async function startBurst(t: TestContext, answer: string): Promise<TcpReceiver> {
  let requests = 0
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, () => {
      if (++requests > 5) socket.write(answer)
      else if (requests === 5) for (const one of receiver.sockets) one.write(answer)
    }),
  )
  return receiver
}

test('one unused connection to a receiver stays open, however many a burst has needed', async (t) => {
  const answer = 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'
  const [receiver, busy] = [await startBurst(t, answer), await startBurst(t, answer)]
  const { post } = startSender(t)
  // Its connection is closed when the others of a burst are long gone.
  const hinting = await startRaw(t, answer.replace('content', 'keep-alive: timeout=8\r\ncontent'))
  const bursts = Array.from({ length: 5 }, () => [post(receiver.url), post(busy.url)])
  await Promise.all([post(hinting.url), ...bursts.flat()])
  // One that gets a request now and then needs one.
  await waitFor(async () => (await post(busy.url)) && hinting.sockets.every(({ closed }) => closed), {
    intervalMs: 200,
  })
  for (const { url, sockets } of [receiver, busy]) {
    assert.equal(sockets.filter(({ closed }) => !closed).length, 1)
    assert.equal((await post(url)).error, null)
    assert.equal(sockets.length, 5)
  }
})

test('all connections of a burst stay open for a moment, and serve the next one', async (t) => {
  const answer = 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'
  const receiver = await startBurst(t, answer)
  // The unused ones are looked at before its connection is closed.
  const hinting = await startRaw(t, answer.replace('content', 'keep-alive: timeout=4\r\ncontent'))
  const moment = performance.now() + 60_000
  t.mock.method(performance, 'now', () => moment)
  const { post } = startSender(t)
  await Promise.all([post(hinting.url), ...Array.from({ length: 5 }, () => post(receiver.url))])
  await allClosed(hinting)
  assert.equal(receiver.sockets.filter(({ closed }) => !closed).length, 5)
})

test('where there may be no more connections, the one that was unused for longest is closed before another opens', async (t) => {
  const answer = 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'
  const [oldest, other] = [await startRaw(t, answer), await startRaw(t, answer)]
  const receiver = await startTcp(t, (socket) =>
    onRequest(socket, () => void allClosed(oldest).then(() => socket.write(answer))),
  )
  const { post } = startSender(t, { maxConnections: 2 })
  for (const { url } of [oldest, other, receiver]) assert.equal((await post(url)).error, null)
  assert.equal(other.sockets[0]!.closed, false)
})

test('an unused connection stays open for no longer than a minute after it was made', async (t) => {
  const answer = 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'
  const receiver = await startRaw(t, answer)
  // Unused for longer than these, and not for as long as one may be.
  const hinting = await startRaw(t, answer.replace('content', 'keep-alive: timeout=4\r\ncontent'))
  const now = performance.now.bind(performance)
  let seconds = 0
  t.mock.method(performance, 'now', () => now() + seconds * 1000)
  const { post } = startSender(t)
  for (seconds of [0, 40]) await post(receiver.url)
  assert.equal(receiver.sockets.length, 1)
  seconds = 61
  await post(hinting.url)
  await allClosed(hinting)
  assert.ok(receiver.sockets[0]!.closed)
})

const noKernelTimers = process.platform !== 'linux' && 'only Linux shows them'
test('an unused connection is probed, so that one that leads nowhere any more is found out', {
  skip: noKernelTimers,
}, async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
  const proxies = [await startProxy(t), await startProxy(t, 200, { tls: true })]
  for (const proxy of [undefined, ...proxies]) {
    const { post } = startSender(t, proxy && { proxyUrl: proxy.url })
    assert.equal((await post(proxy ? `http://a.example.test:${receiver.port}/` : receiver.url)).error, null)
    const port = (number = 0) => number.toString(16).toUpperCase().padStart(4, '0')
    const [{ remotePort, localPort } = {}] = (proxy ?? receiver).sockets
    const ends = `0100007F:${port(remotePort)} 0100007F:${port(localPort)}`
    // Of its states, 01 is an open connection; of its timers, 02 the one for probes (proc_net_tcp.txt of the kernel).
    const probed = new RegExp(`${ends} 01 [0-9A-F:]+ 02:`)
    await waitFor(async () => probed.test(await readFile('/proc/net/tcp', 'latin1')), { what: 'a timer for probes' })
  }
})

test('a receiver that serves one connection after the other gets deliveries that come together in one attempt each', async (t) => {
  const lined: Socket[] = []
  const serve = (socket: Socket) => {
    onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'))
    socket.once('close', () => {
      lined.shift()
      if (lined[0]) serve(lined[0])
    })
  }
  const receiver = await startTcp(t, (socket) => {
    if (lined.push(socket) === 1) serve(socket)
  })
  const { post } = startSender(t, { timeoutMs: 40_000 })
  for (const { error } of await Promise.all([post(receiver.url), post(receiver.url)])) assert.equal(error, null)
  assert.equal(receiver.sockets.length, 2)
})

test('a connection that is always in use follows its name to another address after a minute', async (t) => {
  let moved = false
  const arrived: string[] = []
  const serve = (where: string) => (socket: Socket) =>
    onRequest(socket, () => {
      arrived.push(where)
      socket.write('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
    })
  const old = await startTcp(t, serve('old'))
  const { close } = await listenTcp(serve('new'), '127.0.0.2', old.port)
  t.after(close)
  const dns = await startDns((_name, type) => ({
    addresses: type === 'A' ? [moved ? '127.0.0.2' : '127.0.0.1'] : [],
  }))
  t.after(() => dns.close())
  const now = performance.now.bind(performance)
  let seconds = 0
  t.mock.method(performance, 'now', () => now() + seconds * 1000)
  const { post } = startSender(t, { dnsServers: [dns.address] })
  for (; seconds <= 66; seconds += 3) {
    assert.equal((await post(`http://hooks.example.test:${old.port}/`)).error, null)
    moved = true
  }
  assert.equal(arrived.at(-1), 'new')
  assert.ok(arrived.filter((where) => where === 'old').length >= 20, 'used again until then')
})

test('closing the sender closes its unused connections', async (t) => {
  const receiver = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')
  const { post, close } = startSender(t)
  const areClosed = () => Promise.race([allClosed(receiver).then(() => true), sleep(2000)])
  await post(receiver.url)
  await close()
  assert.ok(await areClosed(), 'long before an unused connection would be closed otherwise')
  // What is under way ends first.
  await post(receiver.url)
  assert.ok(await areClosed())
})

test('whoever chooses the host names does not choose how many connections stay open', async (t) => {
  const receiver = await listenTcp(
    (socket) => onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')),
    '0.0.0.0',
  )
  t.after(() => receiver.close())
  const { post } = startSender(t)
  const hosts = Array.from({ length: 1500 }, (_, index) => `127.0.${1 + (index >> 8)}.${index & 255}`)
  let most = 0
  while (hosts.length > 0) {
    const outcomes = hosts.splice(0, 50).map((host) => post(`http://${host}:${receiver.port}/`))
    for (const { error } of await Promise.all(outcomes)) assert.equal(error, null)
    most = Math.max(most, receiver.sockets.filter((socket) => !socket.closed).length)
  }
  assert.equal(receiver.sockets.length, 1500)
  // Those of the last fifty, too, and some whose end this side has not seen yet.
  assert.ok(most < 1024 + 200, `${most} were open at once`)
})

// TLS.

test('a certificate of a trusted authority is accepted and its connection used again', async (t) => {
  const receiver = await startTls(t, { cert: TRUSTED })
  const { post } = startSender(t)
  for (const host of ['127.0.0.1', 'localhost', '127.0.0.1']) {
    const outcome = await post(receiver.url.replace('127.0.0.1', host))
    assert.deepEqual([outcome.error, outcome.responseBody], [null, 'ok'])
  }
  assert.equal(receiver.sockets.length, 2)
})

const answerAndClose = (socket: Socket) =>
  onRequest(socket, () => socket.end('HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok'))

function garbageCollector(): () => void {
  setFlagsFromString('--expose-gc')
  return runInNewContext('gc')
}

/** Has a server give a new session with each resumed one, as most do in TLS 1.3, and Node's only if asked behind its API. */
function renewTickets(server: object): void {
  const { _sharedCreds } = server as { _sharedCreds: { context: { enableTicketKeyCallback(): void } } }
  _sharedCreds.context.enableTicketKeyCallback()
  const [nameAndIv, key] = [Buffer.alloc(16), Buffer.alloc(32)]
  Object.assign(_sharedCreds.context, {
    onticketkeycallback: (_name: Buffer, _iv: Buffer, isNew: boolean) => [
      isNew ? 1 : 2,
      key,
      nameAndIv,
      nameAndIv,
      nameAndIv,
    ],
  })
}

for (const maxVersion of ['TLSv1.2', 'TLSv1.3'] as const)
  test(`a receiver's ${maxVersion} session serves its later connections for an hour, whatever is collected as garbage`, async (t) => {
    const resumed: boolean[] = []
    const server = createTlsServer({ key: KEY, cert: TRUSTED, maxVersion })
    renewTickets(server)
    const receiver = await listen(server, 'secureConnection', (socket: TLSSocket) => {
      resumed.push(socket.isSessionReused())
      answerAndClose(socket)
    })
    t.after(() => receiver.close())
    const collect = garbageCollector()
    const now = performance.now.bind(performance)
    let minutes = 0
    t.mock.method(performance, 'now', () => now() + minutes * 60_000)
    const { post } = startSender(t)
    for (minutes of [0, 1, 59, 61, 62]) {
      assert.equal((await post(receiver.url.replace('http:', 'https:'))).error, null)
      await allClosed(receiver)
      collect()
    }
    assert.deepEqual(resumed, [false, true, true, false, true])
  })

/** Unlike Node, it brings as many tickets as it is told to. It answers each request. */
async function startOpenssl(t: TestContext, ...options: string[]) {
  const files = await mkdtemp(join(tmpdir(), 'waybill-test-'))
  t.after(() => rm(files, { recursive: true }))
  const [cert, key] = [join(files, 'cert'), join(files, 'key')] as const
  await Promise.all([writeFile(cert, TRUSTED), writeFile(key, KEY)])
  const server = spawn('openssl', ['s_server', '-accept', '127.0.0.1:0', '-cert', cert, '-key', key, ...options])
  t.after(() => server.kill())
  let said = ''
  server.stdout.setEncoding('latin1').on('data', (text: string) => {
    said += text
    if (text.includes(BODY)) server.stdin.write('HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n')
  })
  const port = () => /^ACCEPT .*:(\d+)$/m.exec(said)?.[1]
  await waitFor(() => port() !== undefined)
  return `https://127.0.0.1:${port()}/`
}

const openssl = { skip: spawnSync('openssl', ['version']).status === 0 ? false : 'needs openssl' }

test('a receiver brings a few session tickets, not hundreds', openssl, async (t) => {
  const { post } = startSender(t)
  assert.equal((await post(await startOpenssl(t, '-num_tickets', '4'))).error, null)
  assertFailed(await post(await startOpenssl(t, '-num_tickets', '200')), 'protocol_error')
})

test('the sessions of many receivers take no more memory than they are long', async (t) => {
  const dns = await startDns((_name, type) => ({ addresses: type === 'A' ? ['127.0.0.1'] : [] }))
  t.after(() => dns.close())
  const receiver = await listen(createTlsServer({ key: KEY, cert: TRUSTED }), 'secureConnection', answerAndClose)
  t.after(() => receiver.close())
  const { post } = startSender(t, { dnsServers: [dns.address] })
  const collect = garbageCollector()
  const held = () => {
    collect()
    return process.memoryUsage().arrayBuffers
  }
  const openTo = async (name: string) => {
    assert.equal((await post(`https://${name}.example.test:${receiver.port}/`)).error, null)
    // What others do meanwhile, so that no two sessions come out of the same piece of Node's pool.
    for (let nth = 0; nth < 64; nth++) Buffer.from('x'.repeat(1024))
  }
  await openTo('first')
  const before = held()
  for (let nth = 0; nth < 200; nth++) await openTo(`n${nth}`)
  receiver.sockets.length = 0
  await waitFor(() => (held() - before) / 200 < 8192, { what: 'the memory of closed connections to be freed' })
})

test('a session that a receiver cannot cope with is offered once', async (t) => {
  const options = { key: KEY, cert: TRUSTED, maxVersion: 'TLSv1.2', secureOptions: constants.SSL_OP_NO_TICKET } as const
  const server = createTlsServer(options)
  const receiver = await listen(server, 'secureConnection', answerAndClose)
  t.after(() => receiver.close())
  const known = new Set<string>()
  server.on('newSession', (id, _session, done) => {
    known.add(id.toString('hex'))
    done()
  })
  server.on('resumeSession', (id, answer) => answer(known.has(id.toString('hex')) ? new Error('broken') : null, null))
  const { post } = startSender(t)
  const errors: Outcome['error'][] = []
  for (let nth = 0; nth < 4; nth++) {
    errors.push((await post(receiver.url.replace('http:', 'https:'))).error)
    await allClosed(receiver)
  }
  assert.deepEqual(errors, [null, 'connection_reset', null, 'connection_reset'])
})

test('a receiver whose certificate was refused does not get past it with a session', async (t) => {
  for (const cert of [OTHER_HOST, EXPIRED])
    for (const maxVersion of ['TLSv1.2', 'TLSv1.3'] as const) {
      const receiver = await startTls(t, { cert, maxVersion })
      const { post } = startSender(t)
      for (let nth = 0; nth < 3; nth++) assertFailed(await post(receiver.url), 'tls_error')
    }
})

test('TLS faults are failed attempts that name the fault', async (t) => {
  const { post } = startSender(t)
  const faults: [TlsOptions, RegExp][] = [
    [{ cert: EXPIRED }, /expired/],
    [{ cert: OTHER_HOST }, /not for this host name/],
    [{ cert: SELF_SIGNED }, /self-signed/],
    [
      { cert: TRUSTED, minVersion: 'TLSv1', maxVersion: 'TLSv1.1', ciphers: 'ALL@SECLEVEL=0' },
      /neither TLS 1.2 nor 1.3/,
    ],
    [{ cert: TRUSTED, ALPNProtocols: ['h2'] }, /does not speak HTTP.1.1/],
    [{ cert: TRUSTED, maxVersion: 'TLSv1.2', ciphers: 'ECDHE-RSA-AES128-SHA' }, /refused the TLS handshake/],
  ]
  for (const [options, message] of faults) {
    const receiver = await startTls(t, options)
    const outcome = await post(receiver.url)
    assertFailed(outcome, 'tls_error')
    assert.match(outcome.errorMessage ?? '', message)
  }
  const plain = await startTcp(t, (socket) => socket.write('HTTP/1.1 400 Bad Request\r\n\r\n'))
  const outcome = await post(plain.url.replace('http:', 'https:'))
  assertFailed(outcome, 'tls_error')
  assert.match(outcome.errorMessage ?? '', /does not speak TLS/)
})

/** Requests to begin anew, of four bytes each, which OpenSSL passes over: 256 KiB of them. */
const HELLO_REQUESTS = Buffer.concat(
  Array.from({ length: 16 }, () => Buffer.concat([Buffer.from([22, 3, 3, 0x40, 0]), Buffer.alloc(0x4000)])),
)

test('a handshake that does not end is ended by what it brings in', async (t) => {
  const receiver = await startTcp(t, (socket) =>
    socket.once('data', () => {
      const pump = () => {
        while (!socket.destroyed && socket.write(HELLO_REQUESTS));
      }
      socket.on('drain', pump)
      pump()
    }),
  )
  const { post } = startSender(t, { timeoutMs: 20_000 })
  const outcome = await post(receiver.url.replace('http:', 'https:'))
  assertFailed(outcome, 'response_too_large')
  assert.match(outcome.errorMessage ?? '', /TLS handshake/)
  await allClosed(receiver)
})

test('so is one with a receiver that had one before', async (t) => {
  const server = createTlsServer({ key: KEY, cert: TRUSTED }, answerAndClose)
  const receiver = await startTcp(t, (socket) => {
    if (receiver.sockets.length === 1) server.emit('connection', socket)
    else socket.once('data', () => socket.write(HELLO_REQUESTS))
  })
  const { post } = startSender(t)
  const url = receiver.url.replace('http:', 'https:')
  assert.equal((await post(url)).error, null)
  assertFailed(await post(url), 'response_too_large')
})

test('the server name goes without the dot that a URL may have at its end, and an address is none', async (t) => {
  const names: unknown[] = []
  const server = createTlsServer({ key: KEY, cert: TRUSTED })
  const receiver = await listen(server, 'secureConnection', (socket: TLSSocket) => {
    names.push(socket.servername)
    onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok'))
  })
  t.after(() => receiver.close())
  const { post } = startSender(t)
  for (const host of ['localhost.', '127.0.0.1'])
    assert.equal((await post(`https://${host}:${receiver.port}/`)).error, null)
  assert.deepEqual(names, ['localhost', false])
})

test('a receiver that wants a certificate of us is a TLS fault', async (t) => {
  for (const [maxVersion, message] of [
    ['TLSv1.2', /refused the TLS handshake/],
    ['TLSv1.3', /wants a TLS certificate/],
  ] as const) {
    const receiver = await startTls(t, { cert: TRUSTED, ca: AUTHORITY, requestCert: true, maxVersion })
    const outcome = await startSender(t).post(receiver.url)
    assertFailed(outcome, 'tls_error')
    assert.match(outcome.errorMessage ?? '', message)
  }
})

test('a handshake that stalls or breaks is a failed attempt', async (t) => {
  const { post } = startSender(t)
  for (const [onConnection, error, message] of [
    [(socket) => socket.resume(), 'timeout', /TLS handshake not made, in time/],
    [(socket) => socket.once('data', () => socket.resetAndDestroy()), 'connection_reset', /during the TLS handshake/],
    [(socket) => socket.once('data', () => socket.end()), 'connection_reset', /during the TLS handshake/],
  ] as [(socket: Socket) => void, AttemptError, RegExp][]) {
    const receiver = await startTcp(t, onConnection)
    const outcome = await post(receiver.url.replace('http:', 'https:'))
    assertFailed(outcome, error)
    assert.match(outcome.errorMessage ?? '', message)
  }
})

// Shutdown.

test('a shutdown interrupts attempts at any stage without an outcome, and those that come later', async (t) => {
  const { post, interrupt } = startSender(t)
  const silent = await startTcp(t, (socket) => socket.resume())
  const stalled = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab')
  const attempts = [silent.url, silent.url.replace('http:', 'https:'), stalled.url].map((url) => post(url))
  setTimeout(() => interrupt(new Error('shutting down')), 100)
  for (const attempt of attempts) await assert.rejects(attempt, { message: 'shutting down' })
  await allClosed(silent)
  await allClosed(stalled)
  await assert.rejects(post(silent.url), { message: 'shutting down' })
})

// The egress proxy.

async function startProxy(
  t: TestContext,
  status = 200,
  { tls = false, headers = '', credentials = 'user:p%40ss@' } = {},
) {
  const asked: { target: string; authorization: string | undefined }[] = []
  const server = tls ? createHttpsServer({ key: KEY, cert: TRUSTED }) : createHttpServer()
  server.on('connect', (request, client: Socket) => {
    asked.push({ target: request.url ?? '', authorization: request.headers['proxy-authorization'] })
    if (status !== 200) {
      client.end(`HTTP/1.1 ${status} No\r\n${headers}content-length: 0\r\n\r\n`)
      return
    }
    const port = Number(/\d+$/.exec(request.url ?? '')?.[0])
    const upstream = connect(port, '127.0.0.1', () => client.write('HTTP/1.1 200 OK\r\n\r\n'))
    upstream.on('error', () => client.destroy())
    client.on('error', () => upstream.destroy())
    client.on('close', () => upstream.destroy())
    upstream.pipe(client).pipe(upstream)
  })
  const proxy = await listen(server, 'unused', () => {})
  t.after(() => proxy.close())
  return { ...proxy, url: `${tls ? 'https' : 'http'}://${credentials}127.0.0.1:${proxy.port}`, asked }
}

for (const tls of [false, true])
  test(`an egress proxy${tls ? ' behind TLS' : ''} gets names unresolved, and the request goes through its tunnel`, async (t) => {
    const proxy = await startProxy(t, 200, { tls })
    const http = await startRaw(t, 'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')
    const https = await startTls(t, { cert: TRUSTED })
    const { post } = startSender(t, { allow: [], proxyUrl: proxy.url })
    for (const url of [`http://a.example.test:${http.port}/`, `https://b.example.test:${https.port}/`]) {
      const first = await post(url)
      assert.deepEqual([first.error, first.responseBody], [null, 'ok'])
      assert.equal((await post(url)).error, null)
    }
    const authorization = `Basic ${Buffer.from('user:p@ss').toString('base64')}`
    assert.deepEqual(proxy.asked, [
      { target: `a.example.test:${http.port}`, authorization },
      { target: `b.example.test:${https.port}`, authorization },
    ])
  })

for (const [credentials, sent] of [
  ['us%40er@', 'us@er:'],
  [':p%40ss@', ':p@ss'],
  ['', null],
] as const)
  test(`an egress proxy gets the credentials that its URL has (${credentials})`, async (t) => {
    const proxy = await startProxy(t, 403, { credentials })
    const { post } = startSender(t, { allow: [], proxyUrl: proxy.url })
    await post('http://a.example.test/')
    const authorization = sent === null ? undefined : `Basic ${Buffer.from(sent).toString('base64')}`
    assert.deepEqual(proxy.asked, [{ target: 'a.example.test:80', authorization }])
  })

test('an egress proxy is asked for an IPv6 address in its brackets', async (t) => {
  const proxy = await startProxy(t, 403)
  const { post } = startSender(t, { allow: [], proxyUrl: proxy.url })
  await post('https://[2606:4700::1111]/')
  assert.deepEqual(
    proxy.asked.map(({ target }) => target),
    ['[2606:4700::1111]:443'],
  )
})

for (const tls of [false, true])
  test(`a receiver behind an egress proxy${tls ? ' behind TLS' : ''} cannot bring in more than one that is not`, async (t) => {
    const proxy = await startProxy(t, 200, { tls })
    const { post } = startSender(t, { allow: [], proxyUrl: proxy.url })
    const flood = (socket: Socket, bytes: string) => {
      const more = () => {
        while (!socket.destroyed && socket.write(bytes));
      }
      socket.on('drain', more)
      more()
    }
    const unasked = await startTcp(t, (socket) => flood(socket, 'x'.repeat(65_536)))
    const endless = await startTcp(t, (socket) =>
      onRequest(socket, () => {
        socket.write('HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;')
        flood(socket, 'x'.repeat(65_536))
      }),
    )
    const attempts = [
      [unasked, 'http', 'protocol_error'],
      [unasked, 'https', 'tls_error'],
      [endless, 'http', 'response_too_large'],
    ] as const
    for (const [receiver, scheme, error] of attempts) {
      const before = proxy.asked.length
      assertFailed(await post(`${scheme}://a.example.test:${receiver.port}/`), error, 'response_too_large')
      await allClosed(receiver)
      assert.equal(proxy.asked.length - before, 1, 'one connection')
    }
  })

test('that a receiver behind an egress proxy answers before it is asked is said of the attempt', async (t) => {
  const proxy = await startRaw(t, `HTTP/1.1 200 Established\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n`)
  const { post } = startSender(t, { proxyUrl: `http://127.0.0.1:${proxy.port}` })
  const outcome = await post('http://127.0.0.1:1/')
  assertFailed(outcome, 'protocol_error')
  assert.match(outcome.errorMessage ?? '', /an answer before the request/)
})

test('an attempt ends its connection to an egress proxy at any stage', async (t) => {
  const silent = await startTcp(t, (socket) => socket.resume())
  const through = (scheme: string) => startSender(t, { allow: [], proxyUrl: `${scheme}://127.0.0.1:${silent.port}` })
  assertFailed(await through('http').post('http://a.example.test/'), 'timeout')
  await allClosed(silent)
  // With which no connection can be made: nobody's receiver is to blame.
  await assert.rejects(through('https').post('http://a.example.test/'), LocalFault)
  await allClosed(silent)
  // A tunnel in which nobody answers the handshake.
  const opened = await startTcp(t, (socket) => socket.once('data', () => socket.write('HTTP/1.1 200 OK\r\n\r\n')))
  const { post } = startSender(t, { allow: [], proxyUrl: `http://127.0.0.1:${opened.port}` })
  assertFailed(await post('https://a.example.test/'), 'timeout')
  await allClosed(opened)
})

test('an egress proxy is not asked for what the rules refuse', async (t) => {
  const proxy = await startProxy(t)
  const { post } = startSender(t, { allow: [], proxyUrl: proxy.url })
  for (const url of ['http://127.0.0.1/', 'http://localhost/', 'http://metadata.google.internal/']) {
    assertFailed(await post(url), 'blocked_destination')
  }
  assert.deepEqual(proxy.asked, [])
})

test('a refusal by the egress proxy is a failed attempt; its absence, or a refusal of our credentials, is none', async (t) => {
  for (const [status, error, headers] of [
    [403, 'blocked_destination', ''],
    [407, 'blocked_destination', ''],
    [502, 'proxy_error', ''],
  ] as const) {
    const proxy = await startProxy(t, status, { headers })
    const { post } = startSender(t, { allow: [], proxyUrl: proxy.url })
    assertFailed(await post('http://a.example.test/'), error)
  }
  const strict = await startProxy(t, 407, { headers: 'proxy-authenticate: Basic realm="proxy"\r\n' })
  const other = await startTls(t, { cert: SELF_SIGNED })
  for (const [proxyUrl, message] of [
    [strict.url, 'the egress proxy refuses the credentials in EGRESS_PROXY_URL'],
    ['http://127.0.0.1:1', 'the egress proxy cannot be reached: connect ECONNREFUSED 127.0.0.1:1'],
    ['http://proxy.invalid:3128', /^the egress proxy cannot be reached: getaddrinfo /],
    [`https://127.0.0.1:${other.port}`, /^the egress proxy cannot be reached: /],
  ] as const) {
    const { post } = startSender(t, { allow: [], proxyUrl })
    await assert.rejects(post('http://a.example.test/'), (error: Error) => {
      assert.ok(error instanceof LocalFault)
      if (typeof message === 'string') assert.equal(error.message, message)
      else assert.match(error.message, message)
      return true
    })
  }
  // One that hangs up may do so because of the receiver.
  const rude = await startTcp(t, (socket) => socket.once('data', () => socket.destroy()))
  const { post } = startSender(t, { allow: [], proxyUrl: rude.url })
  assertFailed(await post('http://a.example.test/'), 'proxy_error')
})

test('a receiver that has left before its connection is looked at has reset it, and is not blocked', async (t) => {
  // So the kernel says then, in a moment that no receiver of ours meets.
  const sockets = Socket.prototype as Socket & { _getpeername: () => object }
  const { _getpeername } = sockets
  const receiver = await startRaw(t, 'HTTP/1.1 204 No Content\r\n\r\n')
  sockets._getpeername = () => ({})
  t.after(() => Object.assign(sockets, { _getpeername }))
  const { error } = await startSender(t).post(receiver.url)
  assert.equal(error, 'connection_reset')
})

test('connections that have failed do not count among those for which others are given up', async (t) => {
  let answer = 'nonsense\r\n\r\n'
  const receiver = await startTcp(t, (socket) => onRequest(socket, () => socket.write(answer)))
  const { post } = startSender(t, { maxConnections: 2 })
  for (let nth = 0; nth < 3; nth++) assert.equal((await post(receiver.url)).error, 'protocol_error')
  answer = 'HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'
  for (let nth = 0; nth < 3; nth++) assert.equal((await post(receiver.url)).error, null)
  assert.equal(receiver.sockets.length, 4, 'the last three share one')
})
