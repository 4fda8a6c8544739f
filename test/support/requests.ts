import fc from 'fast-check'
import { API } from './validate.ts'

// biome-ignore lint/suspicious/noExplicitAny: JSON Schemas, walked as such
type Schema = any

export type FuzzRequest = {
  method: string
  path: string
  key: 'own' | 'admin' | 'none' | 'wrong'
  headers: Record<string, string>
  body?: string
}

/** Text of all kinds: plain, any Unicode with halves of surrogate pairs, and what has broken programs before. */
const anyText = fc.oneof(
  fc.string({ maxLength: 20 }),
  fc.string({ unit: 'binary', maxLength: 20 }),
  fc.array(fc.integer({ min: 0, max: 0xffff }), { maxLength: 6 }).map((codes) => String.fromCharCode(...codes)),
  fc.constantFrom(
    '',
    '\0',
    '__proto__',
    'constructor',
    '*',
    'null',
    '-1',
    '1e999',
    'a'.repeat(600),
    'infinity',
    '%zz',
    '%ff',
  ),
)

const anyJson = fc.oneof(
  fc.jsonValue({ maxDepth: 3 }),
  anyText,
  fc.double(),
  fc.maxSafeInteger(),
  fc.constantFrom(null, true, -0),
)

/** Values that a schema of the description allows (nearly: a pattern is met by its example). */
function valid(schema: Schema): fc.Arbitrary<unknown> {
  if (schema.$ref) return valid(API.components.schemas[schema.$ref.split('/').at(-1)])
  if (schema.enum) return fc.constantFrom(...schema.enum)
  const some = schema.anyOf ?? schema.oneOf
  if (some) return fc.oneof(...some.map(valid))
  if (schema.allOf) return valid(schema.allOf[0])
  switch ([schema.type].flat()[0]) {
    case 'boolean':
      return fc.boolean()
    case 'integer':
      return fc.integer({ min: Math.max(schema.minimum ?? 0, 0), max: Math.min(schema.maximum ?? 1000, 2 ** 31) })
    case 'array':
      return fc.array(valid(schema.items), { minLength: schema.minItems ?? 0, maxLength: 3 })
    case 'object': {
      if (schema.additionalProperties === true) return fc.dictionary(anyText, anyJson, { maxKeys: 4 })
      const required: string[] = schema.required ?? []
      const fields = Object.entries<Schema>(schema.properties ?? {}).map(([name, field]) => [name, valid(field)])
      return fc.record(Object.fromEntries(fields), { requiredKeys: required as never[] })
    }
    default:
      if (schema.format === 'date-time') return fc.date({ noInvalidDate: true }).map((date) => date.toISOString())
      if (schema.example !== undefined) return fc.constant(schema.example)
      return fc.string({ maxLength: schema.maxLength ?? 30 })
  }
}

/** A valid body, or one with a field that is wrong, missing or too many, or no such thing at all. */
function bodies(schema: Schema): fc.Arbitrary<string> {
  const whole = valid(schema) as fc.Arbitrary<Record<string, unknown>>
  const names = fc.oneof(fc.constantFrom(...Object.keys(schema.properties ?? { a: 1 })), anyText)
  return fc.oneof(
    { weight: 4, arbitrary: whole.map((value) => JSON.stringify(value)) },
    {
      weight: 4,
      arbitrary: fc.tuple(whole, names, anyJson).map(([value, name, odd]) => JSON.stringify({ ...value, [name]: odd })),
    },
    {
      weight: 2,
      arbitrary: fc
        .tuple(whole, names)
        .map(([value, name]) =>
          JSON.stringify(Object.fromEntries(Object.entries(value).filter(([field]) => field !== name))),
        ),
    },
    {
      weight: 1,
      arbitrary: fc
        .tuple(whole, fc.nat())
        .map(([value, at]) => ((text) => text.slice(0, at % text.length))(JSON.stringify(value))),
    },
    {
      weight: 1,
      arbitrary: fc.oneof(
        anyJson.map((value) => JSON.stringify(value)),
        anyText,
      ),
    },
  )
}

const headerText = anyText.map((text) => text.replaceAll(/[^\x20-\x7e]/g, ''))

/**
 * Requests made from the API's description, most of them nearly right: valid ones, and ones with a parameter, field, header
 * or key that is not. `ids` are records of the tenant whose key is `own`.
 */
export function requests(ids: Record<string, string[]>): fc.Arbitrary<FuzzRequest> {
  const routes = Object.entries<Record<string, Schema>>(API.paths).flatMap(([template, item]) =>
    Object.entries(item)
      .filter(() => template.startsWith('/v1/'))
      .map(([verb, operation]) => ({ template, verb, operation })),
  )
  return fc.oneof(
    ...routes.map(({ template, verb, operation }) => {
      const parameters: Schema[] = (operation.parameters ?? []).filter((parameter: Schema) => parameter.in)
      const rightKey = template.startsWith('/v1/admin/') ? 'admin' : 'own'
      const schema = operation.requestBody?.content['application/json'].schema
      const path = fc
        .oneof(
          { weight: 6, arbitrary: fc.constantFrom(...Object.values(ids).flat()) },
          { weight: 6, arbitrary: fc.constantFrom(...(ids[/\{(\w+)\}/.exec(template)?.[1] ?? ''] ?? ['x'])) },
          { weight: 1, arbitrary: fc.uuid() },
          { weight: 1, arbitrary: anyText },
        )
        // Nothing, `.` and `..` would make another path of it.
        .map((id) => template.replace(/\{\w+\}/, () => encodeURIComponent(id.toWellFormed()).replace(/^\.{0,2}$/, '-')))
      const query = fc.record(
        Object.fromEntries(
          parameters
            .filter((parameter) => parameter.in === 'query')
            .map(({ name, schema: own }) => [
              name,
              fc.oneof({ weight: 3, arbitrary: valid(own).map(String) }, { weight: 1, arbitrary: anyText }),
            ]),
        ),
        { requiredKeys: [] },
      )
      const odd = fc.option(fc.tuple(anyText, anyText), { freq: 15, nil: null })
      return fc.record(
        {
          method: fc.constant(verb.toUpperCase()),
          path: fc.tuple(path, query, odd).map(([own, fields, extra]) => {
            const pairs = [...Object.entries(fields as Record<string, string>), ...(extra ? [extra] : [])]
            const text = pairs
              .map((pair) => pair.map((part) => encodeURIComponent(part.toWellFormed())).join('='))
              .join('&')
            return text ? `${own}?${text}` : own
          }),
          key: fc.oneof(
            { weight: 20, arbitrary: fc.constant(rightKey) },
            {
              weight: 1,
              arbitrary: fc.constantFrom('own' as const, 'admin' as const, 'none' as const, 'wrong' as const),
            },
          ) as fc.Arbitrary<FuzzRequest['key']>,
          headers: fc.record(
            {
              'idempotency-key': fc.oneof(fc.integer({ max: 50, min: 0 }).map(String), headerText),
              'x-request-id': headerText,
              'content-type': fc.oneof(
                { weight: 20, arbitrary: fc.constant('application/json') },
                { weight: 1, arbitrary: headerText },
              ),
            },
            { requiredKeys: schema ? ['content-type'] : [] },
          ),
          ...(schema && { body: bodies(schema) }),
        },
        { requiredKeys: schema ? ['method', 'path', 'key', 'headers', 'body'] : ['method', 'path', 'key', 'headers'] },
      ) as fc.Arbitrary<FuzzRequest>
    }),
  )
}
