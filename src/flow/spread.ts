import { LRUCache } from 'lru-cache'

/** About half of the retries a second that a worker can make alongside first attempts. */
export const PER_SECOND = 500
/** Up to this many failures that come all at once are left to be spread by the jitter of their backoff. */
const BURST = 1000
/** Retries are counted by spans of this length. */
const SPAN_MS = 2000
/** By how much longer than it was asked a retry waits at most. */
export const MAX_SPREAD_SECONDS = 86_400
/** How many spans are remembered, each of each tenant apart. Receivers may ask for any within a day, which has 43,200. */
const MAX_SPANS = 100_000

/**
 * Retries go out in the order in which they are due, whatever their tenant, so one tenant's failures could fill the queue: receivers
 * can go on for hours to ask for the same moment. The returned function is told of a retry for which the receiver asked to wait
 * `askedSeconds` (Retry-After; else 0), and returns for how many seconds it has to wait at least. That is longer than asked, by up to
 * a day, if more than `perSecond` of the tenant's retries in this worker would be due then. `clock` is in milliseconds.
 */
export function createSpread({
  perSecond = PER_SECOND,
  clock = () => performance.now(),
} = {}): (tenantId: string, askedSeconds?: number) => number {
  const most = Math.max(1, Math.round((perSecond * SPAN_MS) / 1000))
  /** How many of a tenant's retries are due in a span, and, once it is full, the next that may have room. */
  const spans = new LRUCache<string, { count: number; next: number }>({ max: MAX_SPANS })

  /** When one more of a tenant's retries is due, in milliseconds: in the first span from `span` on that has room. */
  function place(tenantId: string, span: number): number {
    const full: { next: number }[] = []
    for (let at = span; ; ) {
      const key = `${tenantId} ${at}`
      const taken = spans.get(key) ?? { count: 0, next: at + 1 }
      if (taken.count < most) {
        for (const one of full) one.next = at
        spans.set(key, { ...taken, count: taken.count + 1 })
        return (at + taken.count / most) * SPAN_MS
      }
      full.push(taken)
      at = taken.next
    }
  }

  return (tenantId, askedSeconds = 0) => {
    const now = clock()
    const due = place(tenantId, Math.floor((now + (askedSeconds - BURST / perSecond) * 1000) / SPAN_MS))
    // Rounded at random: retries at whole seconds would come in waves.
    const seconds = Math.floor((due - now) / 1000 + Math.random())
    return Math.min(Math.max(askedSeconds, seconds), askedSeconds + MAX_SPREAD_SECONDS)
  }
}
