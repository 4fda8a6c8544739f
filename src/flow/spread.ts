import { LRUCache } from 'lru-cache'

/** About half of the retries a second that a worker can make alongside first attempts. */
export const PER_SECOND = 500
/** Up to this many failures that come all at once are left to be spread by the jitter of their backoff. */
const BURST = 1000
const MINUTE_MS = 60_000
/** How many minutes are remembered, each of each tenant apart. */
const MAX_MINUTES = 10_000

/**
 * Retries go out in the order in which they are due, whatever their tenant, so one tenant's failures could fill the queue.
 * The returned function notes a retry, whose receiver asked to be spared for so many seconds (Retry-After; else 0), and returns
 * how many it should wait at least: as many, unless more than `perSecond` of the tenant's in this worker would be due at
 * that time, since receivers can ask for the same moment for hours. `clock` is in milliseconds.
 */
export function createSpread({
  perSecond = PER_SECOND,
  clock = () => performance.now(),
} = {}): (tenantId: string, askedSeconds?: number) => number {
  /** When the last of a tenant's retries that are due in a minute would be due at that pace. */
  const lastDue = new LRUCache<string, number>({ max: MAX_MINUTES })
  return (tenantId, askedSeconds = 0) => {
    const now = clock()
    const earliest = now + askedSeconds * 1000 - (BURST / perSecond) * 1000
    for (let minute = Math.floor(earliest / MINUTE_MS); ; minute++) {
      const key = `${tenantId} ${minute}`
      const due = Math.max(lastDue.get(key) ?? minute * MINUTE_MS, earliest) + 1000 / perSecond
      // What a minute has no room for is due in the next.
      if (due > (minute + 1) * MINUTE_MS) continue
      lastDue.set(key, due)
      // Rounded at random: retries at whole seconds would come in waves.
      return Math.max(askedSeconds, Math.floor((due - now) / 1000 + Math.random()))
    }
  }
}
