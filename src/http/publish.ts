import { createRoute, z } from '@hono/zod-openapi'
import type { Context } from 'hono'
import { LRUCache } from 'lru-cache'
import { AppError } from '../errors.ts'
import type { Publish, PublishRequest, PublishResult } from '../flow/publish.ts'
import type { Log } from '../log.ts'
import type { Env } from './answer.ts'
import type { Tenant } from './auth.ts'
import { createUnaskedRoom, unaskedBytes } from './body.ts'
import { BODY_ERRORS, errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import type { RateLimit } from './rate-limit.ts'
import type { Mount } from './route.ts'
import { answers, eventType, id, jsonBody, ok, ownTenant } from './schemas.ts'
import { firstOfNextMonth } from './usage.ts'

const publishBody = z.strictObject({
  event_type: eventType,
  // Only its type is checked: what is stored is the text itself, since parsing would lose parts of it.
  payload: z
    .custom((value) => typeof value === 'object' && value !== null && !Array.isArray(value), 'must be a JSON object')
    .openapi({
      type: 'object',
      additionalProperties: true,
      description: 'A JSON object; its text is stored and delivered as it is.',
      example: { invoice_id: 'inv_1', amount: 4200 },
    })
    .pipe(z.any()),
})

const published = z
  .object({
    ok,
    event_id: id('event'),
    tenant_id: ownTenant,
    idempotency_key: z
      .string()
      .nullable()
      .openapi({ description: 'As sent; null when none was.', example: 'inv_1-paid' }),
    endpoint_count: z.int().openapi({ description: 'Active endpoints that subscribed to the event type.', example: 1 }),
    queued_delivery_count: z.int().openapi({ description: 'One for each of these endpoints.', example: 1 }),
    delivery_ids: z.array(id('delivery')),
  })
  .openapi('Published')

const publishEvent = createRoute({
  method: 'post',
  path: '/v1/events',
  operationId: 'publishEvent',
  tags: ['Events'],
  summary: 'Publish an event',
  description:
    'Answers once the event, one delivery per subscribed active endpoint, and the work to send them are committed together. If no endpoint has subscribed, the event is stored without a delivery. Delivering follows: read its outcome from the deliveries. Always send an `Idempotency-Key`; after a timeout or a 5xx, repeat the request with the same key and body.',
  request: {
    headers: z.object({
      'idempotency-key': z
        .string()
        .regex(/^[\x21-\x7e]{1,255}$/, 'must be 1 to 255 visible ASCII characters')
        .optional()
        .openapi({
          description:
            'Makes repeating a publish safe: the same key and event answer with the first event, another event with 409. 1 to 255 visible ASCII characters.',
          example: 'inv_1-paid',
        }),
    }),
    body: jsonBody(publishBody),
  },
  responses: {
    202: answers('Accepted: stored and queued', published),
    200: {
      ...answers('The first answer again: the key and the event are the same', published),
      headers: z.object({
        'Idempotent-Replayed': z
          .literal('true')
          .openapi({ description: 'On this answer only: nothing was stored or sent again.', example: 'true' }),
      }),
    },
    ...errorAnswers(...TENANT_ERRORS, ...BODY_ERRORS, 'key_reused', 'monthly_events', 'monthly_attempts', 'fanout'),
  },
})

/** `POST /v1/events`: a request becomes an event, or the reason why it does not. */
export function mountPublish(
  mount: Mount,
  { publish, rateLimit, log }: { publish: Publish; rateLimit: RateLimit; log: Log },
): void {
  const unasked = createUnaskedRoom()

  /** Until when, at the least, a tenant's rate window is full, unless its limit changes. */
  const full = new LRUCache<string, number>({ max: 10_000 })
  const isFull = ({ tenantId }: Tenant) => performance.now() < (full.get(tenantId) ?? 0)

  /** Requests are counted by the publish transaction, even those whose body was refused. */
  async function count(c: Context<Env>, tenant: Tenant, event: PublishRequest['event']): Promise<PublishResult> {
    const asked = performance.now()
    const result = await publish({ tenantId: tenant.tenantId, event })
    const { rate } = result
    // `secondsLeft` is rounded up, and counts from a moment after `asked`.
    if (rate.limit > 0 && rate.count >= rate.limit) full.set(tenant.tenantId, asked + (rate.secondsLeft - 1) * 1000)
    // A crash of the database may have lost the window.
    else full.delete(tenant.tenantId)
    rateLimit.apply(c, tenant, 'events:write', rate)
    return result
  }

  mount.tenant(
    publishEvent,
    {
      action: null,
      maxPayloadBytes: ({ limits }) => limits.max_payload_bytes,
      async beforeBody(c, tenant) {
        if (isFull(tenant)) await unasked.run(tenant.tenantId, unaskedBytes(c), () => count(c, tenant, 'unread'))
      },
      onRefused: async (c, tenant) => void (await count(c, tenant, 'refused')),
    },
    async (c, tenant, { body, headers, payload }) => {
      const actualBytes = Buffer.byteLength(payload)
      const limitBytes = tenant.limits.max_payload_bytes
      if (actualBytes > limitBytes) {
        await count(c, tenant, 'refused')
        throw new AppError('payload_too_large', { limit_bytes: limitBytes, actual_bytes: actualBytes })
      }
      const idempotencyKey = headers['idempotency-key'] ?? null
      const result = await count(c, tenant, { type: body.event_type, payload, idempotencyKey })
      switch (result.outcome) {
        case 'accepted':
        case 'repeated': {
          const { eventId, deliveryIds, outcome } = result
          log.info(
            {
              request_id: c.env.outgoing.requestId,
              tenant_id: tenant.tenantId,
              event_id: eventId,
              event_type: body.event_type,
              payload_bytes: actualBytes,
              delivery_count: deliveryIds.length,
              repeated: outcome === 'repeated',
            },
            'event.received',
          )
          if (outcome === 'repeated') c.header('idempotent-replayed', 'true')
          const answer = {
            ok: true,
            event_id: eventId,
            tenant_id: tenant.tenantId,
            idempotency_key: idempotencyKey,
            endpoint_count: deliveryIds.length,
            queued_delivery_count: deliveryIds.length,
            delivery_ids: deliveryIds,
          }
          return c.json(answer, outcome === 'accepted' ? 202 : 200)
        }
        case 'key_reused':
          throw new AppError('key_reused', { event_id: result.eventId })
        case 'fanout':
          throw new AppError('fanout', { limit: result.limit, current: result.current })
        case 'monthly_events':
        case 'monthly_attempts':
          throw new AppError(result.outcome, {
            limit: result.limit,
            current: result.current,
            resets_at: firstOfNextMonth(result.month),
          })
        default:
          throw new Error(`publish ended as ${result.outcome}`)
      }
    },
  )
}
