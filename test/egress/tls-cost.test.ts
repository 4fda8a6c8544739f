import assert from 'node:assert/strict'
import { constants, createPrivateKey, createPublicKey, generateKeyPairSync, randomBytes } from 'node:crypto'
import { createServer as createTcpServer, type Socket } from 'node:net'
import { type TestContext, test } from 'node:test'
import {
  createSecureContext,
  createServer,
  getCACertificates,
  setDefaultCACertificates,
  type TLSSocket,
  type TlsOptions,
} from 'node:tls'
import { parseRange } from '../../src/egress/address.ts'
import { createSender } from '../../src/egress/send.ts'
import { AUTHORITY, KEY, TRUSTED } from '../support/certificates.ts'
import { listen, onRequest } from '../support/tcp.ts'
import { waitFor } from '../support/wait.ts'

setDefaultCACertificates([...getCACertificates(), AUTHORITY])

/** Of modulus, exponent and signature of certificates. OpenSSL takes exponents of this length, with which a check takes 6 ms. */
const KEY_BYTES = 384

function der(tag: number, ...parts: Buffer[]): Buffer {
  const content = Buffer.concat(parts)
  const { length } = content
  const head = length < 128 ? [length] : length < 256 ? [0x81, length] : [0x82, length >> 8, length & 255]
  return Buffer.concat([Buffer.from([tag, ...head]), content])
}
const sequence = (...parts: Buffer[]) => der(0x30, ...parts)
const hex = (text: string) => Buffer.from(text, 'hex')
const name = (text: string) => sequence(der(0x31, sequence(hex('0603550403'), der(0x0c, Buffer.from(text)))))
const odd = (first: number) => Buffer.concat([Buffer.from([first]), randomBytes(KEY_BYTES - 2), Buffer.from([1])])

/** A certificate with a signature that nobody made: it is checked all the same. */
function certificate(subject: string, issuer: string, key: Buffer): string {
  const algorithm = hex('300d06092a864886f70d01010b0500')
  const validity = sequence(der(0x17, Buffer.from('200101000000Z')), der(0x17, Buffer.from('490101000000Z')))
  const isAuthority = der(0xa3, hex('3011300f0603551d130101ff040530030101ff'))
  const content = sequence(hex('a003020102020155'), algorithm, name(issuer), validity, name(subject), key, isAuthority)
  const all = sequence(content, algorithm, der(3, Buffer.from([0]), odd(0x3f)))
  return `-----BEGIN CERTIFICATE-----\n${(all.toString('base64').match(/.{1,64}/g) ?? []).join('\n')}\n-----END CERTIFICATE-----\n`
}

/** A certificate of KEY, and as many above it, each of which takes long to check. */
function dearChain(length: number): string {
  const own = createPublicKey(createPrivateKey(KEY)).export({ type: 'spki', format: 'der' })
  const dear = () =>
    sequence(
      hex('300d06092a864886f70d0101010500'),
      der(3, Buffer.from([0]), sequence(der(2, Buffer.from([0]), odd(0xff)), der(2, odd(0x7e)))),
    )
  const above = Array.from({ length }, (_, i) => certificate(`a${i}`, `a${i + 1}`, dear()))
  return [certificate('localhost', 'a0', own), ...above].join('')
}

async function start(t: TestContext, options: TlsOptions, onRequested = (_socket: TLSSocket) => {}) {
  const server = createServer({ key: KEY, ...options })
  const receiver = await listen(server, 'secureConnection', (socket: TLSSocket) => {
    socket.on('error', () => {})
    onRequest(socket, () => onRequested(socket))
  })
  t.after(() => receiver.close())
  const sender = createSender({ allow: [parseRange('127.0.0.0/8')!], timeoutMs: 5000 })
  t.after(() => sender.close())
  const send = () => sender.send({ url: receiver.url.replace('http:', 'https:'), headers: {}, body: '{}' })
  return Object.assign(async () => (await send()).error, { server, send })
}

/** CPU that ten attempts take, in ms, with the receiver's part. */
async function cost(post: () => Promise<unknown>): Promise<number> {
  const before = process.threadCpuUsage()
  for (let i = 0; i < 10; i++) await post()
  const { user, system } = process.threadCpuUsage(before)
  return (user + system) / 1000
}

test('a receiver with many certificates that take long to check is refused before they are', async (t) => {
  const post = await start(t, { cert: dearChain(60) })
  assert.equal(await post(), 'response_too_large')
  const ms = await cost(post)
  t.diagnostic(`${Math.round(ms)} ms`)
  assert.ok(ms < 1000)
})

for (const length of [4, 20])
  test(`a receiver whose handshakes take long to fail gets few of them (${length} certificates)`, async (t) => {
    const post = await start(t, { cert: dearChain(length) })
    assert.equal(await post(), 'tls_error')
    for (let i = 0; i < 10; i++) await post()
    const ms = await cost(post)
    t.diagnostic(`${Math.round(ms)} ms`)
    assert.ok(ms < 100)
  })

test('a receiver cannot begin a second handshake on a connection', async (t) => {
  const dear = createSecureContext({ key: KEY, cert: dearChain(60) })
  const secureOptions = constants.SSL_OP_NO_SESSION_RESUMPTION_ON_RENEGOTIATION
  let again = 0
  const post = await start(t, { cert: TRUSTED, maxVersion: 'TLSv1.2', secureOptions }, (socket) => {
    socket.setKeyCert(dear)
    socket.renegotiate({ rejectUnauthorized: false }, (error) => {
      if (error === null || error === undefined) again++
    })
  })
  const ms = await cost(post)
  t.diagnostic(`${Math.round(ms)} ms`)
  assert.equal(again, 0)
  assert.ok(ms < 1000)
})

/** Has the handshakes of a test seem to take so much CPU, wherever they are watched, and time pass as `clock` says. */
function pretend(t: TestContext, { stepMs, clock }: { stepMs: number; clock: { minutes: number } }) {
  const now = performance.now.bind(performance)
  t.mock.method(performance, 'now', () => now() + clock.minutes * 60_000)
  t.mock.method(process, 'threadCpuUsage', () => ({ user: stepMs * 1000, system: 0 }))
}

const answerAndClose = (socket: TLSSocket) =>
  void socket.end('HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n')

test('a receiver whose handshakes took long to fail gets one again after ten minutes', async (t) => {
  const clock = { minutes: 0 }
  const post = await start(t, { cert: dearChain(0) }, answerAndClose)
  pretend(t, { stepMs: 100, clock })
  assert.equal(await post(), 'tls_error')
  post.server.setSecureContext({ key: KEY, cert: TRUSTED })
  clock.minutes = 9
  assert.match((await post.send()).errorMessage ?? '', /pause of ten minutes/)
  clock.minutes = 11
  assert.equal(await post(), null)
})

test('a receiver whose handshakes take long and succeed gets as many as it needs', async (t) => {
  const post = await start(t, { cert: dearChain(0) }, answerAndClose)
  assert.equal(await post(), 'tls_error', 'from now on it is watched')
  // In two steps each time.
  const whole = { maxVersion: 'TLSv1.2', secureOptions: constants.SSL_OP_NO_TICKET } as const
  post.server.setSecureContext({ key: KEY, cert: TRUSTED, ...whole })
  pretend(t, { stepMs: 10, clock: { minutes: 0 } })
  for (let nth = 0; nth < 20; nth++) assert.equal(await post(), null)
})

/** Two receivers that are trusted, and whose handshakes wait until `atOnce` are under way. */
async function startTrusted(t: TestContext) {
  const tls = createServer({ key: KEY, cert: TRUSTED })
  tls.on('secureConnection', (socket: TLSSocket) => onRequest(socket, () => answerAndClose(socket)))
  const gathering = { waiting: [] as Socket[], atOnce: 1 }
  const receiver = await listen(createTcpServer(), 'connection', (socket: Socket) => {
    if (gathering.waiting.push(socket) === gathering.atOnce)
      for (const one of gathering.waiting.splice(0)) tls.emit('connection', one)
  })
  t.after(() => receiver.close())
  const sender = createSender({ allow: [parseRange('127.0.0.0/8')!], timeoutMs: 2000 })
  t.after(() => sender.close())
  const post = async (host: string) =>
    (await sender.send({ url: `https://${host}:${receiver.port}/`, headers: {}, body: '{}' })).error
  for (const host of ['127.0.0.1', 'localhost']) assert.equal(await post(host), null)
  return {
    gathering,
    show: (cert: string) => tls.setSecureContext({ key: KEY, cert }),
    post,
    twenty: (host: string) => Promise.all(Array.from({ length: 20 }, () => post(host))),
  }
}

/** More than a watched handshake may bring in, none of which belongs to the chain. */
const LARGE = `${TRUSTED}\n${dearChain(60)}`

test('of handshakes with trusted receivers that are under way at once, all but sixteen are watched', async (t) => {
  const { gathering, show, twenty } = await startTrusted(t)
  gathering.atOnce = Infinity
  // It is busy with other things, of which those that show nothing are no cause.
  pretend(t, { stepMs: 300, clock: { minutes: 0 } })
  assert.deepEqual(new Set(await twenty('127.0.0.1')), new Set(['timeout']), 'those that were given up are over')
  t.mock.restoreAll()
  gathering.waiting.length = 0
  show(LARGE)
  gathering.atOnce = 20
  const errors = await twenty('localhost')
  assert.deepEqual(errors.toSorted(), [...Array(16).fill(null), ...Array(4).fill('response_too_large')])
})

test('once a trusted receiver has taken long and failed, everybody’s handshakes are watched', async (t) => {
  const { gathering, show, post, twenty } = await startTrusted(t)
  show(dearChain(0))
  pretend(t, { stepMs: 200, clock: { minutes: 0 } })
  assert.equal(await post('127.0.0.1'), 'tls_error')
  t.mock.restoreAll()
  show(LARGE)
  gathering.atOnce = 20
  assert.deepEqual(await twenty('localhost'), Array(20).fill('response_too_large'))
})

test('receivers that drip what they show keep nobody else’s handshake waiting', async (t) => {
  const [count, enough] = [40, 20_000]
  let dripped = 0
  const dripping = await listen(createTcpServer({ noDelay: true }), 'connection', (socket: Socket) => {
    const drip = () => {
      if (socket.destroyed || socket.bytesWritten > 16_000) return
      socket.write('.')
      dripped++
      setImmediate(drip)
    }
    // A record of 16 KiB, of which most is still to come.
    socket.on('error', () => {}).once('data', () => socket.write(hex('16030340000200'), drip))
  })
  t.after(() => dripping.close())
  const tls = createServer({ key: KEY, cert: TRUSTED })
  const receiver = await listen(tls, 'secureConnection', (socket: TLSSocket) => {
    onRequest(socket, () => answerAndClose(socket))
  })
  t.after(() => receiver.close())
  const sender = createSender({ allow: [parseRange('127.0.0.0/8')!], timeoutMs: 10_000 })
  t.after(() => sender.close())
  const post = (port: number) => sender.send({ url: `https://127.0.0.1:${port}/`, headers: {}, body: '{}' })
  const late = Array.from({ length: count }, () => post(dripping.port))
  await waitFor(() => dripped > enough, { what: 'much to be dripped' })
  let turns = 0
  let counting = setImmediate(function next() {
    turns++
    counting = setImmediate(next)
  })
  const { error } = await post(receiver.port)
  clearImmediate(counting)
  assert.equal(error, null)
  t.diagnostic(`${turns} turns of the event loop`)
  assert.ok(turns < 10 * count)
  sender.interrupt(new Error('enough'))
  await Promise.allSettled(late)
})

test('a receiver that would choose the modulus of the handshake gets none', async (t) => {
  const { privateKey, publicKey } = generateKeyPairSync('rsa', { modulusLength: 2048 })
  const key = privateKey.export({ type: 'pkcs8', format: 'pem' })
  const cert = certificate('localhost', 'a0', publicKey.export({ type: 'spki', format: 'der' }))
  const post = await start(t, { key, cert, maxVersion: 'TLSv1.2', ciphers: 'DHE', dhparam: 'auto' })
  // Otherwise it would be the certificate that is refused.
  assert.equal((await post.send()).errorMessage, 'the receiver refused the TLS handshake')
})

test('a receiver that is trusted since all went well can take long once', async (t) => {
  const post = await start(t, { cert: TRUSTED }, answerAndClose)
  for (let nth = 0; nth < 3; nth++) assert.equal(await post(), null)
  post.server.setSecureContext({ key: KEY, cert: dearChain(60) })
  assert.equal(await post(), 'tls_error', 'nobody watches')
  post.server.setSecureContext({ key: KEY, cert: TRUSTED })
  assert.equal(await post(), null)
  post.server.setSecureContext({ key: KEY, cert: dearChain(60) })
  assert.equal(await post(), 'response_too_large')
  const ms = await cost(post)
  t.diagnostic(`${Math.round(ms)} ms`)
  assert.ok(ms < 1000)
})
