import { createServer, type Server, type Socket } from 'node:net'
import { onRequest } from '../../test/support/tcp.ts'
import { nowMicros, serve } from './serve.ts'

// Receivers that misbehave, each on a port of its own: one process, so that their work is not done on the time of the
// healthy ones.

/** `status`, after `delayMs`; `blackhole` never answers, `refuse` is a port on which nobody listens. */
export type Behaviour = { kind: 'answer'; status: number; delayMs: number } | { kind: 'blackhole' | 'refuse' }

/** What arrived since the last look: how many at once at most, and how many in each 100 ms. */
export type Crowd = { requests: number; mostInFlight: number; per100Ms: number[] }

type Stand = { server: Server; behaviour: Behaviour; seen: Crowd & { inFlight: number; begunMicros: number } }

const stands = new Map<number, Stand>()
const fresh = () => ({ requests: 0, mostInFlight: 0, per100Ms: [], inFlight: 0, begunMicros: nowMicros() })

function arrived(stand: Stand, socket: Socket): void {
  const { seen, behaviour } = stand
  seen.requests++
  seen.inFlight++
  seen.mostInFlight = Math.max(seen.mostInFlight, seen.inFlight)
  const slot = Math.floor((nowMicros() - seen.begunMicros) / 100_000)
  seen.per100Ms[slot] = (seen.per100Ms[slot] ?? 0) + 1
  if (behaviour.kind !== 'answer') return
  const answer = () => {
    stand.seen.inFlight--
    if (!socket.destroyed) socket.write(`HTTP/1.1 ${behaviour.status} x\r\ncontent-length: 0\r\n\r\n`)
  }
  if (behaviour.delayMs > 0) setTimeout(answer, behaviour.delayMs)
  else answer()
}

function listen(behaviour: Behaviour): Promise<number> {
  const server = createServer({ noDelay: true }, (socket) => {
    socket.on('error', () => socket.destroy())
    onRequest(socket, () => arrived(stand, socket))
  })
  const stand: Stand = { server, behaviour, seen: fresh() }
  return new Promise((resolve) =>
    server.listen(0, '127.0.0.1', 1024, () => {
      const { port } = server.address() as { port: number }
      stands.set(port, stand)
      if (behaviour.kind === 'refuse') server.close()
      resolve(port)
    }),
  )
}

serve({
  listen,
  behave: ({ port, behaviour }: { port: number; behaviour: Behaviour }) => {
    const stand = stands.get(port)
    if (stand) Object.assign(stand, { behaviour, seen: fresh() })
    return null
  },
  look: (port: number): Crowd | null => {
    const seen = stands.get(port)?.seen
    return seen ? { ...seen, per100Ms: Array.from(seen.per100Ms, (n) => n ?? 0) } : null
  },
})
