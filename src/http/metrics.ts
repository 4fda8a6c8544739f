import { createRoute, z } from '@hono/zod-openapi'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import type { Reads } from './reads.ts'
import type { Mount } from './route.ts'
import { answers, count, ok } from './schemas.ts'

const getMetrics = createRoute({
  method: 'get',
  path: '/v1/metrics/summary',
  operationId: 'getMetricsSummary',
  tags: ['Metrics'],
  summary: 'Operational metrics of the tenant',
  description:
    'Over all that retention has not deleted. Kept up to date by the transactions that publish and record, so they agree with the records. Retention takes attempts off these counts by the day on which they were made, but deletes their records together with their delivery.',
  responses: {
    200: answers(
      'The metrics',
      z
        .object({
          ok,
          deliveries_by_status: z
            .object({ pending: count, retrying: count, delivered: count, dead_lettered: count })
            .openapi({ example: { pending: 0, retrying: 1, delivered: 41, dead_lettered: 0 } }),
          attempts_by_status_code: z.record(z.string(), count).openapi({
            description: 'Keys are status codes; `none` for no response.',
            example: { '200': 41, '503': 2, none: 1 },
          }),
          held_count: count.openapi({
            description: 'Deliveries, pending or retrying, that wait for their endpoints to take them.',
            example: 0,
          }),
          dead_letter_count: count.openapi({ description: 'As `deliveries_by_status.dead_lettered`.' }),
          retry_count: count.openapi({
            description: 'Attempts that were not the first of their delivery.',
            example: 2,
          }),
          endpoint_counts: z
            .object({ total: count, active: count, inactive: count })
            .openapi({ example: { total: 2, active: 2, inactive: 0 } }),
          queue_age_seconds: z.number().openapi({
            description:
              'How long the oldest due delivery has been due, including those that are being attempted or held only because their endpoint is busy; 0 if none is due.',
          }),
        })
        .openapi('MetricsSummary'),
    ),
    ...errorAnswers(...TENANT_ERRORS),
  },
})

type Deliveries = { pending: number; retrying: number; delivered: number; dead_lettered: number; held: number }
type Attempts = { status_code: number; attempts: number; retries: number }

/** What happens in a tenant, summed up from its counters. */
export function mountMetrics(mount: Mount, { reads }: { reads: Reads }): void {
  mount.tenant(getMetrics, { action: 'read' }, (c, { tenantId }) =>
    reads(c, tenantId, async (sql) => {
      const [{ held, ...byStatus }] = await sql<[Deliveries]>`
        select coalesce(sum(pending), 0)::float8 as pending, coalesce(sum(retrying), 0)::float8 as retrying,
          coalesce(sum(delivered), 0)::float8 as delivered, coalesce(sum(dead_lettered), 0)::float8 as dead_lettered,
          coalesce(sum(held), 0)::float8 as held
        from waybill.endpoint_stats where tenant_id = ${tenantId}`
      // A 2xx that broke off is counted under its negative code.
      const attempts = await sql<Attempts[]>`
        select abs(status_code) as status_code, sum(attempts)::float8 as attempts, sum(retries)::float8 as retries
        from waybill.attempt_counts where tenant_id = ${tenantId} group by 1 order by 1`
      const [endpoints] = await sql`
        select count(*)::int as total, count(*) filter (where is_active)::int as active, count(*) filter (where not is_active)::int as inactive
        from waybill.endpoints where tenant_id = ${tenantId}`
      const [queue] = await sql<[{ age: number }]>`select waybill.queue_age(${tenantId}) as age`
      return {
        ok: true,
        deliveries_by_status: byStatus,
        attempts_by_status_code: Object.fromEntries(
          attempts.map((row) => [row.status_code === 0 ? 'none' : row.status_code, row.attempts]),
        ),
        held_count: held,
        dead_letter_count: byStatus.dead_lettered,
        retry_count: attempts.reduce((sum, row) => sum + row.retries, 0),
        endpoint_counts: endpoints,
        queue_age_seconds: Math.round(queue.age * 1000) / 1000,
      }
    }),
  )
}
