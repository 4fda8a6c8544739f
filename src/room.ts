export type Room = {
  /**
   * Runs `work` once there is room for its `amount`, first come, first served. Throws what `refusal` makes when too many wait
   * already or it has waited for too long, and the signal's reason when `signal` aborts while it waits.
   */
  hold<Result>(tenantId: string, amount: number, work: () => Promise<Result>, signal?: AbortSignal): Promise<Result>
}

/**
 * Bounds what work takes of something, bytes of memory or connections, however much of it there is at once and however much
 * each wants: to `size` together, of which a tenant gets at most half of what the others leave, and as much of the line.
 */
export function createRoom(size: number, line: { maxWaiting?: number; maxWaitMs: number; refusal: () => Error }): Room {
  type Entry = { tenantId: string; amount: number; enter: () => void }
  let taken = 0
  const takenBy = new Map<string, number>()
  let waiting: Entry[] = []

  /** What is larger than all of it goes in alone. */
  const isFull = (amount: number) => taken > 0 && taken + amount > size

  /** One of a tenant may take more than its share. */
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
  }

  /** Lets in, in order, whom there is room for; nobody overtakes one of the same tenant, or one that all lack room for. */
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

  function waitFor(tenantId: string, amount: number, signal?: AbortSignal): Promise<void> {
    if (!mayWait(tenantId)) throw line.refusal()
    return new Promise((resolve, reject) => {
      const leave = () => {
        clearTimeout(timer)
        signal?.removeEventListener('abort', interrupt)
      }
      const giveUp = (reason: unknown) => {
        leave()
        waiting.splice(waiting.indexOf(entry), 1)
        reject(reason)
        // A smaller one may have stood behind it.
        admit()
      }
      const interrupt = () => giveUp(signal?.reason)
      const timer = setTimeout(() => giveUp(line.refusal()), line.maxWaitMs)
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

  return {
    async hold(tenantId, amount, work, signal) {
      signal?.throwIfAborted()
      if (waiting.length === 0 && !isFull(amount) && hasShare(tenantId, amount)) take(tenantId, amount)
      else await waitFor(tenantId, amount, signal)
      try {
        return await work()
      } finally {
        giveBack(tenantId, amount)
        admit()
      }
    },
  }
}
