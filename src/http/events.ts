import { createRoute, z } from '@hono/zod-openapi'
import { fragment } from '../db/statement.ts'
import { AppError } from '../errors.ts'
import { madeAt } from '../ids.ts'
import { type DeliveryRow, deliveryColumns, deliveryRecord, renderDelivery } from './delivery-record.ts'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import { listBody, listOf, listQuery, pageRows } from './pages.ts'
import type { Reads } from './reads.ts'
import { recordId } from './record-id.ts'
import type { Mount } from './route.ts'
import { answers, eventType, id, ok, ownTenant, payload, timestamp } from './schemas.ts'

const eventPath = z.object({ event_id: id('event') })

const getEvent = createRoute({
  method: 'get',
  path: '/v1/events/{event_id}',
  operationId: 'getEvent',
  tags: ['Events'],
  summary: 'Read an event',
  description: 'The payload comes back as it was published: key order and number spellings included.',
  request: { params: eventPath },
  responses: {
    200: answers(
      'The event',
      z
        .object({
          ok,
          event_id: id('event'),
          tenant_id: ownTenant,
          event_type: eventType,
          payload,
          idempotency_key: z.string().nullable().openapi({ example: 'inv_1-paid' }),
          delivery_count: z
            .int()
            .openapi({ description: 'One for each endpoint that was active and subscribed.', example: 1 }),
          created_at: timestamp,
        })
        .openapi('Event'),
    ),
    ...errorAnswers(...TENANT_ERRORS, 'event_not_found'),
  },
})

const listEventDeliveries = createRoute({
  method: 'get',
  path: '/v1/events/{event_id}/deliveries',
  operationId: 'listEventDeliveries',
  tags: ['Events'],
  summary: 'List the deliveries of an event',
  description: 'One for each endpoint that was active and subscribed when the event was published.',
  request: { params: eventPath, query: listQuery({}) },
  responses: {
    200: answers('Newest first', listOf(deliveryRecord)),
    ...errorAnswers(...TENANT_ERRORS, 'event_not_found'),
  },
})

type EventRow = {
  event_id: string
  event_type: string
  payload: string
  idempotency_key: string | null
  delivery_count: number
}

/** Reading what was published. */
export function mountEvents(mount: Mount, { reads }: { reads: Reads }): void {
  mount.tenant(getEvent, { action: 'read' }, async (c, tenant, { params }) => {
    const eventId = recordId(params.event_id, 'event_not_found')
    return await reads(c, tenant.tenantId, async (sql) => {
      const [row] = await sql<EventRow[]>`
        select event_id, event_type, payload, idempotency_key, delivery_count from waybill.events
        where tenant_id = ${tenant.tenantId} and event_id = ${eventId}`
      if (row === undefined) throw new AppError('event_not_found')
      const record = { ok: true, event_id: row.event_id, tenant_id: tenant.tenantId, event_type: row.event_type }
      const rest = {
        idempotency_key: row.idempotency_key,
        delivery_count: row.delivery_count,
        created_at: madeAt(row.event_id),
      }
      // Assembled as text, so that the payload comes back as it was published.
      return `${JSON.stringify(record).slice(0, -1)},"payload":${row.payload},${JSON.stringify(rest).slice(1)}`
    })
  })

  mount.tenant(listEventDeliveries, { action: 'read' }, async (c, tenant, { params, query }) => {
    const eventId = recordId(params.event_id, 'event_not_found')
    return await reads(c, tenant.tenantId, async (sql) => {
      const [event] = await sql`
        select 1 from waybill.events where tenant_id = ${tenant.tenantId} and event_id = ${eventId}`
      if (event === undefined) throw new AppError('event_not_found')
      const rows = await sql<DeliveryRow[]>`
        select ${deliveryColumns} from waybill.deliveries
        where tenant_id = ${tenant.tenantId} and event_id = ${eventId}
          and delivery_id between waybill.first_delivery_id(${eventId}) and waybill.last_delivery_id(${eventId})
          ${query.cursor ? fragment`and delivery_id < ${query.cursor}` : fragment``}
        order by delivery_id desc ${pageRows(query)}`
      return listBody(query, rows, renderDelivery, (row) => row.delivery_id)
    })
  })
}
