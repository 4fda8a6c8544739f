import { createRoute, z } from '@hono/zod-openapi'
import { AppError } from '../errors.ts'
import { renderState, type StateRow, stateColumns, stateFields } from './endpoint-state.ts'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import type { Reads } from './reads.ts'
import { recordId } from './record-id.ts'
import type { Mount } from './route.ts'
import { answers, count, id, ok, timestamp } from './schemas.ts'

const WINDOW_HOURS = 24

const rate = z.number().min(0).max(1).nullable()

const getEndpointHealth = createRoute({
  method: 'get',
  path: '/v1/endpoints/{endpoint_id}/health',
  operationId: 'getEndpointHealth',
  tags: ['Endpoints'],
  summary: 'How an endpoint has been doing',
  description:
    'Rates over 24 hours; the last status codes and times however old they are; counts of what is there now.',
  request: { params: z.object({ endpoint_id: id('endpoint') }) },
  responses: {
    200: answers(
      'Its health',
      z
        .object({
          ok,
          endpoint_id: id('endpoint'),
          window_hours: z.literal(WINDOW_HOURS),
          attempts: count.openapi({ description: 'In the window: this hour and the 23 before it.', example: 40 }),
          success_rate: rate.openapi({
            description:
              'Of those attempts; null without any. One that lost its worker (`worker_lost`) counts as failed, though the receiver may have done well.',
            example: 0.95,
          }),
          failure_rate: rate.openapi({ example: 0.05 }),
          mean_duration_ms: z.int().min(0).nullable().openapi({
            description: 'Over the attempts that got a status, other than an incomplete 2xx; null if there are none.',
            example: 87,
          }),
          recent_status_codes: z.array(z.int().nullable()).openapi({
            description:
              'The last 20, newest first; null for no response. A 2xx whose answer broke off is among them, and has failed.',
            example: [200, 503, null],
          }),
          last_success_at: timestamp.nullable().openapi({ description: 'Null if there was none.' }),
          last_failure_at: timestamp.nullable().openapi({ description: 'Null if there was none.' }),
          pending_count: count.openapi({ description: 'Deliveries that are not finished.' }),
          ...stateFields,
          dead_letter_count: count.openapi({
            description: 'Deliveries that were given up on, and neither replayed nor deleted by retention since.',
          }),
        })
        .openapi('EndpointHealth'),
    ),
    ...errorAnswers(...TENANT_ERRORS, 'endpoint_not_found'),
  },
})

type Row = StateRow & {
  endpoint_id: string
  attempts: number
  successes: number
  mean_duration_ms: number | null
  recent_status_codes: (number | null)[]
  last_success_at: Date | null
  last_failure_at: Date | null
  pending_count: number
  dead_letter_count: number
}

/** How an endpoint has been doing lately, read from its counters. */
export function mountEndpointHealth(mount: Mount, { reads }: { reads: Reads }): void {
  mount.tenant(getEndpointHealth, { action: 'read' }, async (c, { tenantId }, { params }) => {
    const endpointId = recordId(params.endpoint_id, 'endpoint_not_found')
    return await reads(c, tenantId, async (sql) => {
      const [row] = await sql<Row[]>`
        select endpoints.endpoint_id, is_active, ${stateColumns}, w.attempts, w.successes, w.mean_duration_ms,
          coalesce(s.recent_status_codes, '{}') as recent_status_codes, s.last_success_at, s.last_failure_at,
          coalesce(s.pending + s.retrying, 0)::float8 as pending_count, coalesce(s.dead_lettered, 0)::float8 as dead_letter_count
        from waybill.endpoints
        left join waybill.endpoint_stats s using (tenant_id, endpoint_id)
        cross join lateral (
          select coalesce(sum(attempts), 0)::float8 as attempts,
            coalesce(sum(attempts) filter (where status_code between 200 and 299), 0)::float8 as successes,
            round(sum(duration_ms) filter (where status_code > 0) / sum(attempts) filter (where status_code > 0))::float8 as mean_duration_ms
          from waybill.attempt_counts c
          where c.tenant_id = endpoints.tenant_id and c.endpoint_id = endpoints.endpoint_id
            and c.hour > date_trunc('hour', now(), 'utc') - ${WINDOW_HOURS} * interval '1 hour') w
        where endpoints.tenant_id = ${tenantId} and endpoints.endpoint_id = ${endpointId}`
      if (row === undefined) throw new AppError('endpoint_not_found')
      const { successes, is_active, inactive_reason, inactive_since, stats, ...counted } = row
      const { attempts } = counted
      return {
        ok: true,
        window_hours: WINDOW_HOURS,
        success_rate: attempts === 0 ? null : successes / attempts,
        failure_rate: attempts === 0 ? null : (attempts - successes) / attempts,
        ...counted,
        ...renderState({ is_active, inactive_reason, inactive_since, stats }),
      }
    })
  })
}
