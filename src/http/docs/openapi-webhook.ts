import { type OpenAPIHono, z } from '@hono/zod-openapi'
import { eventType, id, payload, timestamp } from '../schemas.ts'

const body = z
  .object({
    id: id('event'),
    type: eventType,
    timestamp: timestamp.openapi({ description: 'When the event was created.' }),
    data: payload,
  })
  .openapi('WebhookBody')

const DESCRIPTION = `
What an endpoint receives for each delivery: a POST to its URL. The body is the same, byte for byte, at every attempt and replay.

An attempt may take 15 seconds in all (unless the operator has set another limit); redirects are not followed. At most 16 KiB of the answer’s body are kept, to be read with the attempt.

An attempt that fails is repeated after 5 to 10 seconds, then after about twice the last pause, up to 10 hours between two: 14 retries over about 27 hours, unless the operator has set otherwise. Then the delivery is dead-lettered, and waits to be replayed.

While an endpoint keeps failing, one delivery at a time is tried, and the rest is held without using up retries: its \`state\`, \`held_count\` and \`next_probe_at\` tell. An endpoint that is inactive receives nothing; what waits for it goes out once it is active again.`.trim()

const text = (example: string) => z.string().openapi({ example })

/** Describes the requests that endpoints receive, with the header names that this service is set to. */
export function registerWebhook(registry: OpenAPIHono['openAPIRegistry'], prefix: string): void {
  const eventId = id('event')
  const seconds = text('1795166999').openapi({ description: 'Unix seconds of this attempt.' })
  const signature = text('v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=').openapi({
    description:
      '`v1,` and the base64 HMAC-SHA256 of `{event id}.{timestamp}.{raw body}`; after a rotation two of them, separated by a space, newest first.',
  })
  registry.registerWebhook({
    method: 'post',
    path: 'event',
    operationId: 'receiveEvent',
    tags: ['Webhooks'],
    summary: 'An event, for a subscribed endpoint',
    description: DESCRIPTION,
    security: [],
    request: {
      headers: z.object({
        'user-agent': text('Waybill/1.2.3'),
        [`${prefix}-event-id`]: eventId,
        [`${prefix}-delivery-id`]: id('delivery'),
        [`${prefix}-timestamp`]: seconds,
        [`${prefix}-signature`]: signature,
        'webhook-id': eventId.openapi({ description: 'The event’s id again, as Standard Webhooks names it.' }),
        'webhook-timestamp': seconds,
        'webhook-signature': signature,
      }),
      body: { required: true, content: { 'application/json': { schema: body } } },
    },
    responses: {
      '2XX': {
        description:
          'Received: the delivery is `delivered`, unless the connection breaks off before the end of the answer. A body that still comes when the time is up does no harm.',
      },
      410: { description: 'Gone: the delivery is dead-lettered as `endpoint_gone` and the endpoint set inactive.' },
      429: { description: 'Tried again, no earlier than `Retry-After` asks (up to 24 hours).' },
      503: { description: 'Tried again, no earlier than `Retry-After` asks (up to 24 hours).' },
      default: { description: 'Anything else, a redirect, a timeout or no answer: tried again, then dead-lettered.' },
    },
  })
}
