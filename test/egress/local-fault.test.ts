import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { test } from 'node:test'
import { promisify } from 'node:util'
import { classify, classifyTls, connectError, isLocal, LocalFault } from '../../src/egress/failure.ts'
import { createDirectory } from '../support/directory.ts'
import { startDns } from '../support/dns.ts'
import { startReceiver } from '../support/receiver.ts'

const SOURCE = new URL('../../src/egress/', import.meta.url)
/** Sends to each URL but the first with no file left to open, and to all when there are some again. */
const SENDING = `
import { closeSync, openSync } from 'node:fs'
import { parseRange } from '${SOURCE}address.ts'
import { LocalFault } from '${SOURCE}failure.ts'
import { createSender } from '${SOURCE}send.ts'
const [nameServer, first, ...urls] = process.argv.slice(1)
const sender = createSender({ allow: [parseRange('127.0.0.0/8')], timeoutMs: 5000, dnsServers: [nameServer] })
const send = (url) => sender.send({ url, headers: {}, body: '{}' })
// Names are looked up in a file first, which is read once.
await send(first)
const files = []
try {
  for (;;) files.push(openSync('/dev/null'))
} catch {}
const without = await Promise.all(urls.map((url) => send(url).then(({ error }) => error, (error) => error instanceof LocalFault)))
for (const file of files) closeSync(file)
const statuses = (await Promise.all(urls.map(send))).map(({ statusCode }) => statusCode)
console.log(JSON.stringify({ without, statuses }))
process.exit()`

test('that this process cannot open a connection is not held against the receiver', async (t) => {
  const receiver = await startReceiver(t)
  const dns = await startDns((_name, type) => (type === 'A' ? { addresses: ['127.0.0.1'] } : {}))
  t.after(dns.close)
  const urls = ['a.example', '127.0.0.1', 'b.example'].map((host) => {
    const url = new URL(receiver.url('/hook'))
    url.hostname = host
    return url.href
  })
  const run = ['-c', 'ulimit -n 100; exec "$@"', 'sh', process.execPath, '--input-type=module', '-e', SENDING]
  const { stdout } = await promisify(execFile)('sh', [...run, dns.address, ...urls])
  assert.deepEqual(JSON.parse(stdout), { without: [true, true], statuses: [200, 200] })
  assert.equal(receiver.receipts.length, 3)
})

/** Looks a name up in a hosts file with no file left to open, and again when there are some. */
const RESOLVING = `
import { closeSync, openSync } from 'node:fs'
import { createResolver } from '${SOURCE}resolve.ts'
const resolver = createResolver({ timeoutMs: 15_000, servers: ['127.0.0.1:9'], hostsFile: process.argv[1] })
const resolve = async () => resolver.resolve('listed.example')
const files = []
try {
  for (;;) files.push(openSync('/dev/null'))
} catch {}
const without = await resolve().catch(({ code }) => code)
for (const file of files) closeSync(file)
console.log(JSON.stringify([without, await resolve()]))
process.exit()`

test('a hosts file that could not be opened, for want of files, is read as soon as it can be', async (t) => {
  const hosts = join(await createDirectory(t), 'hosts')
  await writeFile(hosts, '127.0.0.3 listed.example')
  const run = ['-c', 'ulimit -n 100; exec "$@"', 'sh', process.execPath, '--input-type=module', '-e', RESOLVING, hosts]
  const { stdout } = await promisify(execFile)('sh', run)
  assert.deepEqual(JSON.parse(stdout), ['EMFILE', ['127.0.0.3']])
})

test('what the system says of a receiver that cannot be reached is not taken for an answer', () => {
  const errorOf = (code: string) => classify(Object.assign(new Error(), { code })).error
  const unreachable = [
    'ENETUNREACH',
    'EHOSTUNREACH',
    'EHOSTDOWN',
    'ENETDOWN',
    'EADDRNOTAVAIL',
    'EACCES',
    'EPERM',
    'EINVAL',
  ]
  assert.deepEqual(new Set(unreachable.map(errorOf)), new Set(['network_unreachable']))
  const reset = ['ECONNRESET', 'ECONNABORTED', 'EPIPE', 'UND_ERR_SOCKET']
  assert.deepEqual(new Set(reset.map(errorOf)), new Set(['connection_reset']))
  assert.equal(errorOf('ETIMEDOUT'), 'timeout')
  assert.equal(errorOf('EPROTO'), 'tls_error')
})

test('what this machine lacks is a fault of its own', () => {
  for (const code of ['EMFILE', 'ENFILE', 'ENOBUFS', 'ENOMEM'])
    assert.ok(isLocal(Object.assign(new Error(), { code })), code)
})

test('faults of TLS that take an old or odd receiver are named', () => {
  const said = (code: string, message = '') => classifyTls(Object.assign(new Error(message), { code })).errorMessage
  assert.match(said('UNSPECIFIED', 'EE certificate key too weak'), /too weak/)
  assert.match(said('UNSPECIFIED', 'CA signature digest algorithm too weak'), /too weak/)
  assert.match(said('ERR_SSL_UNSUPPORTED_PROTOCOL'), /neither TLS 1.2 nor 1.3/)
  assert.match(said('ERR_SSL_TLSV1_UNRECOGNIZED_NAME'), /no TLS certificate for this host name/)
  assert.equal(said('ERR_SSL_TLSV1_ALERT_INTERNAL_ERROR'), 'the TLS handshake failed')
})

test('that there is no local port left is not held against the receiver, but that there is no IPv6 is', () => {
  const without = (address: string) => Object.assign(new Error('no address'), { code: 'EADDRNOTAVAIL', address })
  const judge = (error: unknown) => connectError(error, classify) instanceof LocalFault
  assert.deepEqual([without('192.0.2.1'), without('2001:db8::1')].map(judge), [true, false])
  assert.ok(judge(new AggregateError([without('2001:db8::1'), without('192.0.2.1')])))
})
