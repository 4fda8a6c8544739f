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
  /** How many frozen connections their clients still keep. */
  frozen: () => number
  /** A round trip takes `delayMs` more, and each second each connection is reset with the chance `resets`. */
  disturb: (how: { delayMs: number; resets: number; random: () => number }) => void
  /** How many connections were reset by that. */
  resets: () => number
  /** Breaks all connections, and lets new ones through again: on the same port, and to another server when its port is given. */
  restore: (serverPort?: number) => Promise<void>
}

/**
 * A TCP proxy in front of a Postgres, with which a test takes the database away and gives it back. `bytesPerMs`: what each
 * connection gets from the database, at most. `pools`: like a pooler that is told to ignore `options`, it tells the database nothing of
 * the settings that connections ask for.
 */
export async function startProxy(
  scope: Scope,
  databaseUrl: string,
  { bytesPerMs = Infinity, pools = false } = {},
): Promise<Proxy> {
  const target = new URL(databaseUrl)
  /** By what leads to the client, what leads to the server. */
  const pairs = new Map<Socket, Socket>()
  const holes = new Set<Socket>()
  let serverPort = Number(target.port)
  let freezing = false
  let fatalText: string | undefined
  let delayMs = 0
  let resets = 0
  let resetting: NodeJS.Timeout | undefined
  const server = createServer({ noDelay: true }, (inside) => {
    const outside = connect({ port: serverPort, host: target.hostname, noDelay: true })
    pairs.set(inside, outside)
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
      const carry = (chunk: Buffer) => holes.has(inside) || to.write(pools ? withoutSettings(chunk) : chunk)
      // Timers of one length fire in the order in which they were set, so nothing is overtaken.
      from.on('data', (chunk) => void (delayMs > 0 ? setTimeout(carry, delayMs / 2, chunk) : carry(chunk)))
      from.on('error', () => {})
      from.on('close', () => {
        // In a hole nobody hears of the end of the other.
        if (!holes.has(inside)) setTimeout(() => to.destroy(), delayMs / 2)
        if (!inside.destroyed || !outside.destroyed) return
        pairs.delete(inside)
        holes.delete(inside)
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
    for (const pair of pairs) for (const socket of pair) socket.destroy()
  }
  const calm = () => {
    clearInterval(resetting)
    delayMs = 0
  }
  const cut = async () => {
    const closed = server.listening ? once(server, 'close') : undefined
    server.close()
    breakAll()
    await closed
  }
  const port = await open(0)
  cleanUp(scope, async () => {
    calm()
    await cut()
  })
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
      for (const inside of pairs.keys()) holes.add(inside)
    },
    thaw() {
      freezing = false
    },
    frozen: () =>
      holes
        .values()
        .filter((inside) => !inside.destroyed)
        .toArray().length,
    disturb(how) {
      delayMs = how.delayMs
      resetting = setInterval(() => {
        for (const [inside, outside] of pairs) {
          if (how.random() >= how.resets) continue
          resets++
          inside.resetAndDestroy()
          outside.destroy()
        }
      }, 1000)
    },
    resets: () => resets,
    async restore(other = serverPort) {
      serverPort = other
      calm()
      // What was swallowed is lost to these connections for ever: they cannot go on.
      breakAll()
      freezing = false
      fatalText = undefined
      if (!server.listening) await reopen()
    },
  }
}

/** A first message whose `options` are blank. */
const withoutSettings = (message: Buffer) =>
  Buffer.from(
    message.toString('latin1').replace(/(?<=\0options\0)[^\0]*/, (settings) => ' '.repeat(settings.length)),
    'latin1',
  )
