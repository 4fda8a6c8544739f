import { hash } from 'node:crypto'
import { escapeIdentifier } from 'pg'

// Statements as they are written in this program: the text as it is, what is put in between as parameters.

/** What a parameter may be. A list becomes an array of Postgres; whatever is JSON is given as its text. */
export type Value = string | number | boolean | null | Date | Uint8Array | readonly Value[]

/** A piece of a statement with its parameters, to be put into another one. */
export class Fragment {
  readonly texts: readonly string[]
  readonly values: readonly (Value | Fragment)[]

  /** `texts` are what stands around `values`: one more than these. */
  constructor(texts: readonly string[], values: readonly (Value | Fragment)[]) {
    this.texts = texts
    this.values = values
  }
}

/** A Fragment, written as a statement is. */
export const fragment = (texts: TemplateStringsArray, ...values: (Value | Fragment)[]) => new Fragment(texts, values)

/** A table or column, with or without its schema. */
export const identifier = (name: string) => new Fragment([name.split('.').map(escapeIdentifier).join('.')], [])

/** `fragments` with `separator` in between. */
export const join = (fragments: Fragment[], separator: string) =>
  new Fragment(fragments.map((_, index) => (index === 0 ? '' : separator)).concat(''), fragments)

/** What an `update` sets: columns and their values; those that are undefined stay as they are. */
export const assignments = (changes: Record<string, Value | undefined>) =>
  join(
    Object.entries(changes).flatMap(([column, value]) =>
      value === undefined ? [] : [fragment`${identifier(column)} = ${value}`],
    ),
    ', ',
  )

/**
 * A statement as the database takes it: `$1`, `$2` ... stand for `values`. Throws a TypeError for a value that is undefined, which the
 * types cannot always tell.
 */
export function toStatement(whole: Fragment): { text: string; values: Value[] } {
  const values: Value[] = []
  const write = ({ texts, values: own }: Fragment): string =>
    texts.reduce((text, next, index) => text + put(own[index - 1]) + next)
  const put = (value: Value | Fragment | undefined): string => {
    if (value instanceof Fragment) return write(value)
    // The driver would make a null of it.
    if (value === undefined || (Array.isArray(value) && value.includes(undefined)))
      throw new TypeError('a parameter of a statement is undefined')
    return `$${values.push(value)}`
  }
  return { text: write(whole), values }
}

const HEADER_BYTES = 20
const TEXT_OID = 25

/**
 * A list as a parameter of type text[], in the server's own binary form: as text it would be escaped here and parsed there,
 * character by character.
 */
export function textList(list: readonly (string | null)[]): Uint8Array {
  const lengths = list.map((text) => (text === null ? 0 : Buffer.byteLength(text)))
  const bytes = Buffer.allocUnsafe(lengths.reduce((sum, length) => sum + 4 + length, HEADER_BYTES))
  // One dimension; whether there are nulls; of texts; the length; counted from 1.
  for (const [index, number] of [1, Number(list.includes(null)), TEXT_OID, list.length, 1].entries())
    bytes.writeInt32BE(number, 4 * index)
  let end = HEADER_BYTES
  list.forEach((text, index) => {
    end = bytes.writeInt32BE(text === null ? -1 : (lengths[index] as number), end)
    if (text !== null) end += bytes.write(text, end)
  })
  return bytes
}

/** The name under which a connection keeps a statement: the same for the same text, and short enough for Postgres. */
export const nameOf = (text: string) => hash('sha256', text, 'base64url')
