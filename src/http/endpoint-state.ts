import { z } from '@hono/zod-openapi'
import { fragment } from '../db/statement.ts'
import type { Breaker } from '../flow/breaker.ts'
import { count, timestamp } from './schemas.ts'

/** How an endpoint's traffic stands; also part of its health. */
export const stateFields = {
  state: z.enum(['active', 'inactive', 'failing', 'recovering']).openapi('EndpointState', {
    description:
      '`failing`: it has failed for a while, and gets one probe at a time. `recovering`: it has answered again, or has a new URL or been set active again, and gets what was held in growing chunks. `inactive`: it gets nothing.',
  }),
  state_reason: z.string().nullable().openapi({
    description: 'Why it is in another state than `active`, in words; null while it is active.',
    example: null,
  }),
  state_since: timestamp.nullable().openapi({ description: 'Null while active.', example: null }),
  held_count: count.openapi({ description: 'Deliveries that wait for the endpoint to take them.', example: 0 }),
  next_probe_at: timestamp.nullable().openapi({
    description:
      'While failing: when the next of its held deliveries is tried. Null if none is held, or if the endpoint is ordered and its first delivery waits for a retry: see that delivery’s `next_attempt_at`.',
    example: null,
  }),
}

export type StateRow = {
  is_active: boolean
  inactive_reason: 'tenant' | 'gone' | 'failing' | null
  inactive_since: Date | null
  stats: {
    breaker: Breaker['state']
    since: string | null
    next_probe_at: string | null
    failure_streak: number
    failing_since: string | null
    held: number
  } | null
}

/** The columns of a StateRow, in a query on waybill.endpoints. */
export const stateColumns = fragment`
  inactive_reason, inactive_since,
  (select json_build_object('breaker', s.breaker, 'since', s.breaker_since, 'next_probe_at',
        -- What is not held goes by its own retries. If ordered, nothing comes before the retry that all others wait for.
        case when s.held > 0 and not (endpoints.ordered and s.pending + s.retrying > s.held) then s.next_probe_at end,
      'failure_streak', s.failure_streak, 'failing_since', s.failing_since, 'held', s.held)
   from waybill.endpoint_stats s where s.tenant_id = endpoints.tenant_id and s.endpoint_id = endpoints.endpoint_id) as stats`

const REASONS = {
  tenant: 'set inactive by its tenant',
  gone: 'it answered 410 Gone',
  failing: 'every attempt has failed for too long',
}

/** The `stateFields` of an endpoint. */
export function renderState({ is_active, inactive_reason, inactive_since, stats }: StateRow) {
  const stands = (state: string, reason: string | null, since: Date | null, probeAt: Date | null = null) => ({
    state,
    state_reason: reason,
    state_since: since,
    held_count: stats?.held ?? 0,
    next_probe_at: probeAt,
  })
  if (!is_active) return stands('inactive', REASONS[inactive_reason ?? 'tenant'], inactive_since)
  const since = moment(stats?.since)
  if (stats?.breaker === 'open') {
    // Without `failing_since` a probe has just succeeded, and the breaker has not moved yet.
    const reason = stats.failing_since
      ? `failed ${stats.failure_streak === 1 ? 'once' : `${stats.failure_streak} times in a row`} since ${new Date(stats.failing_since).toISOString()}`
      : 'its recovery is being recorded'
    return stands('failing', reason, since, moment(stats.next_probe_at))
  }
  if (stats?.breaker === 'half_open' && stats.held > 0)
    return stands('recovering', 'it is getting what was held, in growing chunks', since)
  return stands('active', null, null)
}

const moment = (text: string | null | undefined) => (text ? new Date(text) : null)
