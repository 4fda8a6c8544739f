import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import { cleanUp, type Scope } from '../../test/support/cleanup.ts'
import type { Random } from './random.ts'

export type DatabaseProxy = {
  /** The database's URL as seen through it. */
  url: string
  /** Nothing passes any more; connections stay open, and new ones hang. */
  freeze: () => void
  /** What is open now stays open and carries nothing any more, in either direction; new connections are sound. */
  forget: () => void
  /** A round trip takes `delayMs` more, and each second each connection is reset with the chance `resets`. */
  disturb: (how: { delayMs: number; resets: number; random: Random }) => void
  /** How many connections were reset by that. */
  resets: () => number
  /** Breaks every connection; new ones are sound, and go to another server when its port is given. */
  restore: (port?: number) => Promise<void>
}

type Pair = { inside: Socket; outside: Socket; dead: boolean }

/** What stands between services and a Postgres, for experiments that break the network. */
export async function startProxy(scope: Scope, databaseUrl: string): Promise<DatabaseProxy> {
  const target = new URL(databaseUrl)
  const pairs = new Set<Pair>()
  let serverPort = Number(target.port)
  let frozen = false
  let delayMs = 0
  let resets = 0
  let resetting: NodeJS.Timeout | undefined

  function breakAll(): void {
    for (const { inside, outside } of pairs) {
      inside.resetAndDestroy()
      outside.destroy()
    }
  }

  function carry(pair: Pair, from: Socket, to: Socket): void {
    const blocked = () => frozen || pair.dead
    from.on('data', (chunk) => {
      if (blocked()) return
      // Timers of one length fire in the order in which they were set, so nothing is overtaken.
      if (delayMs > 0) setTimeout(() => blocked() || to.write(chunk), delayMs / 2)
      else to.write(chunk)
    })
    from.on('error', () => {})
    // Over a dead connection nobody hears of the end of the other.
    from.on('close', () => {
      if (!blocked()) setTimeout(() => to.destroy(), delayMs / 2)
      if (pair.inside.destroyed && pair.outside.destroyed) pairs.delete(pair)
    })
  }

  const server = createServer({ noDelay: true }, (inside) => {
    const outside = connect({ port: serverPort, host: '127.0.0.1', noDelay: true })
    const pair = { inside, outside, dead: false }
    pairs.add(pair)
    carry(pair, inside, outside)
    carry(pair, outside, inside)
  })
  async function open(port: number): Promise<number> {
    server.listen(port, '127.0.0.1')
    await once(server, 'listening')
    return (server.address() as AddressInfo).port
  }
  async function cut(): Promise<void> {
    const closed = server.listening ? once(server, 'close') : undefined
    server.close()
    breakAll()
    await closed
  }
  const calm = () => {
    clearInterval(resetting)
    delayMs = 0
  }

  const port = await open(0)
  target.port = String(port)
  cleanUp(scope, async () => {
    calm()
    await cut()
  })
  return {
    url: target.href,
    freeze() {
      frozen = true
    },
    forget() {
      for (const pair of pairs) pair.dead = true
    },
    disturb(how) {
      calm()
      delayMs = how.delayMs
      resetting = setInterval(() => {
        for (const { inside, outside } of pairs) {
          if (how.random.next() >= how.resets) continue
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
      breakAll()
      frozen = false
      if (!server.listening) await open(port)
    },
  }
}
