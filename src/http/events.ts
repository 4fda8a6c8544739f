import { createRoute, z } from '@hono/zod-openapi'
import type { Pool } from '../db.ts'
import { AppError } from '../errors.ts'
import { madeAt, UUID } from '../ids.ts'
import { type DeliveryRow, deliveryColumns, deliveryRecord, renderDelivery } from './delivery-record.ts'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import type { Reads } from './reads.ts'
import type { Mount } from './route.ts'
import { answers, eventType, id, listBody, listOf, ownTenant, pageQuery, payload, timestamp } from './schemas.ts'

const eventPath = z.object({ event_id: id('event') })

const getEvent = createRoute({
  method: 'get',
  path: '/v1/events/{event_id}',
  operationId: 'getEvent',
  tags: ['Events'],
  summary: 'Read an event',
  description: 'The payload comes back as it was published: key order and number spellings included.',
  security: [{ apiKey: [] }],
  request: { params: eventPath },
  responses: {
    200: answers(
      'The event',
      z
        .object({
          ok: z.literal(true),
          event_id: id('event'),
          tenant_id: ownTenant,
          event_type: eventType,
          payload,
          idempotency_key: z.string().nullable().openapi({ example: 'inv_1-paid' }),
          delivery_count: z.int().openapi({ example: 1 }),
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
  security: [{ apiKey: [] }],
  request: { params: eventPath, query: pageQuery },
  responses: {
    200: answers('Newest first', listOf(deliveryRecord)),
    ...errorAnswers(...TENANT_ERRORS, 'event_not_found', 'overloaded'),
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
export function mountEvents(mount: Mount, { pool, reads }: { pool: Pool; reads: Reads }): void {
  mount.tenant(getEvent, { action: 'read' }, async (c, tenant, { params }) => {
    const row = await findEvent(pool, tenant.tenantId, params.event_id)
    const { payload: text, ...fields } = row
    const record = { ok: true, event_id: fields.event_id, tenant_id: tenant.tenantId, event_type: fields.event_type }
    const rest = {
      idempotency_key: fields.idempotency_key,
      delivery_count: fields.delivery_count,
      created_at: madeAt(row.event_id),
    }
    // Put together as text, so that the payload comes back as it was published.
    const body = `${JSON.stringify(record).slice(0, -1)},"payload":${text},${JSON.stringify(rest).slice(1)}`
    return c.body(body, 200, { 'content-type': 'application/json' })
  })

  mount.tenant(listEventDeliveries, { action: 'read' }, async (c, tenant, { params, query }) => {
    const { event_id } = await findEvent(pool, tenant.tenantId, params.event_id)
    const rows = await reads(
      tenant.tenantId,
      (sql) => sql<DeliveryRow[]>`
        select ${deliveryColumns(sql)} from waybill.deliveries
        where tenant_id = ${tenant.tenantId} and event_id = ${event_id}
          and delivery_id between waybill.first_delivery_id(${event_id}) and waybill.last_delivery_id(${event_id})
          ${query.cursor ? sql`and delivery_id < ${query.cursor}` : sql``}
        order by delivery_id desc limit ${query.limit + 1} offset ${query.offset ?? 0}`,
    )
    return c.json(
      listBody(query, rows, renderDelivery, (row) => row.delivery_id),
      200,
    )
  })
}

async function findEvent(pool: Pool, tenantId: string, eventId: string): Promise<EventRow> {
  const id = eventId.toLowerCase()
  const [row] = UUID.test(id)
    ? await pool<EventRow[]>`
        select event_id, event_type, payload, idempotency_key, delivery_count from waybill.events
        where tenant_id = ${tenantId} and event_id = ${id}`
    : []
  if (row === undefined) throw new AppError('event_not_found')
  return row
}
