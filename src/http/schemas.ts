import { z } from '@hono/zod-openapi'
import { ATTEMPT_ERRORS } from '../egress/failure.ts'
import { UUID } from '../ids.ts'

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

/**
 * ISO 8601 may do without seconds and minutes, in an offset too, and without its colon, and has a comma before fractions: `date -Ins`
 * and `date +%FT%T%z` write such times. RFC 3339, which is what `date-time` stands for, allows small letters.
 */
const spelledOut = (text: string) =>
  text
    .toUpperCase()
    .replace(
      /^(\d{4}-\d\d-\d\dT\d\d)(:\d\d)?(:\d\d(?:[.,]\d+)?)?(Z|([+-]\d\d)(?::?(\d\d))?)$/,
      (_, hour, minute = ':00', second = ':00', zone, hours, minutes = '00') =>
        hour + minute + second.replace(',', '.') + (hours ? `${hours}:${minutes}` : zone),
    )

/**
 * A moment with an offset or `Z`. Ids begin in 1970: any moment before that is treated as 1970 (`firstId`). Ids have whole
 * milliseconds, so a moment between two of them is rounded up.
 */
const moment = z
  .string()
  .transform(spelledOut)
  .pipe(
    z.iso.datetime({
      offset: true,
      error: 'must be a time like 2026-01-31T12:30:00Z, or with an offset like +01:00 (in a query %2B01:00)',
    }),
  )
  .transform((text) => new Date(Date.parse(text) + (/\.\d{3}\d*[1-9]/.test(text) ? 1 : 0)))
  .refine((date) => !Number.isNaN(date.getTime()), 'must be a valid time')

const wholeNumber = (min: number, max: number) =>
  z
    .string()
    .regex(/^\d{1,6}$/, `must be a whole number from ${min} to ${max}`)
    .transform(Number)
    .pipe(z.number().min(min, `must be at least ${min}`).max(max, `must be at most ${max}`))

const numberParam = (description: string, schema: { minimum: number; maximum: number; default?: number }) => ({
  param: { required: false, schema: { type: 'integer' as const, ...schema } },
  description,
})

/** A `next_cursor`, opaque to clients. `form` is what its decoded text must look like. */
const cursorAt = (form: RegExp) =>
  z
    .string()
    .max(64)
    .transform((text) => ({ text, position: Buffer.from(text, 'base64url').toString() }))
    // Encoded again, since decoding skips characters that it cannot read.
    .refine(
      ({ text, position }) => form.test(position) && encodeCursor(position) === text,
      'must be a next_cursor that this list returned',
    )
    .transform(({ position }) => position)
    .openapi({
      param: { schema: { type: 'string' } },
      description: 'The `next_cursor` of a page: continues where it ended. Cannot be combined with `offset`.',
    })

const encodeCursor = (position: string) => Buffer.from(position).toString('base64url')

const pageFields = {
  limit: wholeNumber(1, 250)
    .default(50)
    .openapi(numberParam('How many rows a page holds.', { minimum: 1, maximum: 250, default: 50 })),
  offset: wholeNumber(0, 10_000)
    .optional()
    // No default, or generated clients would send it along with a cursor.
    .openapi(
      numberParam('How many rows are skipped; for greater depth use `cursor`.', { minimum: 0, maximum: 10_000 }),
    ),
  cursor: cursorAt(UUID).optional(),
}

type Page = { limit: number; offset?: number | undefined; cursor?: string | undefined }

const onlyOneStart = (query: { cursor?: unknown; offset?: unknown }, ctx: z.RefinementCtx) => {
  if (query.cursor !== undefined && query.offset !== undefined) {
    ctx.addIssue({ code: 'custom', path: ['cursor'], message: 'excludes offset: give one of them' })
  }
}

/** The query of a list that has `fields` besides those of its pages. */
const listQuery = <Fields extends z.ZodRawShape>(fields: Fields) =>
  z.strictObject({ ...pageFields, ...fields }).superRefine(onlyOneStart)

export const pageQuery = listQuery({})
export const attemptsQuery = listQuery({ cursor: cursorAt(/^\d{1,9}$/).optional() })
export const endpointsQuery = listQuery({
  active_only: z
    .enum(['true', 'false'], 'must be true or false')
    .transform((text) => text === 'true')
    .optional()
    .openapi({ param: { schema: { type: 'boolean' } }, description: 'True: active endpoints only.' }),
})

const timeOrder = (query: { since?: Date | undefined; until?: Date | undefined }, ctx: z.RefinementCtx) => {
  // A value that is not a time is reported as that, and is still text here.
  if (query.since instanceof Date && query.until instanceof Date && query.since >= query.until) {
    ctx.addIssue({ code: 'custom', path: ['since'], message: 'must be before until, in whole milliseconds' })
  }
}

const uuidFilter = z
  .string()
  .regex(/^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$/, 'must be a UUID')
  .transform((text) => text.toLowerCase())

export const deliveryStatus = z.enum(['pending', 'retrying', 'delivered', 'dead_lettered']).openapi('DeliveryStatus', {
  description:
    '`pending`: not tried yet, or not since it was replayed. `retrying`: failed, and another attempt will follow. The other two are final until a replay.',
  example: 'delivered',
})

const deliveryFilters = {
  endpoint_id: uuidFilter.optional().openapi({ format: 'uuid', description: 'Deliveries to this endpoint only.' }),
  event_type: eventType.optional().openapi({ description: 'Deliveries of events of this type only.' }),
  since: moment.optional().openapi({
    param: { schema: { type: 'string', format: 'date-time' } },
    description: 'Created at or after this time.',
  }),
  until: moment.optional().openapi({
    param: { schema: { type: 'string', format: 'date-time' } },
    description: 'Created before this time, which must be after `since`.',
  }),
}

export const dlqQuery = listQuery(deliveryFilters).superRefine(timeOrder)
export const deliveriesQuery = listQuery({ ...deliveryFilters, status: deliveryStatus.optional() }).superRefine(
  timeOrder,
)

export const listOf = <Item extends z.ZodType>(item: Item) =>
  z.object({
    ok,
    data: z.array(item),
    limit: z.int().openapi({ example: 50 }),
    offset: z.int(),
    has_more: z.boolean().openapi({ example: false }),
    next_cursor: z
      .string()
      .nullable()
      .openapi({ description: 'Give it as `cursor` for the next page; null on the last one.', example: null }),
  })

/** The body of a list: `rows` holds up to one more than the page, which says whether there are more. */
export function listBody<Row, Item>(
  page: Page,
  rows: Row[],
  render: (row: Row) => Item,
  position: (row: Row) => string,
) {
  const shown = rows.slice(0, page.limit)
  const last = rows.length > page.limit ? shown.at(-1) : undefined
  return {
    ok: true as const,
    data: shown.map(render),
    limit: page.limit,
    offset: page.offset ?? 0,
    has_more: last !== undefined,
    next_cursor: last === undefined ? null : encodeCursor(position(last)),
  }
}

/** `example`: what the example of the body has in place of the examples of its fields. */
export const answers = <Schema extends z.ZodType>(description: string, schema: Schema, example?: object) => ({
  description,
  content: { 'application/json': { schema, ...(example && { example }) } },
})

export const jsonBody = <Schema extends z.ZodType>(schema: Schema) => ({
  required: true,
  content: { 'application/json': { schema } },
})
