import { createRoute, z } from '@hono/zod-openapi'
import type { AddressRange } from '../egress/address.ts'
import { RATE_ACTIONS, type RateAction } from '../flow/rate-counter.ts'
import type { Tenant } from './auth.ts'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import type { RateLimits } from './rate-limit.ts'
import type { Reads } from './reads.ts'
import type { Mount } from './route.ts'
import { answers, count, ok, timestamp } from './schemas.ts'
import { readUsage } from './usage.ts'

const hardLimits = z
  .object({
    max_endpoints: z.int().openapi({ example: 100 }),
    max_fanout_endpoints: z.int().openapi({ example: 100 }),
    max_payload_bytes: z.int().openapi({ example: 262_144 }),
  })
  .openapi('HardLimits')

const getUsage = createRoute({
  method: 'get',
  path: '/v1/usage/current',
  operationId: 'getCurrentUsage',
  tags: ['Usage'],
  summary: 'What the tenant has used this month',
  description:
    'Counted by the transactions that accept events and start attempts. What a limit refused is not counted. Nor are the events by which the service tells of endpoints and dead letters, but the attempts to deliver them are.',
  responses: {
    200: answers(
      'This UTC calendar month so far',
      z
        .object({
          ok,
          month: z.string().openapi({ example: '2026-11' }),
          period_start: timestamp.openapi({ example: '2026-11-01T00:00:00.000Z' }),
          period_end: timestamp.openapi({ description: 'Exclusive.', example: '2026-12-01T00:00:00.000Z' }),
          events_count: count.openapi({ example: 1200 }),
          attempts_count: count.openapi({
            description: 'Attempts that were started, and those that are about to be.',
            example: 1310,
          }),
        })
        .openapi('Usage'),
    ),
    ...errorAnswers(...TENANT_ERRORS),
  },
})

const getLimits = createRoute({
  method: 'get',
  path: '/v1/usage/limits',
  operationId: 'getUsageLimits',
  tags: ['Usage'],
  summary: 'The tenant’s monthly and hard limits',
  description: 'The service’s own, or what the operator has set for this tenant.',
  responses: {
    200: answers(
      'The limits that hold for this tenant',
      z
        .object({
          ok,
          monthly: z.object({
            events: count.openapi({ example: 1_000_000 }),
            attempts: count.openapi({ example: 5_000_000 }),
          }),
          hard: hardLimits,
        })
        .openapi('UsageLimits'),
    ),
    ...errorAnswers(...TENANT_ERRORS),
  },
})

const rateOf = z.object({
  limit: z.int().openapi({ description: '0: no limit.', example: 600 }),
  window_seconds: z.int().openapi({ example: 60 }),
})

const getSafety = createRoute({
  method: 'get',
  path: '/v1/safety/limits',
  operationId: 'getSafetyLimits',
  tags: ['Usage'],
  summary: 'Rate limits, hard limits and active protections',
  description: 'What keeps one tenant from harming others, and receivers from harming the service.',
  responses: {
    200: answers(
      'What holds for this tenant',
      z
        .object({
          ok,
          rate_limits: z.object(Object.fromEntries(RATE_ACTIONS.map((action) => [action, rateOf]))),
          hard_limits: hardLimits,
          protections: z.object({
            ssrf_protection: z.boolean().openapi({ description: 'Applies to all addresses but `egress_exemptions`.' }),
            payload_size_limit: z.boolean(),
            endpoint_quota: z.boolean(),
            fanout_limit: z.boolean(),
            monthly_limits: z.boolean(),
            rate_limiting: z.boolean(),
          }),
          egress_exemptions: z.array(z.string()).openapi({
            description:
              'Address ranges that the operator has exempted from the blocked classes (`EGRESS_ALLOW`); empty in production.',
            example: [],
          }),
        })
        .openapi('SafetyLimits'),
    ),
    ...errorAnswers(...TENANT_ERRORS),
  },
})

const hardOf = ({ limits: { max_endpoints, max_fanout_endpoints, max_payload_bytes } }: Tenant) => ({
  max_endpoints,
  max_fanout_endpoints,
  max_payload_bytes,
})

/** What a tenant has used and what it may use. */
export function mountLimits(
  mount: Mount,
  { lookUps, rateLimits, allow }: { lookUps: Reads; rateLimits: RateLimits; allow: readonly AddressRange[] },
): void {
  mount.tenant(getUsage, { action: 'read' }, (c, { tenantId }) =>
    lookUps(c, tenantId, async (sql) => {
      const { start, end, events, attempts } = await readUsage(sql, tenantId)
      return {
        ok: true,
        month: start.toISOString().slice(0, 7),
        period_start: start,
        period_end: end,
        events_count: events,
        attempts_count: attempts,
      }
    }),
  )

  mount.tenant(getLimits, { action: 'read' }, async (c, tenant) => {
    const { monthly_events: events, monthly_attempts: attempts } = tenant.limits
    return c.json({ ok: true, monthly: { events, attempts }, hard: hardOf(tenant) }, 200)
  })

  mount.tenant(getSafety, { action: 'read' }, async (c, tenant) => {
    const { windowSeconds, limits } = rateLimits
    const own: Record<RateAction, number> = { 'events:write': tenant.limits.events_write_rate, ...limits }
    const rates = Object.entries(own).map(([action, limit]) => [action, { limit, window_seconds: windowSeconds }])
    return c.json(
      {
        ok: true,
        rate_limits: Object.fromEntries(rates),
        hard_limits: hardOf(tenant),
        protections: {
          ssrf_protection: true,
          payload_size_limit: true,
          endpoint_quota: true,
          fanout_limit: true,
          monthly_limits: true,
          rate_limiting: Object.values(own).some((limit) => limit > 0),
        },
        egress_exemptions: allow.map((range) => range.text),
      },
      200,
    )
  })
}
