import { AppError } from '../errors.ts'

/** A short wait costs a client less than an error, so this many wait for as long as this; more would wait in vain. */
const MAX_WAITING = 1000
const MAX_WAIT_MS = 1000

export type Room = {
  /**
   * Runs `work` once there is room for its `bytes`, first come, first served; what waits is not read from its socket, so
   * that its sender has to wait as well. Throws `service overloaded` when too many wait already, or it has waited for a second.
   */
  hold<Result>(tenantId: string, bytes: number, work: () => Promise<Result>): Promise<Result>
}

/**
 * Bounds the memory that requests take, however many arrive at once and however large they are: to `size` bytes together,
 * of which a tenant gets at most half of what the others leave, and as much of the line.
 */
export function createRoom(size: number): Room {
  type Entry = { tenantId: string; bytes: number; enter: () => void }
  let taken = 0
  const takenBy = new Map<string, number>()
  let waiting: Entry[] = []

  /** A body larger than all of it goes in alone. */
  const isFull = (bytes: number) => taken > 0 && taken + bytes > size

  /** One body of a tenant may be larger than its share. */
  function hasShare(tenantId: string, bytes: number): boolean {
    const own = takenBy.get(tenantId) ?? 0
    return own === 0 || own + bytes <= (size - (taken - own)) / 2
  }

  function mayWait(tenantId: string): boolean {
    const own = waiting.filter((entry) => entry.tenantId === tenantId).length
    return own < (MAX_WAITING - (waiting.length - own)) / 2
  }

  function take(tenantId: string, bytes: number): void {
    taken += bytes
    takenBy.set(tenantId, (takenBy.get(tenantId) ?? 0) + bytes)
  }

  function giveBack(tenantId: string, bytes: number): void {
    taken -= bytes
    const left = (takenBy.get(tenantId) ?? 0) - bytes
    if (left > 0) takenBy.set(tenantId, left)
    else takenBy.delete(tenantId)
  }

  /** Lets in, in order, whom there is room for; nobody overtakes a request of the same tenant, or one that all lack room for. */
  function admit(): void {
    const behind = new Set<string>()
    let full = false
    waiting = waiting.filter((entry) => {
      const { tenantId, bytes } = entry
      full ||= isFull(bytes)
      if (full || behind.has(tenantId) || !hasShare(tenantId, bytes)) {
        behind.add(tenantId)
        return true
      }
      take(tenantId, bytes)
      entry.enter()
      return false
    })
  }

  function waitFor(tenantId: string, bytes: number): Promise<void> {
    if (!mayWait(tenantId)) throw new AppError('overloaded')
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        waiting.splice(waiting.indexOf(entry), 1)
        reject(new AppError('overloaded'))
        // A smaller one may have stood behind it.
        admit()
      }, MAX_WAIT_MS)
      const enter = () => {
        clearTimeout(timer)
        resolve()
      }
      const entry = { tenantId, bytes, enter }
      waiting.push(entry)
      admit()
    })
  }

  return {
    async hold(tenantId, bytes, work) {
      if (waiting.length === 0 && !isFull(bytes) && hasShare(tenantId, bytes)) take(tenantId, bytes)
      else await waitFor(tenantId, bytes)
      try {
        return await work()
      } finally {
        giveBack(tenantId, bytes)
        admit()
      }
    },
  }
}
