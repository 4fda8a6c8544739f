import { readFileSync } from 'node:fs'

/** How many file descriptors a process needs besides clients and receivers: 31 for the database, and some 30 for Node itself. */
const OWN_FILES = 80
/** With fewer clients it could not even be asked how it is. */
const FEWEST = 8

/**
 * How many connections to clients, and to receivers where there is a worker, leave file descriptors to the database's and to one
 * another. `sides`: how many of these two there are. Without /proc, as on macOS, any number.
 */
export function connectionsPerSide(sides: 1 | 2): number {
  try {
    const files = Number(/^Max open files +(\d+)/m.exec(readFileSync('/proc/self/limits', 'utf8'))?.[1] ?? Infinity)
    return Math.max(FEWEST, Math.floor((files - OWN_FILES) / sides))
  } catch {
    return Infinity
  }
}
