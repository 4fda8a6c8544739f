import { z } from '@hono/zod-openapi'
import { ERRORS, type ErrorCode } from '../errors.ts'
import { RATE_ACTIONS } from '../flow/rate-counter.ts'
import { count, ok } from './schemas.ts'

const ID = '01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10'
const MONTH_END = '2026-12-01T00:00:00.000Z'

const problems = z.array(z.object({ path: z.string(), message: z.string() }))
const quota = z.object({ limit: count, current: count })
const monthlyQuota = quota.extend({ resets_at: z.string().openapi({ format: 'date-time' }) })

type Explained = { cause: string; remedy: string; details?: [schema: z.ZodType, example: unknown] }

/** What each error's details hold, what causes it, and what a client should do. Only the documentation shows this. */
const EXPLAINED: Record<ErrorCode, Explained> = {
  invalid_json: {
    cause: 'The body is not JSON in UTF-8, or is empty',
    remedy: 'Correct the request; repeating it does not help',
    details: [z.string(), 'Unexpected end of JSON input at position 41'],
  },
  invalid_request: {
    cause:
      'A field, parameter or header is missing, unknown or out of bounds, or a list would have to read too much; `details` names them, up to 20, each with its bound',
    remedy: 'Correct what `details` names',
    details: [problems, [{ path: 'event_type', message: 'must be at most 128 characters' }]],
  },
  invalid_url: {
    cause: 'The endpoint’s URL breaks a rule, which `details` states: its scheme, credentials in it, a blocked host',
    remedy: 'Register a public http(s) URL without credentials',
    details: [z.string(), 'url hostname is blocked for SSRF protection'],
  },
  payload_too_large: {
    cause: 'The payload (or the whole body) is larger than `details.limit_bytes`',
    remedy: 'Publish less, or a link to the rest',
    details: [
      z.object({
        limit_bytes: z.int(),
        actual_bytes: count.openapi({
          description: 'For a body that is more than 64 KiB over that limit: as announced, or as far as it was read.',
        }),
      }),
      { limit_bytes: 262_144, actual_bytes: 300_000 },
    ],
  },
  missing_token: { cause: 'No `Authorization: Bearer …` header', remedy: 'Send the key' },
  invalid_api_key: {
    cause: 'The tenant key is not known',
    remedy: 'Use a key that the operator issued for this tenant',
  },
  invalid_admin_key: {
    cause: 'An admin route was called with a key other than the admin key',
    remedy: 'Use the admin key',
  },
  event_not_found: { cause: 'This tenant has no such event', remedy: 'Check the id; retention may have removed it' },
  endpoint_not_found: { cause: 'This tenant has no such endpoint', remedy: 'Check the id' },
  delivery_not_found: {
    cause: 'This tenant has no such delivery',
    remedy: 'Check the id; retention may have removed it',
  },
  tenant_not_found: {
    cause: 'An API key was asked for a tenant that does not exist',
    remedy: 'Create the tenant first',
  },
  not_found: { cause: 'There is no such route, or not with this method', remedy: 'Check path and method' },
  request_timeout: {
    cause:
      'The body stopped for 10 seconds or, with others waiting for room, came very slowly, or the request took 30 in all; the connection is closed',
    remedy: 'Repeat with the same key and body',
    details: [problems, [{ path: '', message: 'the request took too long to arrive' }]],
  },
  key_reused: {
    cause: 'The `Idempotency-Key` belongs to another event (`details.event_id`)',
    remedy: 'Do not retry; read that event, and use a new key for a new event',
    details: [z.object({ event_id: z.string().openapi({ format: 'uuid' }) }), { event_id: ID }],
  },
  slug_taken: { cause: 'Another tenant has this slug', remedy: 'Choose another' },
  rate_limited: {
    cause: 'Too many requests of one action in the current window',
    remedy: 'Wait `details.retry_after_seconds` (also in `Retry-After`), then repeat with the same key and body',
    details: [
      z.object({
        tenant_id: z.string(),
        action: z.enum(RATE_ACTIONS),
        limit: z.int(),
        current: z.int(),
        window_seconds: z.int(),
        window_start: z.string().openapi({ format: 'date-time' }),
        retry_after_seconds: z.int(),
      }),
      {
        tenant_id: 'acme',
        action: 'events:write',
        limit: 6000,
        current: 6001,
        window_seconds: 60,
        window_start: '2026-11-20T09:30:00.000Z',
        retry_after_seconds: 12,
      },
    ],
  },
  monthly_events: {
    cause: 'The tenant has published as many events this UTC month as it may',
    remedy: 'See `GET /v1/usage/current` and `GET /v1/usage/limits`; wait for `details.resets_at` or ask the operator',
    details: [monthlyQuota, { limit: 1_000_000, current: 1_000_000, resets_at: MONTH_END }],
  },
  monthly_attempts: {
    cause: 'The tenant’s delivery attempts of this UTC month are used up; publishing and replaying are refused',
    remedy:
      'As for monthly events; what was waiting is dead-lettered as `monthly_attempt_limit` and can be replayed later',
    details: [monthlyQuota, { limit: 5_000_000, current: 5_000_000, resets_at: MONTH_END }],
  },
  endpoint_count: {
    cause: 'The tenant has as many endpoints as it may',
    remedy: 'Change an existing endpoint, or ask the operator',
    details: [quota, { limit: 100, current: 100 }],
  },
  fanout: {
    cause: 'More active endpoints subscribe to the event than one event may reach; nothing was stored',
    remedy: 'Narrow the subscriptions, or ask the operator',
    details: [quota, { limit: 100, current: 101 }],
  },
  internal: {
    cause:
      'A fault of ours, or the database did not answer in time; the request may have been carried out all the same',
    remedy: 'Repeat with the same key and body; report the `X-Request-Id` if it persists',
  },
  overloaded: {
    cause:
      'Too many requests, of all tenants or of this one, are waiting, or too many answers unread; nothing was done for this request',
    remedy: 'Wait a second (`Retry-After`), then repeat with the same key and body',
  },
}

const pascal = (code: string) => code.replaceAll(/(?:^|_)(.)/g, (_, letter: string) => letter.toUpperCase())

/** The body of every error. */
export const ERROR_BODIES = Object.fromEntries(
  Object.entries(EXPLAINED).map(([code, { details }]) => [
    code,
    z
      .object({
        ok: ok.openapi({ example: false }),
        error: z.literal(ERRORS[code as ErrorCode][1]),
        ...(details && { details: details[0] }),
      })
      .openapi(`${pascal(code)}Error`),
  ]),
) as Record<ErrorCode, z.ZodObject<{ ok: z.ZodBoolean; error: z.ZodLiteral<string> }>>

/** An example of every error's body, by code. */
export const ERROR_EXAMPLES = Object.entries(EXPLAINED).map(([code, { details }]) => {
  const error = ERRORS[code as ErrorCode][1]
  return [code, { ok: false, error, ...(details && { details: details[1] }) }] as const
})

/** The error responses of a route, by status, from the errors it can answer with. */
export function errorAnswers(...codes: ErrorCode[]) {
  const all: ErrorCode[] = [...codes, 'internal']
  const statuses = [...new Set(all.map((code) => ERRORS[code][0]))]
  return Object.fromEntries(
    statuses.map((status) => {
      const own = all.filter((code) => ERRORS[code][0] === status)
      const [first, ...others] = own.map((code) => ERROR_BODIES[code])
      const schema =
        others.length === 0
          ? first
          : z.discriminatedUnion('error', [first as (typeof ERROR_BODIES)[ErrorCode], ...others])
      const examples = Object.fromEntries(own.map((code) => [code, { $ref: `#/components/examples/${code}` }]))
      const description = own.map((code) => `\`${ERRORS[code][1]}\``).join(', ')
      return [status, { description, content: { 'application/json': { schema: schema as z.ZodType, examples } } }]
    }),
  )
}

/** Every error as a row of a Markdown table: status, string, cause, remedy. */
export const errorTable = () =>
  [
    '| status | `error` | cause | what to do |',
    '|---|---|---|---|',
    ...Object.entries(ERRORS).map(([code, [status, text]]) => {
      const { cause, remedy } = EXPLAINED[code as ErrorCode]
      return `| ${status} | \`${text}\` | ${cause} | ${remedy} |`
    }),
  ].join('\n')

/** What any tenant route can answer with. */
export const TENANT_ERRORS = [
  'missing_token',
  'invalid_api_key',
  'rate_limited',
  'invalid_request',
  'overloaded',
] as const
/** What any admin route can answer with. */
export const ADMIN_ERRORS = ['missing_token', 'invalid_admin_key', 'invalid_request', 'overloaded'] as const
/** What any route with a body can answer with besides. */
export const BODY_ERRORS = ['invalid_json', 'payload_too_large', 'request_timeout'] as const
