import { LRUCache } from 'lru-cache'

/** About half of the retries a second that a worker can make alongside first attempts. */
const PER_SECOND = 500
/** Up to this many failures that come all at once are left to be spread by the jitter of their backoff. */
const BURST = 1000
const MAX_TENANTS = 10_000

/**
 * Retries go out in the order in which they are due, whatever their tenant, so one tenant's failures could fill the queue.
 * The returned function notes a failure, and returns how many seconds its retry should wait at least: 0, unless the
 * tenant's attempts fail faster than `PER_SECOND` in this worker. `clock` is in milliseconds.
 */
export function createSpread(clock = () => performance.now()): (tenantId: string) => number {
  /** When each tenant's last retry would be due at that pace. */
  const lastDue = new LRUCache<string, number>({ max: MAX_TENANTS })
  return (tenantId) => {
    const earliest = clock() - (BURST / PER_SECOND) * 1000
    const due = Math.max(lastDue.get(tenantId) ?? earliest, earliest) + 1000 / PER_SECOND
    lastDue.set(tenantId, due)
    // Rounded at random: retries at whole seconds would come in waves.
    return Math.max(0, Math.floor((due - clock()) / 1000 + Math.random()))
  }
}
