import { createRoute, z } from '@hono/zod-openapi'
import type { Context } from 'hono'
import type { Db } from '../db/open.ts'
import { fragment } from '../db/statement.ts'
import { AppError } from '../errors.ts'
import { firstId } from '../ids.ts'
import type { Env } from './answer.ts'
import type { Tenant } from './auth.ts'
import { deliveriesQuery, dlqQuery } from './delivery-filters.ts'
import {
  type DeliveryRow,
  deliveryPath,
  deliveryRecord,
  findDelivery,
  oneDelivery,
  renderDelivery,
} from './delivery-record.ts'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import { readNewest, TooMuch } from './newest-deliveries.ts'
import { cursorAt, listBody, listOf, listQuery, pageRows } from './pages.ts'
import type { Reads } from './reads.ts'
import type { Mount } from './route.ts'
import { answers, attemptError, id, timestamp } from './schemas.ts'

/** What the example of a delivery that was given up on has of its own. */
const GIVEN_UP = {
  status: 'dead_lettered',
  attempt_count: 15,
  last_status_code: 503,
  last_error: 'http_status',
  dead_letter_reason: 'retries_exhausted',
}

const listDeliveries = createRoute({
  method: 'get',
  path: '/v1/deliveries',
  operationId: 'listDeliveries',
  tags: ['Deliveries'],
  summary: 'List deliveries',
  description:
    'A delivery must pass all filters. `since` (inclusive) and `until` (exclusive) compare with `created_at`, to the millisecond. They also bound what is read: without them, a list whose other filters match few of very many deliveries may take too long, and is then refused as an invalid request.',
  request: { query: deliveriesQuery },
  responses: { 200: answers('Newest first', listOf(deliveryRecord)), ...errorAnswers(...TENANT_ERRORS) },
})

const listDeadLetters = createRoute({
  method: 'get',
  path: '/v1/dlq',
  operationId: 'listDeadLetters',
  tags: ['Deliveries'],
  summary: 'List dead-lettered deliveries',
  description: 'Deliveries that were given up on. Each stays here until it is replayed, or retention deletes it.',
  request: { query: dlqQuery },
  responses: {
    200: answers('Newest first', listOf(deliveryRecord), { data: [GIVEN_UP] }),
    ...errorAnswers(...TENANT_ERRORS),
  },
})

const getDelivery = createRoute({
  method: 'get',
  path: '/v1/deliveries/{delivery_id}',
  operationId: 'getDelivery',
  tags: ['Deliveries'],
  summary: 'Read a delivery',
  description: 'What has become of one event at one endpoint.',
  request: { params: deliveryPath },
  responses: { 200: answers('The delivery', oneDelivery), ...errorAnswers(...TENANT_ERRORS, 'delivery_not_found') },
})

const attempt = z
  .object({
    attempt_number: z.int().openapi({ description: 'From 1, over all replays.', example: 1 }),
    delivery_id: id('delivery'),
    endpoint_id: id('endpoint'),
    url: z.string().openapi({ description: 'Where the request went.', example: 'https://hooks.example.com/waybill' }),
    status_code: z.int().nullable().openapi({ description: 'Null when there was no response.', example: 503 }),
    error: attemptError,
    error_message: z.string().nullable().openapi({ example: 'the receiver answered with a status other than 2xx' }),
    response_body: z
      .string()
      .nullable()
      .openapi({ description: 'At most 16 KiB; null when there was no response.', example: 'try later' }),
    response_truncated: z.boolean().openapi({
      description: 'The body was longer than what is kept, did not end, or was not written as HTTP asks.',
      example: false,
    }),
    duration_ms: z.int().openapi({
      description: 'From the start to the end of the answer, the failure or the time limit.',
      example: 87,
    }),
    retry_state: z.enum(['succeeded', 'will_retry', 'exhausted']).openapi({
      description:
        'What followed: `succeeded`, the delivery is made; `will_retry`, another attempt will be; `exhausted`, the delivery was given up on.',
      example: 'will_retry',
    }),
    next_attempt_at: timestamp.nullable().openapi({
      description:
        'As it was planned after this attempt: a replay brings it forward, and an endpoint that is `inactive` or `failing` puts it off.',
      example: '2026-11-20T09:30:07.000Z',
    }),
    started_at: timestamp.openapi({ description: 'If the worker was lost: when that was found out.' }),
  })
  .openapi('Attempt')

const attemptsQuery = listQuery({ cursor: cursorAt(/^\d{1,9}$/).optional() })

const listAttempts = createRoute({
  method: 'get',
  path: '/v1/deliveries/{delivery_id}/attempts',
  operationId: 'listAttempts',
  tags: ['Deliveries'],
  summary: 'List the attempts of a delivery',
  description:
    'Every attempt, with the answer it got. One that a lost worker was making is listed with the error `worker_lost`. A request that a worker broke off as it was stopped is no attempt, and is made again.',
  request: { params: deliveryPath, query: attemptsQuery },
  responses: {
    200: answers('Oldest first', listOf(attempt)),
    ...errorAnswers(...TENANT_ERRORS, 'delivery_not_found'),
  },
})

type Filters = z.output<typeof dlqQuery> & { status?: DeliveryRow['status'] | undefined }

/** How long the statements of a list with filters may take before one more, which may take 2.5 s: all in all there are four. */
const LIST_PATIENCE_MS = 1000

/** Whether the tenant, or the endpoint, has any delivery, of that status: the counters tell at once that there is nothing to be found. */
async function isAny(sql: Db, tenant: Tenant, { status, endpoint_id }: Filters): Promise<boolean> {
  if (!status && !endpoint_id) return true
  const [row] = await sql<[{ any: boolean }]>`
    select exists (
      select from waybill.endpoint_stats s
      where s.tenant_id = ${tenant.tenantId} and s.endpoint_id = coalesce(${endpoint_id ?? null}::uuid, s.endpoint_id)
        and case ${status ?? null}::text
          when 'pending' then s.pending when 'retrying' then s.retrying when 'delivered' then s.delivered
          when 'dead_lettered' then s.dead_lettered else s.pending + s.retrying + s.delivered + s.dead_lettered end > 0) as any`
  return row.any
}

/** Reading deliveries and their attempts. */
export function mountDeliveries(mount: Mount, { reads, lookUps }: { reads: Reads; lookUps: Reads }): void {
  async function list(c: Context<Env>, tenant: Tenant, query: Filters): Promise<Response> {
    const filters = [
      ...(query.status ? [fragment`status = ${query.status}`] : []),
      ...(query.endpoint_id ? [fragment`endpoint_id = ${query.endpoint_id}`] : []),
      ...(query.event_type ? [fragment`event_type = ${query.event_type}`] : []),
    ]
    const ends = [query.cursor, query.until && firstId(query.until)].filter((id) => id !== undefined).sort()
    return await reads(c, tenant.tenantId, async (sql) => {
      const rows = (await isAny(sql, tenant, query))
        ? await readNewest(sql, {
            where: [fragment`tenant_id = ${tenant.tenantId}`, ...filters],
            from: query.since && firstId(query.since),
            below: ends[0],
            offset: query.offset ?? 0,
            limit: query.limit + 1,
            patienceMs: filters.length > 0 ? LIST_PATIENCE_MS : Infinity,
          })
        : []
      return listBody(query, rows, renderDelivery, (row) => row.delivery_id)
    }).catch((error: unknown) => {
      // There is no index for these filters, since every publish would pay for it: one that matches little reads everything.
      if (!(error instanceof TooMuch) || filters.length === 0) throw error
      const message = 'the list took too long to read: narrow it by since and until'
      throw new AppError('invalid_request', [{ path: 'since', message }])
    })
  }

  mount.tenant(listDeliveries, { action: 'read' }, (c, tenant, { query }) => list(c, tenant, query))

  mount.tenant(listDeadLetters, { action: 'read' }, (c, tenant, { query }) =>
    list(c, tenant, { ...query, status: 'dead_lettered' }),
  )

  mount.tenant(getDelivery, { action: 'read' }, (c, tenant, { params }) =>
    lookUps(c, tenant.tenantId, async (sql) => ({
      ok: true,
      ...renderDelivery(await findDelivery(sql, tenant.tenantId, params.delivery_id)),
    })),
  )

  mount.tenant(listAttempts, { action: 'read' }, (c, tenant, { params, query }) =>
    reads(c, tenant.tenantId, async (sql) => {
      const { delivery_id } = await findDelivery(sql, tenant.tenantId, params.delivery_id)
      const rows = await sql<{ attempt_number: number }[]>`
        select attempt_number, delivery_id, endpoint_id, url, status_code, error, error_message, response_body, response_truncated,
          duration_ms, retry_state, next_attempt_at, started_at
        from waybill.attempts where tenant_id = ${tenant.tenantId} and delivery_id = ${delivery_id}
          ${query.cursor ? fragment`and attempt_number > ${Number(query.cursor)}` : fragment``}
        order by attempt_number ${pageRows(query)}`
      return listBody(
        query,
        rows,
        (row) => row,
        (row) => String(row.attempt_number),
      )
    }),
  )
}
