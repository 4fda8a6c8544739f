import { createRoute, z } from '@hono/zod-openapi'
import type { AddressRange } from '../egress/address.ts'
import { checkUrl } from '../egress/destination.ts'
import { stateFields } from './endpoint-state.ts'
import { BODY_ERRORS, errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import { listOf, listQuery } from './pages.ts'
import { answers, id, jsonBody, ok, ownTenant, text, timestamp } from './schemas.ts'

const SUBSCRIPTION = 'must be * or words of A-Z a-z 0-9 _ - joined by dots, at most 128 characters'
const URL_EXAMPLE = 'https://hooks.example.com/waybill'

const endpointRecord = z
  .object({
    endpoint_id: id('endpoint'),
    tenant_id: ownTenant,
    url: z.string().openapi({ example: URL_EXAMPLE }),
    description: z.string().nullable().openapi({ example: 'Billing' }),
    subscribed_events: z.array(z.string()).openapi({ example: ['invoice.paid', 'invoice.voided'] }),
    is_active: z.boolean().openapi({
      description:
        'An inactive endpoint gets no deliveries of events that are published meanwhile, not even later; what already waits for it is kept. For a deployment, leave it active: what its receiver refuses is sent again.',
    }),
    max_per_second: z.int().nullable().openapi({ description: 'Null for no limit.', example: 50 }),
    ordered: z.boolean().openapi({ example: false }),
    ...stateFields,
    created_at: timestamp,
    updated_at: timestamp,
  })
  .openapi('Endpoint')

const signingSecret = z.string().openapi({
  description: '`whsec_` and 32 bytes in base64. Shown here and never again.',
  example: 'whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD/anExampleE=',
})

/** The fields of an endpoint that a client writes. */
const writableFields = (allow: readonly AddressRange[]) => ({
  url: z
    .string()
    .max(2048, { error: 'must be at most 2048 characters', abort: true })
    .refine((url) => url.isWellFormed(), 'must not contain half a surrogate pair')
    .superRefine((url, ctx) => {
      const problem = checkUrl(url, allow)
      if (problem !== null) ctx.addIssue({ code: 'custom', message: problem, params: { error: 'invalid_url' } })
    })
    .openapi({ description: 'http or https, without user name and password.', example: URL_EXAMPLE }),
  description: text(0, 500).nullable().optional().openapi({ description: 'A label of your own.', example: 'Billing' }),
  subscribed_events: z
    .array(
      // One pattern and no union, which clients in many languages would wrap in a class of its own, or refuse.
      z
        .string(SUBSCRIPTION)
        .max(128, { error: SUBSCRIPTION, abort: true })
        .regex(/^(\*|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$/, SUBSCRIPTION),
    )
    .min(1, 'must name at least 1 event type')
    .max(100, 'must name at most 100 event types')
    .transform((types) => [...new Set(types)])
    .openapi({
      description:
        'Event types, or `*` for all that you publish; one that is given twice is kept once. `endpoint.disabled`, `endpoint.recovered` and `delivery.dead_lettered` are the service’s own: name them to be told what happens to your other endpoints.',
      example: ['invoice.paid', 'invoice.voided'],
    }),
  max_per_second: z
    .int('must be a whole number')
    .min(1, 'must be at least 1')
    .max(10_000, 'must be at most 10000')
    .nullable()
    .optional()
    .openapi({ description: 'Attempts a second at most, evenly spaced; null for no limit.', example: 50 }),
  ordered: z.boolean().optional().openapi({
    description:
      'Strictly one delivery at a time, in publish order: a failing one holds those behind it until it is delivered or dead-lettered. What waits for a retry (of more than 10,000, the oldest) is due at once, whatever `Retry-After` asked, when an endpoint is made ordered, and when an ordered one is set active again or, failing, gets another URL.',
    example: false,
  }),
})

const ACTIVATION = z.boolean().openapi({
  description:
    'False: from two seconds on no attempt begins, and one that has begun is completed; what waits is kept, and events that are published meanwhile never come. True: what waits goes out.',
})

const endpointPath = z.object({ endpoint_id: id('endpoint') })

const endpointsQuery = listQuery({
  active_only: z
    .enum(['true', 'false'], 'must be true or false')
    .transform((text) => text === 'true')
    .optional()
    .openapi({ param: { schema: { type: 'boolean' } }, description: 'True: active endpoints only.' }),
})

/** The routes of endpoints; the URL rules need to know what the operator has exempted. */
export const endpointRoutes = (allow: readonly AddressRange[]) => ({
  create: createRoute({
    method: 'post',
    path: '/v1/endpoints',
    operationId: 'createEndpoint',
    tags: ['Endpoints'],
    summary: 'Register an endpoint',
    description:
      'The host may not be, or resolve to, this machine, a private, link-local or otherwise special network, or a cloud metadata service: its name is checked here, its addresses at every attempt.',
    request: { body: jsonBody(z.strictObject(writableFields(allow))) },
    responses: {
      201: answers(
        'The endpoint, with the only sight of its signing secret',
        z.object({ ok, ...endpointRecord.shape, signing_secret: signingSecret }),
      ),
      ...errorAnswers(...TENANT_ERRORS, ...BODY_ERRORS, 'invalid_url', 'endpoint_count'),
    },
  }),
  list: createRoute({
    method: 'get',
    path: '/v1/endpoints',
    operationId: 'listEndpoints',
    tags: ['Endpoints'],
    summary: 'List endpoints',
    description: 'Without their signing secrets.',
    request: { query: endpointsQuery },
    responses: {
      200: answers('Newest first', listOf(endpointRecord)),
      ...errorAnswers(...TENANT_ERRORS),
    },
  }),
  get: createRoute({
    method: 'get',
    path: '/v1/endpoints/{endpoint_id}',
    operationId: 'getEndpoint',
    tags: ['Endpoints'],
    summary: 'Read an endpoint',
    description: 'Without its signing secret, which only creating and rotating show.',
    request: { params: endpointPath },
    responses: {
      200: answers('The endpoint', z.object({ ok, ...endpointRecord.shape })),
      ...errorAnswers(...TENANT_ERRORS, 'endpoint_not_found'),
    },
  }),
  patch: createRoute({
    method: 'patch',
    path: '/v1/endpoints/{endpoint_id}',
    operationId: 'updateEndpoint',
    tags: ['Endpoints'],
    summary: 'Change an endpoint',
    description:
      'Applies to every attempt that begins more than two seconds after the answer, also of events published earlier: it goes to the new URL, and only if the endpoint is active. `subscribed_events` is applied when an event is published; deliveries that were accepted are still made.',
    request: {
      params: endpointPath,
      body: jsonBody(
        z
          .strictObject({ ...writableFields(allow), is_active: ACTIVATION })
          .partial()
          .refine(
            (fields) => Object.values(fields).some((value) => value !== undefined),
            'must change at least one field',
          )
          .openapi({ minProperties: 1 }),
      ),
    },
    responses: {
      200: answers('The endpoint as it is now', z.object({ ok, ...endpointRecord.shape })),
      ...errorAnswers(...TENANT_ERRORS, ...BODY_ERRORS, 'invalid_url', 'endpoint_not_found'),
    },
  }),
  rotate: createRoute({
    method: 'post',
    path: '/v1/endpoints/{endpoint_id}/rotate-secret',
    operationId: 'rotateSecret',
    tags: ['Endpoints'],
    summary: 'Rotate the signing secret',
    description:
      'Until `previous_secret_expires_at` requests carry two signatures, of the new and of the old secret; for up to two seconds, some may carry only that of the old. At most two secrets sign: rotating again within that time, even if only because the answer got lost, ends the older one at once.',
    request: { params: endpointPath },
    responses: {
      200: answers(
        'The endpoint; its new signing secret is shown only here',
        z.object({
          ok,
          ...endpointRecord.shape,
          signing_secret: signingSecret,
          previous_secret_expires_at: timestamp.openapi({ example: '2026-11-21T09:30:00.000Z' }),
        }),
      ),
      ...errorAnswers(...TENANT_ERRORS, 'endpoint_not_found'),
    },
  }),
})
