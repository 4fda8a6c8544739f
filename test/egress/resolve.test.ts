import assert from 'node:assert/strict'
import { execFile, spawnSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, utimesSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type TestContext, test } from 'node:test'
import { promisify } from 'node:util'
import { parseRange } from '../../src/egress/address.ts'
import { LocalFault } from '../../src/egress/failure.ts'
import { createResolver } from '../../src/egress/resolve.ts'
import { createSender } from '../../src/egress/send.ts'
import { type DnsAnswer, startDns } from '../support/dns.ts'
import { listenTcp, onRequest } from '../support/tcp.ts'
import { waitFor } from '../support/wait.ts'

const TIMEOUT_MS = 1000

interface Case {
  id: string
  class: string
  url: string
  reason: string
  dns?: { A?: string[]; AAAA?: string[]; CNAME?: string }
}

const cases: Case[] = JSON.parse(readFileSync(new URL('../vectors/ssrf_cases.json', import.meta.url), 'utf8'))

/** A sender whose names are answered by `answer`, and a receiver on 127.0.0.1. */
async function start(
  t: TestContext,
  answer: (name: string, type: 'A' | 'AAAA') => DnsAnswer | Promise<DnsAnswer>,
  allow = ['127.0.0.0/8'],
  timeoutMs = TIMEOUT_MS,
  how: { refusesTcp?: boolean } = {},
) {
  const dns = await startDns(answer, how)
  t.after(dns.close)
  const receiver = await listenTcp((socket) =>
    onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')),
  )
  t.after(receiver.close)
  const ranges = allow.map((text) => parseRange(text)!)
  const sender = createSender({ allow: ranges, timeoutMs, dnsServers: [dns.address] })
  t.after(sender.close)
  const post = (name: string) => sender.send({ url: `http://${name}:${receiver.port}/`, headers: {}, body: '{}' })
  return { dns, receiver, post, sender }
}

const loopbackOnly = (_name: string, type: 'A' | 'AAAA') => (type === 'A' ? { addresses: ['127.0.0.1'] } : {})

test('a name is resolved and its receiver gets the request', async (t) => {
  const { post, receiver } = await start(t, loopbackOnly)
  assert.equal((await post('receiver.example')).error, null)
  assert.equal((await post('RECEIVER.example.')).error, null)
  assert.equal(receiver.sockets.length, 2)
})

test('every name of the case file whose DNS leads to a blocked address is refused', async (t) => {
  const hostile = cases.filter((one) => one.class === 'dns')
  assert.ok(hostile.length >= 15)
  for (const { id, url, reason, dns: zone = {} } of hostile) {
    const { sender, receiver } = await start(
      t,
      (_name, type) => ({ addresses: zone[type] ?? [], ...(zone.CNAME ? { cname: zone.CNAME } : {}) }),
      [],
    )
    const withPort = new URL(url)
    withPort.port = String(receiver.port)
    const outcome = await sender.send({ url: withPort.href, headers: {}, body: '{}' })
    assert.equal(outcome.error, 'blocked_destination', `${id} ${url}: ${reason}`)
    assert.equal(receiver.sockets.length, 0)
  }
})

test('one blocked address among many refuses the name', async (t) => {
  const { post, receiver } = await start(t, (_name, type) =>
    type === 'A' ? { addresses: ['127.0.0.1', '127.0.0.2', '10.0.0.1'] } : {},
  )
  assert.equal((await post('mixed.example')).error, 'blocked_destination')
  assert.equal(receiver.sockets.length, 0)
})

test('a blocked AAAA address beside an acceptable A address refuses the name', async (t) => {
  const { post, receiver } = await start(t, (_name, type) => ({ addresses: type === 'A' ? ['127.0.0.1'] : ['::1'] }))
  assert.equal((await post('mixed.example')).error, 'blocked_destination')
  assert.equal(receiver.sockets.length, 0)
})

test('a dead address does not hide a living one', async (t) => {
  const { post, receiver } = await start(t, (_name, type) =>
    type === 'A' ? { addresses: ['127.0.0.9', '127.0.0.8', '127.0.0.1'] } : {},
  )
  assert.equal((await post('several.example')).error, null)
  assert.equal(receiver.sockets.length, 1)
})

test('NXDOMAIN, SERVFAIL, an empty answer and a silent name server are failed attempts', async (t) => {
  const { post } = await start(t, (name, type) => {
    if (name.startsWith('nxdomain')) return { rcode: 3 }
    if (name.startsWith('half')) return { rcode: type === 'A' ? 2 : 3 }
    if (name.startsWith('servfail')) return { rcode: 2 }
    if (name.startsWith('alias')) return { cname: 'empty.example' }
    return { silence: name.startsWith('silent') }
  })
  const said = {
    'nxdomain.example': 'the host name does not exist',
    'servfail.example': 'the host name could not be resolved',
    'half.example': 'the host name could not be resolved',
    'empty.example': 'the host name has no address',
    'alias.example': 'the host name has no address',
  }
  for (const [name, message] of Object.entries(said)) {
    const { error, errorMessage } = await post(name)
    assert.deepEqual([error, errorMessage], ['dns_error', message], name)
  }
  const silent = await post('silent.example')
  assert.equal(silent.error, 'timeout')
  assert.match(silent.errorMessage ?? '', /host name/)
  assert.ok(silent.durationMs < 3 * TIMEOUT_MS)
})

test('that no name server says anything is not held against the receiver, unless others’ names are answered', async (t) => {
  const answer = (name: string, type: 'A' | 'AAAA') =>
    name.endsWith('other.example') ? loopbackOnly(name, type) : { silence: true }
  const { post } = await start(t, answer, undefined, 4 * TIMEOUT_MS)
  await assert.rejects(post('silent.example'), LocalFault)
  let nth = 0
  const asking = setInterval(() => post(`${nth++}.other.example`), TIMEOUT_MS / 10)
  t.after(() => clearInterval(asking))
  assert.equal((await post('silent.example')).error, 'timeout')
  clearInterval(asking)
  await assert.rejects(post('silent.too.example'), LocalFault)
})

test('a family whose question fails does not spoil the other', async (t) => {
  const { post } = await start(t, (_name, type) => (type === 'A' ? { addresses: ['127.0.0.1'] } : { rcode: 2 }))
  assert.equal((await post('half.example')).error, null)
})

test('a family that has no answer waits for the other, and one that has waits for a second', async (t) => {
  const { post } = await start(
    t,
    async (name, type) => {
      if (type === 'AAAA') return { silence: name === 'silent.example' }
      if (name === 'slow.example') await new Promise((resolve) => setTimeout(resolve, 1200))
      return { addresses: ['127.0.0.1'] }
    },
    undefined,
    5000,
  )
  for (const name of ['silent.example', 'slow.example']) assert.equal((await post(name)).error, null, name)
})

test('as many addresses as a name may have are all judged', async (t) => {
  const good = Array.from({ length: 31 }, (_, index) => `127.0.1.${index}`)
  const { post, receiver } = await start(t, (name, type) => {
    if (type === 'AAAA') return {}
    return { addresses: name === 'good.example' ? ['127.0.0.1', ...good] : [...good, '192.168.0.1'] }
  })
  assert.equal((await post('bad.example')).error, 'blocked_destination')
  assert.equal(receiver.sockets.length, 0)
  assert.equal((await post('good.example')).error, null)
})

test('a name with more addresses than that is refused, and not asked for again at once', async (t) => {
  const addresses = Array.from({ length: 33 }, (_, i) => `93.184.1.${i}`)
  const { post, dns } = await start(t, (_, type) => ({ addresses: type === 'A' ? addresses : [] }))
  const first = await post('many.example.test')
  assert.deepEqual([first.error, first.errorMessage], ['dns_error', 'the host name has more than 32 addresses'])
  const asked = () => dns.questions.get('many.example.test') ?? 0
  const before = asked()
  const now = performance.now.bind(performance)
  let seconds = 0
  t.mock.method(performance, 'now', () => now() + seconds * 1000)
  for (seconds of [0, 55]) assert.equal((await post('many.example.test')).error, 'dns_error')
  assert.equal(asked(), before)
  seconds = 61
  const askAgain = async () => {
    await post('many.example.test')
    return asked() > before
  }
  await waitFor(askAgain, { what: 'it to be asked for again, a minute later' })
})

test('a hundred names that hang do not delay another', async (t) => {
  const answer = (name: string, type: 'A' | 'AAAA') =>
    name.startsWith('hanging') ? { silence: true } : loopbackOnly(name, type)
  const { post, sender } = await start(t, answer, ['127.0.0.0/8'], 10_000)
  t.after(() => sender.interrupt(new Error('the test is over')))
  let ended = 0
  const end = () => {
    ended++
  }
  for (let n = 0; n < 100; n++) post(`hanging-${n}.example`).then(end, end)
  const outcomes = await Promise.all(Array.from({ length: 20 }, (_, index) => post(`quick-${index}.example`)))
  for (const { error } of outcomes) assert.equal(error, null)
  assert.equal(ended, 0, 'none of those that hang had to end first')
})

test('a name that takes seconds to resolve is waited for, also after others that took none', async (t) => {
  let found: Promise<void> | undefined
  const answer = async (name: string, type: 'A' | 'AAAA') => {
    if (name.startsWith('slow')) {
      // From the first question on, as a server finds out that asks others.
      found ??= new Promise((resolve) => setTimeout(resolve, 4500))
      await found
    }
    return loopbackOnly(name, type)
  }
  const { post } = await start(t, answer, undefined, 10_000)
  for (let count = 0; count < 10; count++) assert.equal((await post(`quick-${count}.example`)).error, null)
  assert.equal((await post('slow.example')).error, null)
})

test('an answer that cannot be had is a failed attempt, and no fault of this process', async (t) => {
  const tooLong = Array.from({ length: 100 }, (_, index) => `127.0.0.${index + 1}`)
  const answer = (name: string, type: 'A' | 'AAAA') =>
    type === 'AAAA' ? {} : { addresses: name.startsWith('many') ? tooLong : ['127.0.0.1'] }
  const { post } = await start(t, answer, undefined, 5000, { refusesTcp: true })
  assert.equal((await post('many.example')).error, 'dns_error')
  assert.equal((await post('one.example')).error, null)
})

test('of many addresses, those of both families are tried', async (t) => {
  const six = Array.from({ length: 12 }, (_, index) => `fd00::${index + 1}`)
  for (const late of ['A', 'AAAA']) {
    const answer = async (_name: string, type: 'A' | 'AAAA') => {
      if (type === late) await new Promise((resolve) => setTimeout(resolve, 50))
      return { addresses: type === 'A' ? ['127.0.0.1'] : six }
    }
    const { post } = await start(t, answer, ['127.0.0.0/8', 'fd00::/8'], 10_000)
    assert.equal((await post('both.example')).error, null)
  }
})

test('of many addresses, eight are tried', async (t) => {
  const addresses = Array.from({ length: 9 }, (_, index) => `127.0.1.${index + 1}`)
  const answer = (name: string, type: 'A' | 'AAAA') => {
    if (type === 'AAAA') return {}
    const dead = addresses.slice(name === 'near.example' ? 2 : 1)
    return { addresses: [...dead, '127.0.0.1'] }
  }
  const { post } = await start(t, answer)
  assert.equal((await post('near.example')).error, null)
  assert.equal((await post('far.example')).error, 'connection_refused')
})

test('a name that is found after the attempt is over leads to no connection', async (t) => {
  const found = Promise.withResolvers<void>()
  const { post, receiver } = await start(t, async (name, type) => {
    if (name === 'late.example') await found.promise
    return loopbackOnly(name, type)
  })
  assert.equal((await post('late.example')).error, 'timeout')
  found.resolve()
  // Their answers come in the order in which they are given.
  assert.equal((await post('another.example')).error, null)
  assert.equal(receiver.sockets.length, 1)
})

test('attempts that need the same name at once share one answer; later ones ask again', async (t) => {
  const { post, dns, receiver } = await start(t, loopbackOnly)
  await Promise.all(Array.from({ length: 50 }, () => post('shared.example')))
  assert.equal(dns.questions.get('shared.example'), 2)
  for (const socket of receiver.sockets) socket.destroy()
  assert.equal((await post('shared.example')).error, null)
  assert.equal(dns.questions.get('shared.example'), 4)
})

test('a name that is resolved leaves no timer behind', async (t) => {
  const dns = await startDns(loopbackOnly)
  t.after(dns.close)
  const { resolve, close } = createResolver({ timeoutMs: 15_000, servers: [dns.address], hostsFile: '/nowhere' })
  t.after(close)
  const timers = () => process.getActiveResourcesInfo().filter((kind) => kind === 'Timeout').length
  await resolve('first.example')
  const before = timers()
  for (let nth = 0; nth < 10; nth++) await resolve(`name${nth}.example`)
  assert.ok(timers() <= before + 1, `${timers() - before} more`)
})

test('each connect judges anew: a name that turns to a blocked address gets nothing more', async (t) => {
  let address = '127.0.0.1'
  const { post, receiver } = await start(t, (_name, type) => (type === 'A' ? { addresses: [address] } : {}))
  assert.equal((await post('turning.example')).error, null)
  for (const socket of receiver.sockets) socket.destroy()
  address = '169.254.169.254'
  assert.equal((await post('turning.example')).error, 'blocked_destination')
})

test('the hosts file is honoured, and read again when it changes', async (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'hosts-'))
  t.after(() => rmSync(directory, { recursive: true }))
  const file = join(directory, 'hosts')
  t.mock.timers.enable({ apis: ['Date'], now: 1_000_000 })
  writeFileSync(file, '# comment\n10.1.1.1 Receiver receiver.internal # more\nfe80::1%lo0 receiver\nnonsense here\n\n')
  utimesSync(file, 1, 1)
  const dns = await startDns(() => ({ rcode: 3 }))
  t.after(dns.close)
  const resolver = createResolver({ timeoutMs: TIMEOUT_MS, servers: [dns.address], hostsFile: file })
  t.after(resolver.close)
  assert.deepEqual(await resolver.resolve('receiver'), ['10.1.1.1', 'fe80::1%lo0'])
  assert.deepEqual(await resolver.resolve('receiver.internal'), ['10.1.1.1'])
  for (const none of ['here', 'more']) await assert.rejects(resolver.resolve(none))
  writeFileSync(file, '10.2.2.2 receiver\n')
  utimesSync(file, 2, 2)
  t.mock.timers.setTime(1_001_000)
  assert.deepEqual(await resolver.resolve('receiver'), ['10.2.2.2'])
  await assert.rejects(resolver.resolve('receiver.internal'))
})

test('a hosts file that may not be read lists nobody, and fails no attempt', async (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'hosts-'))
  t.after(() => rmSync(directory, { recursive: true }))
  const dns = await startDns(loopbackOnly)
  t.after(dns.close)
  // Reading a directory fails, also for those who may read everything.
  const resolver = createResolver({ timeoutMs: TIMEOUT_MS, servers: [dns.address], hostsFile: directory })
  t.after(resolver.close)
  assert.deepEqual(await resolver.resolve('receiver.example'), ['127.0.0.1'])
})

const MOUNTED = ['mount', '--bind', '/dev/null', '/etc/resolv.conf']
/** The way into a mount namespace of our own that this machine permits, if any. */
const unshare = [['-m'], ['-r', '-m']].find((flags) => spawnSync('unshare', [...flags, ...MOUNTED]).status === 0)
const skip = unshare ? false : 'needs Linux and the permission to make a mount namespace (unshare -rm)'
/** Resolves a name by the name server in the file that stands for /etc/resolv.conf, and by another one when the first is gone. */
const CHANGING = `
import { writeFileSync } from 'node:fs'
import { createResolver } from '${new URL('../../src/egress/resolve.ts', import.meta.url)}'
import { startDns } from '${new URL('../support/dns.ts', import.meta.url)}'
// Two, since Node itself looks again for others than a single one of this machine.
const start = async (address) => {
  const dns = await startDns((_name, type) => type === 'A' ? { addresses: [address] } : {})
  writeFileSync('/etc/resolv.conf', 'nameserver ' + dns.address + '\\nnameserver 127.0.0.2:9\\n')
  return dns
}
const first = await start('192.0.2.1')
const resolver = createResolver({ timeoutMs: 15_000 })
console.log(...await resolver.resolve('name.example'))
first.close()
await start('192.0.2.2')
for (;;) {
  const found = await resolver.resolve('name.example').catch(() => null)
  if (found === null) continue
  console.log(...found)
  process.exit()
}`

function resolvConf(t: TestContext, text: string): string {
  const directory = mkdtempSync(join(tmpdir(), 'resolv-'))
  t.after(() => rmSync(directory, { recursive: true }))
  const file = join(directory, 'resolv.conf')
  writeFileSync(file, text)
  return file
}

test('another name server in resolv.conf is asked from then on', { skip }, async (t) => {
  const file = resolvConf(t, '')
  const script = 'mount --bind "$1" /etc/resolv.conf && exec "$2" --input-type=module -e "$3"'
  const command = ['sh', '-c', script, 'sh', file, process.execPath, CHANGING]
  const { stdout } = await promisify(execFile)('unshare', [...(unshare ?? []), ...command], { timeout: 20_000 })
  assert.deepEqual(stdout.trim().split('\n'), ['192.0.2.1', '192.0.2.2'])
})

/** Asks for many names at once, twice, while nobody answers at the only name server; prints each way in which that fails. */
const REFUSED = `
import { createResolver } from '${new URL('../../src/egress/resolve.ts', import.meta.url)}'
const resolver = createResolver({ timeoutMs: 15_000 })
const ask = (name) => resolver.resolve(name).catch((error) => error.constructor.name)
const fails = new Set()
for (const round of [1, 2])
  for (const fail of await Promise.all(Array.from({ length: 50 }, (_, n) => ask('n' + n + '.r' + round + '.example')))) fails.add(fail)
console.log(...fails)`

test('no receiver is blamed while the name server of this machine is away, however many are asked for', {
  skip,
}, async (t) => {
  const file = resolvConf(t, 'nameserver 127.0.0.1\n')
  // In a network of its own, where nothing listens at port 53.
  const script = 'ip link set lo up && mount --bind "$1" /etc/resolv.conf && exec "$2" --input-type=module -e "$3"'
  const command = ['sh', '-c', script, 'sh', file, process.execPath, REFUSED]
  const { stdout } = await promisify(execFile)('unshare', [...(unshare ?? []), '-n', ...command], { timeout: 20_000 })
  assert.equal(stdout.trim(), 'LocalFault')
})
