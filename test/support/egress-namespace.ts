/**
 * Runs in a network namespace of its own (see test/egress/namespace.test.ts), where public and blocked addresses
 * alike belong to the loopback device and something listens on all of them. Prints what it saw as JSON.
 */
import { execFileSync } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { connect, type Socket } from 'node:net'
import { createServer as createTlsServer, setDefaultCACertificates } from 'node:tls'
import { createSender } from '../../src/egress/send.ts'
import { AUTHORITY, KEY, TRUSTED } from './certificates.ts'
import { startDns } from './dns.ts'
import { listen, listenTcp, onRequest } from './tcp.ts'
import { waitFor } from './wait.ts'

interface Zone {
  A?: string[]
  AAAA?: string[]
  CNAME?: string
}

interface Case {
  id: string
  url: string
  expect: string
  optional?: boolean
  dns?: Zone
  dns_sequence?: Zone[]
  response?: { status: number; location: string }
}

const PUBLIC = ['93.184.215.14', '2606:4700:4700::1111']
const BLOCKED = [
  '10.0.0.5',
  '100.100.100.200',
  '168.63.129.16',
  '169.254.169.254',
  '172.16.0.1',
  '192.168.1.10',
  '198.18.0.5',
  '64:ff9b::a9fe:a9fe',
  '2002:7f00:1::',
  'fd00:ec2::254',
]
const CONNECTIONS_TRIED = 1000

const commands = [...PUBLIC, ...BLOCKED].map((address) =>
  address.includes(':') ? `ip addr add ${address}/128 dev lo nodad` : `ip addr add ${address}/32 dev lo`,
)
execFileSync('sh', ['-e'], { input: ['ip link set lo up', ...commands].join('\n') })
setDefaultCACertificates([AUTHORITY])

const connectionsByAddress = new Map<string, number>()
let answer = 'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'
const serve = (socket: Socket) => {
  socket.on('error', () => {})
  onRequest(socket, () => socket.end(answer))
}
const count = (socket: Socket) => {
  const address = (socket.localAddress ?? '').replace(/^::ffff:/, '')
  connectionsByAddress.set(address, (connectionsByAddress.get(address) ?? 0) + 1)
}
const tls = createTlsServer({ key: KEY, cert: TRUSTED })
tls.on('connection', count)
const http = await listenTcp(
  (socket) => {
    count(socket)
    serve(socket)
  },
  '::',
  80,
)
const https = await listen(tls, 'secureConnection', serve, '::', 443)

const connectionsTo = (addresses: string[]) =>
  addresses.reduce((sum, address) => sum + (connectionsByAddress.get(address) ?? 0), 0)
const blockedConnections = () =>
  [...connectionsByAddress].reduce((sum, [address, seen]) => (PUBLIC.includes(address) ? sum : sum + seen), 0)

async function reach(address: string): Promise<true> {
  const socket = connect(80, address)
  await once(socket, 'connect')
  socket.destroy()
  await once(socket, 'close')
  return true
}

// Without the rules every blocked address can be reached here; else a count of zero would say nothing. The kernel makes the routes to
// IPv6 addresses a moment later.
for (const address of [...PUBLIC, ...BLOCKED, '127.0.0.1', '::1'])
  await waitFor(() => reach(address), { what: `the way to ${address}` })
while (blockedConnections() < BLOCKED.length + 2) await new Promise(setImmediate)
connectionsByAddress.clear()

let zone: (type: 'A' | 'AAAA') => Zone = () => ({})
const dns = await startDns((_name, type) => {
  const { CNAME: cname, [type]: addresses = [] } = zone(type)
  return { addresses, ...(cname ? { cname } : {}) }
})
const sender = createSender({ allow: [], timeoutMs: 10_000, dnsServers: [dns.address] })
const post = (url: string) => sender.send({ url, headers: {}, body: '{}' })

/** Each question for an A record is answered by the next zone; the last one stays. */
const play = (zones: Zone[]) => {
  let questions = 0
  zone = (type) => zones[Math.min(type === 'A' ? questions++ : questions, zones.length - 1)] ?? {}
}

const cases: Case[] = JSON.parse(readFileSync(new URL('../vectors/ssrf_cases.json', import.meta.url), 'utf8'))
const caseOutcomes: Record<string, { error: string | null; statusCode: number | null }[]> = {}
for (const { id, url, expect, optional, dns: only = {}, dns_sequence: sequence = [only], response } of cases) {
  if (expect !== 'reject_at_delivery' || optional) continue
  answer = response
    ? `HTTP/1.1 ${response.status} X\r\nlocation: ${response.location}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n`
    : 'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'
  play(sequence)
  caseOutcomes[id] = []
  for (const _ of sequence) {
    const { error, statusCode } = await post(url)
    caseOutcomes[id].push({ error, statusCode })
  }
}

answer = 'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n'
const rebinding: Record<string, number> = {}
let turn = 0
const flips: Zone[] = [
  { A: [PUBLIC[0]!] },
  { A: ['169.254.169.254'] },
  { AAAA: [PUBLIC[1]!] },
  { A: ['10.0.0.5'] },
  { A: [PUBLIC[0]!], AAAA: ['::1'] },
  { A: [PUBLIC[0]!, '192.168.1.10'] },
  { A: [PUBLIC[0]!], AAAA: [PUBLIC[1]!] },
]
// An odd number of turns and two questions to an attempt: every pair of answers comes up, those of two turns too.
zone = () => flips[turn++ % flips.length]!
for (let tried = 0; tried < CONNECTIONS_TRIED; tried += 50) {
  const posts = Array.from({ length: 50 }, (_, index) => post(`http://rebind-${tried + index}.example/`))
  for (const { error } of await Promise.all(posts)) {
    rebinding[error ?? 'delivered'] = (rebinding[error ?? 'delivered'] ?? 0) + 1
  }
}

await sender.close()
await Promise.all([http.close(), https.close()])
dns.close()
console.log(
  JSON.stringify({
    caseOutcomes,
    rebinding,
    publicConnections: connectionsTo(PUBLIC),
    blockedConnections: blockedConnections(),
  }),
)
