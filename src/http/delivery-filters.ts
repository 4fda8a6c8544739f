import { z } from '@hono/zod-openapi'
import { listQuery } from './pages.ts'
import { deliveryStatus, eventType } from './schemas.ts'

// What a list of deliveries may be asked for.

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
