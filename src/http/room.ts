import { AppError } from '../errors.ts'

/** A short wait costs a client less than an error, so this many wait for as long as this; more would wait in vain. */
const MAX_WAITING = 1000
const MAX_WAIT_MS = 1000

export type Room = {
  /**
   * Runs `work` once there is room for it, first come, first served; a body that waits is not read from its socket, so that
   * its sender has to wait as well. Throws `service overloaded` when too many wait already, or it has waited for a second.
   */
  hold<Result>(tenantId: string, amount: number, work: () => Promise<Result>): Promise<Result>
}

/**
 * Bounds what requests take of something, bytes of memory or connections, however many arrive at once and however much each
 * wants: to `size` together, of which a tenant gets at most half of what the others leave, and as much of the line.
 */
export function createRoom(size: number): Room {
  type Entry = { tenantId: string; amount: number; enter: () => void }
  let taken = 0
  const takenBy = new Map<string, number>()
  let waiting: Entry[] = []

  /** What is larger than all of it goes in alone. */
  const isFull = (amount: number) => taken > 0 && taken + amount > size

  /** One request of a tenant may take more than its share. */
  function hasShare(tenantId: string, amount: number): boolean {
    const own = takenBy.get(tenantId) ?? 0
    return own === 0 || own + amount <= (size - (taken - own)) / 2
  }

  function mayWait(tenantId: string): boolean {
    const own = waiting.filter((entry) => entry.tenantId === tenantId).length
    return own < (MAX_WAITING - (waiting.length - own)) / 2
  }

  function take(tenantId: string, amount: number): void {
    taken += amount
    takenBy.set(tenantId, (takenBy.get(tenantId) ?? 0) + amount)
  }

  function giveBack(tenantId: string, amount: number): void {
    taken -= amount
    const left = (takenBy.get(tenantId) ?? 0) - amount
    if (left > 0) takenBy.set(tenantId, left)
    else takenBy.delete(tenantId)
  }

  /** Lets in, in order, whom there is room for; nobody overtakes a request of the same tenant, or one that all lack room for. */
  function admit(): void {
    const behind = new Set<string>()
    let full = false
    waiting = waiting.filter((entry) => {
      const { tenantId, amount } = entry
      full ||= isFull(amount)
      if (full || behind.has(tenantId) || !hasShare(tenantId, amount)) {
        behind.add(tenantId)
        return true
      }
      take(tenantId, amount)
      entry.enter()
      return false
    })
  }

  function waitFor(tenantId: string, amount: number): Promise<void> {
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
      const entry = { tenantId, amount, enter }
      waiting.push(entry)
      admit()
    })
  }

  return {
    async hold(tenantId, amount, work) {
      if (waiting.length === 0 && !isFull(amount) && hasShare(tenantId, amount)) take(tenantId, amount)
      else await waitFor(tenantId, amount)
      try {
        return await work()
      } finally {
        giveBack(tenantId, amount)
        admit()
      }
    },
  }
}
