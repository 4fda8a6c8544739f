/** As much of a JSON Schema as our own schemas make use of. */
export type Schema = {
  $ref?: string
  example?: unknown
  enum?: unknown[]
  type?: string | string[]
  properties?: Record<string, Schema>
  items?: Schema
}

/**
 * An example of a whole body, put together from the examples of its fields, so that each is written once, beside its
 * field. `schemas` is what `$ref`s point into. Throws for a text, or an alternative, that has none: no reader is helped by "string".
 */
export function exampleOf(schema: Schema, schemas: Record<string, Schema>, where = 'body'): unknown {
  if (schema.example !== undefined) return schema.example
  if (schema.enum) return schema.enum[0]
  if (schema.$ref) return exampleOf(schemas[schema.$ref.split('/').at(-1) as string] as Schema, schemas, schema.$ref)
  if (schema.items) return [exampleOf(schema.items, schemas, `${where}[]`)]
  switch (schema.type) {
    case 'boolean':
      return true
    case 'integer':
    case 'number':
      return 0
    case 'object': {
      const fields = Object.entries(schema.properties ?? {})
      return Object.fromEntries(fields.map(([name, field]) => [name, exampleOf(field, schemas, `${where}.${name}`)]))
    }
    default:
      throw new Error(`${where} has no example`)
  }
}

/** An example in which `changes`, if any, replace what they name, in records and in each row of lists. */
export function withChanges(example: unknown, changes: unknown): unknown {
  if (changes === undefined) return example
  if (Array.isArray(example) && Array.isArray(changes)) return example.map((row, i) => withChanges(row, changes[i]))
  if (!isRecord(example) || !isRecord(changes)) return changes
  const changed = Object.entries(changes).map(([name, value]) => [name, withChanges(example[name], value)])
  return { ...example, ...Object.fromEntries(changed) }
}

const isRecord = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && !Array.isArray(value)
