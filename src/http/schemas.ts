import { z } from '@hono/zod-openapi'
import { ATTEMPT_ERRORS } from '../egress/failure.ts'

// Schemas that several routes share, so that the OpenAPI document explains a field once and everywhere alike.

export const id = (of: string) =>
  z.string().openapi({
    description: `The id of the ${of}, a UUIDv7.`,
    format: 'uuid',
    example: '01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10',
  })

/** Of every answer. Not a literal: a boolean with an enum or a const breaks clients (in Python, every answer is refused). */
export const ok = z.boolean().openapi({ example: true })

export const timestamp = z.string().openapi({ format: 'date-time', example: '2026-11-20T09:30:00.000Z' })

/** A whole number that may need more than 32 bits: without the format, clients generated for some languages would use 32. */
export const count = z.int().openapi({ format: 'int64' })

export const tenantId = z
  .string()
  .regex(/^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/, 'must be 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or digit')
  .openapi({ example: 'acme' })

/** Free text of `min` to `max` characters (code points, as JSON Schema counts them) that Postgres and UTF-8 can hold. */
export const text = (min: number, max: number) =>
  z
    .string()
    .refine((value) => value.length >= min, `must be at least ${min} characters`)
    .refine((value) => value.length <= max || [...value].length <= max, `must be at most ${max} characters`)
    .refine((value) => value.isWellFormed() && !value.includes('\0'), 'must not contain NUL or half a surrogate pair')
    .openapi({ minLength: min, maxLength: max })

/** The tenant that a record belongs to. */
export const ownTenant = z.string().openapi({ example: 'acme' })

export const payload = z.record(z.string(), z.unknown()).openapi({
  description: 'A JSON object. Its text is kept and delivered as it was sent: key order and number spellings included.',
  example: { invoice_id: 'inv_1', amount: 4200 },
})

export const eventType = z
  .string()
  .max(128, 'must be at most 128 characters')
  .regex(/^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$/, 'must be words of A-Z a-z 0-9 _ - joined by dots')
  .openapi({
    description: 'A dotted name: words of `A-Za-z0-9_-` joined by `.`, 1 to 128 characters.',
    example: 'invoice.paid',
  })

const ANSWERED = ['http_status', 'redirect']
const UNANSWERED = ATTEMPT_ERRORS.filter((error) => !ANSWERED.includes(error)).map((error) => `\`${error}\``)

export const attemptError = z
  .string()
  .nullable()
  .openapi({
    description: `The class of the failure; null on success. \`http_status\`, \`redirect\`: the receiver answered, and not with 2xx. \`worker_lost\`: the worker was lost during the attempt, whose request may have arrived. Otherwise no complete, valid answer came: ${UNANSWERED.join(', ')}.`,
    example: 'http_status',
  })

export const deliveryStatus = z.enum(['pending', 'retrying', 'delivered', 'dead_lettered']).openapi('DeliveryStatus', {
  description:
    '`pending`: not tried yet, or not since it was replayed. `retrying`: failed, and another attempt will follow. The other two are final until a replay.',
  example: 'delivered',
})

/** `example`: what the example of the body has in place of the examples of its fields. */
export const answers = <Schema extends z.ZodType>(description: string, schema: Schema, example?: object) => ({
  description,
  content: { 'application/json': { schema, ...(example && { example }) } },
})

export const jsonBody = <Schema extends z.ZodType>(schema: Schema) => ({
  required: true,
  content: { 'application/json': { schema } },
})
