import { createServer, type IncomingHttpHeaders } from 'node:http'
import type { AddressInfo } from 'node:net'
import { cleanUp, type Scope } from './cleanup.ts'
import { patience } from './wait.ts'

/** A request as it arrived. `body` holds the raw bytes; `at` is `Date.now()` when the last of them came. */
export type Receipt = { path: string; headers: IncomingHttpHeaders; body: Buffer; at: number }

/** A status, a whole answer, or a function that decides (and may take its time); null resets the connection instead. */
export type Reply = number | Answer | ((receipt: Receipt) => Reply | null | Promise<Reply | null>)
type Answer = { status?: number; headers?: Record<string, string>; body?: string }

export type Receiver = {
  /** The address of a path here: `url('/orders')`. */
  url: (path?: string) => string
  /** Every request so far, in order of arrival, also those that are not answered yet. */
  receipts: Receipt[]
  /** Those of one path. */
  at: (path: string) => Receipt[]
  /** What a path answers: each reply once, in order, then the last one for good. Without a script it is 200. */
  script: (path: string, ...replies: [Reply, ...Reply[]]) => void
  /** Resolves with the receipts (of one path) when there are at least `count`. */
  until: (count: number, options?: { path?: string; timeoutMs?: number }) => Promise<Receipt[]>
}

/** A real HTTP server that takes webhooks, answers as the test scripts it, and keeps a ledger of what arrived. */
export async function startReceiver(scope: Scope): Promise<Receiver> {
  const receipts: Receipt[] = []
  const scripts = new Map<string, Reply[]>()
  const watchers = new Set<() => void>()
  const server = createServer({ keepAlive: true }, async (request, response) => {
    const chunks: Buffer[] = []
    try {
      for await (const chunk of request) chunks.push(chunk)
    } catch {
      // The sender went away in the middle of its request: there is nobody to answer.
      return
    }
    const receipt = {
      path: request.url ?? '/',
      headers: request.headers,
      body: Buffer.concat(chunks),
      at: Date.now(),
    }
    receipts.push(receipt)
    for (const look of watchers) look()
    const script = scripts.get(receipt.path)
    let reply: Reply | null = (script && script.length > 1 ? script.shift() : script?.[0]) ?? 200
    while (typeof reply === 'function') reply = await reply(receipt)
    if (reply === null) {
      request.socket.resetAndDestroy()
      return
    }
    const { status = 200, headers = {}, body = '' } = typeof reply === 'number' ? { status: reply } : reply
    response.writeHead(status, headers).end(body)
  })
  await new Promise<void>((listening) => server.listen(0, '127.0.0.1', listening))
  const { port } = server.address() as AddressInfo
  cleanUp(scope, async () => {
    server.closeAllConnections()
    await new Promise((closed) => server.close(closed))
  })

  const at = (path: string) => receipts.filter((receipt) => receipt.path === path)

  async function until(count: number, { path, timeoutMs }: { path?: string; timeoutMs?: number } = {}) {
    const found = () => (path === undefined ? receipts : at(path))
    if (found().length < count) {
      const waitMs = patience(timeoutMs)
      await new Promise<void>((resolve, reject) => {
        const stop = () => {
          clearTimeout(timer)
          watchers.delete(look)
        }
        const look = () => {
          if (found().length < count) return
          stop()
          resolve()
        }
        const timer = setTimeout(() => {
          stop()
          reject(
            new Error(`${found().length} of ${count} webhooks arrived at ${path ?? 'the receiver'} in ${waitMs} ms`),
          )
        }, waitMs)
        watchers.add(look)
      })
    }
    return [...found()]
  }

  return {
    url: (path = '/') => `http://127.0.0.1:${port}${path}`,
    receipts,
    at,
    script: (path, ...replies) => scripts.set(path, replies),
    until,
  }
}

/** A reply that waits until the test opens the gate: a receiver that is busy for as long as the test needs. */
export function gate(reply: Reply = 200): { reply: Reply; open: () => void } {
  let open = () => {}
  const opened = new Promise<void>((resolve) => {
    open = resolve
  })
  return {
    reply: async () => {
      await opened
      return reply
    },
    open,
  }
}
