import { LRUCache } from 'lru-cache'

/** About half of what a worker can retry beside first attempts. */
const PER_SECOND = 500
/** What fails all at once is spread by its jitter alone. */
const BURST = 1000
const MAX_TENANTS = 10_000

/**
 * Retries go in the order in which they are due, whoever's they are, so what one tenant's failures bring must not fill the
 * queue for good. The returned function takes note of a failure and says how many seconds its retry should wait at least: 0,
 * unless the tenant's come faster than `PER_SECOND` in this worker. `clock` is in milliseconds.
 */
export function createSpread(clock = () => performance.now()): (tenantId: string) => number {
  /** When the last retry of each tenant would be due, at that pace. */
  const lastDue = new LRUCache<string, number>({ max: MAX_TENANTS })
  return (tenantId) => {
    const earliest = clock() - (BURST / PER_SECOND) * 1000
    const due = Math.max(lastDue.get(tenantId) ?? earliest, earliest) + 1000 / PER_SECOND
    lastDue.set(tenantId, due)
    // Rounded by chance: whole seconds would come in waves.
    return Math.max(0, Math.floor((due - clock()) / 1000 + Math.random()))
  }
}
