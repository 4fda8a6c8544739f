import { createSocket, type Socket } from 'node:dgram'
import { once } from 'node:events'
import { type AddressInfo, createServer, isIPv6, type Server } from 'node:net'

const TYPES: Record<number, 'A' | 'AAAA'> = { 1: 'A', 28: 'AAAA' }

export interface DnsAnswer {
  /** Addresses of the family that was asked for. */
  addresses?: string[]
  /** Answered first, with the addresses under this name. */
  cname?: string
  /** 2: SERVFAIL, 3: NXDOMAIN. */
  rcode?: number
  /** The question is never answered. */
  silence?: boolean
}

export interface DnsServer {
  /** For `createSender({ dnsServers })`. */
  address: string
  /** How many questions of each name came. */
  questions: Map<string, number>
  close(): void
}

/** A name server that says what the test wants, with a TTL of zero; long answers go over TCP, as they must, if that is not refused. */
export async function startDns(
  answer: (name: string, type: 'A' | 'AAAA') => DnsAnswer | Promise<DnsAnswer>,
  { refusesTcp = false } = {},
): Promise<DnsServer> {
  const host = '127.0.0.1'
  const questions = new Map<string, number>()
  const reply = async (query: Buffer): Promise<Buffer | null> => {
    const { name, type, end } = readQuestion(query)
    questions.set(name, (questions.get(name) ?? 0) + 1)
    const family = TYPES[type]
    const said = family ? await answer(name, family) : {}
    return said.silence ? null : writeAnswer(query, end, type, said)
  }
  const udp = createSocket('udp4')
  udp.on('message', async (query, from) => {
    const message = await reply(query)
    if (message === null) return
    if (message.length > 1200) {
      message.writeUInt16BE(message.readUInt16BE(2) | 0x0200, 2)
      message.writeUInt16BE(0, 6)
      udp.send(message.subarray(0, readQuestion(query).end), from.port, from.address)
    } else udp.send(message, from.port, from.address)
  })
  const tcp = createServer((socket) => {
    socket.on('error', () => {})
    socket.on('data', async (data) => {
      const message = await reply(Buffer.from(data.subarray(2)))
      if (message === null) return
      const length = Buffer.alloc(2)
      length.writeUInt16BE(message.length)
      socket.end(Buffer.concat([length, message]))
    })
  })
  const port = await bindBoth(udp, tcp, host)
  if (refusesTcp) tcp.close()
  return {
    address: `${host}:${port}`,
    questions,
    close: () => {
      udp.close()
      tcp.close()
    },
  }
}

/** Finds a port that is free for UDP and TCP alike. */
async function bindBoth(udp: Socket, tcp: Server, host: string): Promise<number> {
  for (;;) {
    tcp.listen(0, host)
    await once(tcp, 'listening')
    const { port } = tcp.address() as AddressInfo
    udp.bind(port, host)
    try {
      await once(udp, 'listening')
      return port
    } catch {
      await new Promise((resolve) => tcp.close(resolve))
    }
  }
}

function readQuestion(query: Buffer): { name: string; type: number; end: number } {
  const labels: string[] = []
  let at = 12
  for (let length = query[at]!; length > 0; length = query[at]!) {
    labels.push(query.toString('latin1', at + 1, at + 1 + length))
    at += 1 + length
  }
  return { name: labels.join('.').toLowerCase(), type: query.readUInt16BE(at + 1), end: at + 5 }
}

function writeAnswer(query: Buffer, end: number, type: number, said: DnsAnswer): Buffer {
  const header = Buffer.from(query.subarray(0, end))
  header.writeUInt16BE(0x8180 | (said.rcode ?? 0), 2)
  const records: Buffer[] = []
  let owner = Buffer.from([0xc0, 0x0c])
  if (said.cname) {
    const target = writeName(said.cname)
    records.push(writeRecord(owner, 5, target))
    owner = target
  }
  for (const address of said.addresses ?? []) records.push(writeRecord(owner, type, addressBytes(address)))
  header.writeUInt16BE(1, 4)
  header.writeUInt16BE(records.length, 6)
  header.writeUInt16BE(0, 8)
  header.writeUInt16BE(0, 10)
  return Buffer.concat([header, ...records])
}

function writeName(name: string): Buffer<ArrayBuffer> {
  const labels = name.split('.').map((label) => Buffer.concat([Buffer.from([label.length]), Buffer.from(label)]))
  return Buffer.concat([...labels, Buffer.from([0])])
}

function writeRecord(owner: Buffer, type: number, data: Buffer): Buffer {
  const fixed = Buffer.alloc(10)
  fixed.writeUInt16BE(type, 0)
  fixed.writeUInt16BE(1, 2)
  fixed.writeUInt16BE(data.length, 8)
  return Buffer.concat([owner, fixed, data])
}

function addressBytes(address: string): Buffer {
  if (!isIPv6(address)) return Buffer.from(address.split('.').map(Number))
  const [left = '', right] = new URL(`http://[${address}]`).hostname.slice(1, -1).split('::')
  const head = left === '' ? [] : left.split(':')
  const tail = right ? right.split(':') : []
  const groups = [...head, ...Array(right === undefined ? 0 : 8 - head.length - tail.length).fill('0'), ...tail]
  return Buffer.from(groups.flatMap((group) => [Number.parseInt(group, 16) >> 8, Number.parseInt(group, 16) & 255]))
}
