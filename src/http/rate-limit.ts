import type { Context } from 'hono'
import type { Pool } from '../db/open.ts'
import { AppError } from '../errors.ts'
import { createRateCounter, type RateAction, type RatePlace } from '../flow/rate-counter.ts'
import type { Env } from './answer.ts'
import type { Tenant } from './auth.ts'

/** Those that are counted here: not what the publish transaction counts. */
export type CountedAction = Exclude<RateAction, 'events:write'>
export type RateLimits = { windowSeconds: number; limits: Record<CountedAction, number> }

/** Counts a request against its action's window, and says where it stands. */
export function createRateLimit(pool: Pool, { windowSeconds, limits }: RateLimits) {
  const counter = createRateCounter(pool, windowSeconds)

  /** Sets the X-RateLimit headers; throws `rate limit exceeded` when the place is beyond the limit. */
  function apply(c: Context<Env>, tenant: Tenant, action: RateAction, place: RatePlace): void {
    if (place.limit === 0) return
    // At most a window: one that begins tomorrow, because the database's clock was ahead, is soon dropped (upkeep/clock-set-back.ts).
    const secondsLeft = Math.max(1, Math.min(windowSeconds, place.secondsLeft))
    const { outgoing } = c.env
    outgoing.headers['x-ratelimit-limit'] = place.limit
    outgoing.headers['x-ratelimit-remaining'] = Math.max(0, place.limit - place.count)
    outgoing.headers['x-ratelimit-reset'] = secondsLeft
    if (place.count <= place.limit) return
    outgoing.headers['retry-after'] = String(secondsLeft)
    throw new AppError('rate_limited', {
      tenant_id: tenant.tenantId,
      action,
      limit: place.limit,
      current: place.count,
      window_seconds: windowSeconds,
      window_start: place.windowStart.toISOString(),
      retry_after_seconds: secondsLeft,
    })
  }

  return {
    apply,
    async count(c: Context<Env>, tenant: Tenant, action: CountedAction): Promise<void> {
      const limit = limits[action]
      if (limit > 0) apply(c, tenant, action, { limit, ...(await counter({ tenantId: tenant.tenantId, action })) })
    },
  }
}

export type RateLimit = ReturnType<typeof createRateLimit>
