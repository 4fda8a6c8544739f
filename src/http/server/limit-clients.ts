import type { Server } from 'node:net'

const TELL_MS = 1000

/** Refuses connections beyond `most`, and tells how many were refused, at most once a second. */
export function limitClients(server: Server, most: number, tell: (refused: number) => void): void {
  let refused = 0
  server.maxConnections = most
  server.on('drop', () => {
    if (refused++ > 0) return
    setTimeout(() => {
      tell(refused)
      refused = 0
    }, TELL_MS).unref()
  })
}
