import type { Server } from 'node:http'
import { serve } from '@hono/node-server'
import type { App } from './route.ts'

export type Listening = {
  port: number
  /** Takes no new connections, answers what is under way, then closes. */
  close: () => Promise<void>
}

/** Serves `app`; resolves when it listens, rejects when it cannot. Port 0 picks a free one. */
export async function listen(app: App, { hostname, port }: { hostname: string; port: number }): Promise<Listening> {
  let draining = false
  const server = await new Promise<Server>((resolve, reject) => {
    const opening = serve({ fetch: app.fetch, hostname, port }, () => resolve(opening)) as Server
    opening.once('error', reject)
  })
  // While draining, idle clients are told to go: a kept-alive connection would hold the close for seconds.
  server.on('request', (_request, response) => {
    if (draining) response.setHeader('connection', 'close')
  })
  const address = server.address()
  return {
    port: typeof address === 'object' && address !== null ? address.port : port,
    close: () =>
      new Promise((resolve) => {
        draining = true
        server.close(() => resolve())
        server.closeIdleConnections()
      }),
  }
}
