import { z } from '@hono/zod-openapi'
import { fragment } from '../db/statement.ts'
import { UUID } from '../ids.ts'
import { ok } from './schemas.ts'

// Lists are read in pages: what asks for one, which rows it reads, and what answers with it.

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
export const cursorAt = (form: RegExp) =>
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
export const listQuery = <Fields extends z.ZodRawShape>(fields: Fields) =>
  z.strictObject({ ...pageFields, ...fields }).superRefine(onlyOneStart)

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

/** The end of a statement that reads a page's rows, and one more, which says whether there are more. */
export const pageRows = ({ limit, offset = 0 }: Page) => fragment`limit ${limit + 1} offset ${offset}`

/** The body of a list: `rows` are those of its page, and one more if there are more. */
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
