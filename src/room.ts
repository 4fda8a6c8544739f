import { AppError } from './errors.ts'
import { setLate } from './pacing.ts'

type LineRules = {
  maxWaiting?: number
  maxWaitMs: number
  refusal: () => Error
  /** Called when a tenant has waited for half of `maxWaitMs` for room that others have. */
  onWanted?: (tenantId: string) => void
}

type Room = {
  /**
   * Takes `amount` once there is room for it, first come, first served, and resolves with what gives it back. Throws `refusal()` if
   * too many wait already or it has waited too long.
   */
  enter(tenantId: string, amount: number): Promise<() => void>
  /** Runs `work` in it, from entering to its end. Throws the signal's reason if `signal` aborts while it waits. */
  run<Result>(tenantId: string, amount: number, work: () => Promise<Result>, signal?: AbortSignal): Promise<Result>
}

/**
 * Bounds how much of a resource, such as bytes of memory or connections, is in use at once: `size` in all, of which a tenant gets at
 * most half of what the others leave. The same holds for its places in the line of those that wait.
 */
export function createRoom(size: number, line: LineRules): Room {
  type Entry = { tenantId: string; amount: number; enter: () => void }
  let taken = 0
  const takenBy = new Map<string, number>()
  let waiting: Entry[] = []

  /** Work that is larger than the whole room runs alone. */
  const isFull = (amount: number) => taken > 0 && taken + amount > size

  /** A tenant's only piece of work may exceed its share. */
  function hasShare(tenantId: string, amount: number): boolean {
    const own = takenBy.get(tenantId) ?? 0
    return own === 0 || own + amount <= (size - (taken - own)) / 2
  }

  function mayWait(tenantId: string): boolean {
    const own = waiting.filter((entry) => entry.tenantId === tenantId).length
    return own < ((line.maxWaiting ?? Infinity) - (waiting.length - own)) / 2
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
    admit()
  }

  /** Admits those there is room for, in order. Nobody overtakes another of the same tenant, or one that waits only for room. */
  function admit(): void {
    const behind = new Set<string>()
    let full = false
    waiting = waiting.filter((entry) => {
      const { tenantId, amount } = entry
      if (behind.has(tenantId) || !hasShare(tenantId, amount)) {
        behind.add(tenantId)
        return true
      }
      full ||= isFull(amount)
      if (full) return true
      take(tenantId, amount)
      entry.enter()
      return false
    })
  }

  function waitFor(tenantId: string, amount: number, signal?: AbortSignal): Promise<void> {
    if (!mayWait(tenantId)) throw line.refusal()
    return new Promise((resolve, reject) => {
      const leave = () => {
        clearTimeout(timer)
        clearTimeout(half)
        signal?.removeEventListener('abort', interrupt)
      }
      const giveUp = (reason: unknown) => {
        leave()
        waiting.splice(waiting.indexOf(entry), 1)
        reject(reason)
        // A smaller one may have waited behind it.
        admit()
      }
      const interrupt = () => giveUp(signal?.reason)
      const timer = setTimeout(() => giveUp(line.refusal()), line.maxWaitMs)
      const half = setLate(() => {
        // One that waits for its tenant's others to leave, or stands behind one of them, wants nothing of anybody else.
        const isFirst = waiting.find((other) => other.tenantId === tenantId) === entry
        if (isFirst && hasShare(tenantId, amount)) line.onWanted?.(tenantId)
      }, line.maxWaitMs / 2)
      signal?.addEventListener('abort', interrupt)
      const enter = () => {
        leave()
        resolve()
      }
      const entry = { tenantId, amount, enter }
      waiting.push(entry)
      admit()
    })
  }

  async function enter(tenantId: string, amount: number, signal?: AbortSignal): Promise<() => void> {
    signal?.throwIfAborted()
    if (waiting.length === 0 && !isFull(amount) && hasShare(tenantId, amount)) take(tenantId, amount)
    else await waitFor(tenantId, amount, signal)
    return () => giveBack(tenantId, amount)
  }

  return {
    enter,
    async run(tenantId, amount, work, signal) {
      const leave = await enter(tenantId, amount, signal)
      try {
        return await work()
      } finally {
        leave()
      }
    },
  }
}

/**
 * Room for requests: a short wait costs a client less than an error, so a thousand may wait, for a second; more would wait in vain and
 * are refused with `service overloaded`. While a request waits, no more of its body is read than the 128 KiB that Node takes unasked
 * (http/body.ts), so that its sender waits as well.
 */
export const createRequestRoom = (size: number, line: Partial<Omit<LineRules, 'refusal'>> = {}): Room =>
  createRoom(size, { maxWaiting: 1000, maxWaitMs: 1000, ...line, refusal: () => new AppError('overloaded') })
