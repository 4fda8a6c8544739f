import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import { cleanUp, type Scope } from './cleanup.ts'
import { waitFor } from './wait.ts'

export type Proxy = {
  /** The database's URL as seen through the proxy. */
  url: string
  /** Breaks every connection and refuses new ones: the database has stopped. */
  cut: () => Promise<void>
  /** Cuts as soon as a query that contains `text` comes by. */
  cutAt: (text: string) => void
  /** Keeps connections open but lets nothing through any more: the network has a hole. */
  freeze: () => void
  /** Lets new connections through again. Those that were frozen stay so, for as long as their client keeps them. */
  thaw: () => void
  /** How many connections are frozen. */
  frozen: () => number
  /** Breaks what is frozen, and lets everything through again, on the same port. */
  restore: () => Promise<void>
}

/**
 * A TCP proxy in front of a Postgres, with which a test takes the database away and gives it back. `bytesPerMs`: what each
 * connection gets from the database, at most.
 */
export async function startProxy(scope: Scope, databaseUrl: string, { bytesPerMs = Infinity } = {}): Promise<Proxy> {
  const target = new URL(databaseUrl)
  const sockets = new Set<Socket>()
  const clients = new Set<Socket>()
  const holes = new Set<Socket>()
  let freezing = false
  let fatalText: string | undefined
  const server = createServer((inside) => {
    const outside = connect(Number(target.port), target.hostname)
    clients.add(inside)
    inside.on('close', () => clients.delete(inside))
    if (freezing) holes.add(inside)
    inside.on('data', (chunk) => {
      if (fatalText !== undefined && chunk.includes(fatalText)) void cut()
    })
    if (bytesPerMs < Infinity)
      outside.on('data', ({ length }) => {
        outside.pause()
        setTimeout(() => outside.resume(), length / bytesPerMs)
      })
    for (const [from, to] of [
      [inside, outside],
      [outside, inside],
    ] as const) {
      sockets.add(from)
      from.on('data', (chunk) => void (holes.has(inside) || to.write(chunk)))
      from.on('error', () => to.destroy())
      from.on('close', () => {
        sockets.delete(from)
        holes.delete(from)
        to.destroy()
      })
    }
  })
  const open = async (port: number) => {
    server.listen(port, '127.0.0.1')
    await once(server, 'listening')
    return (server.address() as AddressInfo).port
  }
  /** While it is not listened on, somebody's connection may have the port as its own. */
  const reopen = () =>
    waitFor(async () => await open(port), { timeoutMs: 30_000, what: "the proxy's port to be free again" })
  const breakAll = () => {
    for (const socket of sockets) socket.destroy()
  }
  const cut = async () => {
    const closed = server.listening ? once(server, 'close') : undefined
    server.close()
    breakAll()
    await closed
  }
  const port = await open(0)
  cleanUp(scope, cut)
  const url = new URL(databaseUrl)
  url.port = String(port)
  url.hostname = '127.0.0.1'
  return {
    url: url.href,
    cut,
    cutAt(text) {
      fatalText = text
    },
    freeze() {
      freezing = true
      for (const socket of clients) holes.add(socket)
    },
    thaw() {
      freezing = false
    },
    frozen: () => holes.size,
    async restore() {
      // What was swallowed is lost to these connections for ever: they cannot go on.
      breakAll()
      freezing = false
      fatalText = undefined
      if (!server.listening) await reopen()
    },
  }
}
