import { readFileSync } from 'node:fs'
import type { Server } from 'node:net'

/** How many file descriptors a process needs besides clients and receivers: 31 for the database, and some 30 for Node itself. */
const OWN_FILES = 80
/** With fewer clients it could not even be asked how it is. */
const FEWEST = 8
const TELL_MS = 1000

/**
 * How many clients may be connected, so that they leave file descriptors to the database's connections and, where there is a
 * worker, as many as they have to receivers: connections to those are kept while there are no more. Without /proc, as on macOS, any number.
 */
export function mostClients(hasWorker: boolean): number {
  try {
    const files = Number(/^Max open files +(\d+)/m.exec(readFileSync('/proc/self/limits', 'utf8'))?.[1] ?? Infinity)
    return Math.max(FEWEST, Math.floor((files - OWN_FILES) / (hasWorker ? 2 : 1)))
  } catch {
    return Infinity
  }
}

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
