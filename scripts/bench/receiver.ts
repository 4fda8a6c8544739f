import { type AddressInfo, createServer, type Socket } from 'node:net'
import { createServer as createTlsServer } from 'node:tls'
import { KEY, TRUSTED } from '../../test/support/certificates.ts'
import { onRequest } from '../../test/support/tcp.ts'
import { nowMicros, serve } from './serve.ts'

// The receiver: answers 200 to every POST, and notes which deliveries came and when. It reads HTTP by hand, since in
// life receivers have machines of their own: here every microsecond of it is taken from what is measured. The load
// generator is measured against the same server.

export type Received = {
  requests: number
  /** Different deliveries; fewer than `requests` when one came twice. */
  deliveries: number
  lastMicros: number
  /** From the moment that a payload names (`at`) to its arrival, in microseconds. */
  latencies: number[]
}

const ANSWER = Buffer.from('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok')

let seen = new Set<string>()
let received: Received = empty()
let expected = Number.POSITIVE_INFINITY
let reached: (() => void) | undefined

function empty(): Received {
  return { requests: 0, deliveries: 0, lastMicros: 0, latencies: [] }
}

function note(head: string, body: string): void {
  const delivery = /\r\n[a-z-]*-delivery-id: ?(\S+)/i.exec(head)?.[1]
  if (delivery === undefined) return
  const now = nowMicros()
  received.requests++
  received.lastMicros = now
  seen.add(delivery)
  received.deliveries = seen.size
  const at = body.indexOf('"at":')
  if (at !== -1) received.latencies.push(now - Number.parseInt(body.slice(at + 5, at + 25), 10))
  if (seen.size >= expected) reached?.()
}

function answer(socket: Socket): void {
  socket.on('error', () => socket.destroy())
  onRequest(socket, (head, body) => {
    note(head, body)
    socket.write(ANSWER)
  })
}

const server = createServer({ noDelay: true }, answer)
const secureServer = createTlsServer({ noDelay: true, key: KEY, cert: TRUSTED }, answer)

function listen(on: typeof server): Promise<number> {
  return new Promise((resolve) => on.listen(0, '127.0.0.1', 1024, () => resolve((on.address() as AddressInfo).port)))
}

serve({
  listen: async () => ({ port: await listen(server), securePort: await listen(secureServer) }),
  expect: async ({ count, seconds }: { count: number; seconds: number }) => {
    seen = new Set()
    received = empty()
    expected = count
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000)
      reached = () => {
        clearTimeout(timer)
        resolve()
      }
    })
    return received
  },
  count: () => received.deliveries,
})
