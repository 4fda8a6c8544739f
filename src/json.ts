/** JSON nested deeper than this is refused: recursion over it (ours or a receiver's) would not end well. */
export const MAX_DEPTH = 64

const QUOTE = 34
const BACKSLASH = 92
const OPEN = new Set([91, 123])
const CLOSE = new Set([93, 125])

/** Whether brackets nest deeper than MAX_DEPTH. Reads any text, valid or not, without recursion. */
export function isTooDeep(text: string): boolean {
  let depth = 0
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at)
    if (code === QUOTE) at = endOfString(text, at)
    else if (OPEN.has(code) && ++depth > MAX_DEPTH) return true
    else if (CLOSE.has(code)) depth--
  }
  return false
}

/**
 * The text of the member `name` of a JSON object, as it was written: number spellings, key order and escapes kept.
 * `text` must be a valid JSON object; of duplicate members the last counts, as in JSON.parse.
 */
export function sliceMember(text: string, name: string): string | undefined {
  let found: string | undefined
  let at = text.indexOf('{') + 1
  while (at < text.length) {
    const keyStart = text.indexOf('"', at)
    if (keyStart === -1) break
    const keyEnd = endOfString(text, keyStart)
    const colon = text.indexOf(':', keyEnd)
    const end = endOfValue(text, colon + 1)
    if (JSON.parse(text.slice(keyStart, keyEnd + 1)) === name) found = text.slice(colon + 1, end).trim()
    at = end + 1
  }
  return found
}

/** The index of the quote that closes the string whose opening quote is at `start`. */
function endOfString(text: string, start: number): number {
  let at = start + 1
  while (at < text.length && text.charCodeAt(at) !== QUOTE) at += text.charCodeAt(at) === BACKSLASH ? 2 : 1
  return at
}

/** The index of the comma or bracket that ends the value which starts at `start`, or of the text's end. */
function endOfValue(text: string, start: number): number {
  let depth = 0
  for (let at = start; at < text.length; at++) {
    const code = text.charCodeAt(at)
    if (code === QUOTE) at = endOfString(text, at)
    else if (OPEN.has(code)) depth++
    else if (CLOSE.has(code) && depth-- === 0) return at
    else if (code === 44 && depth === 0) return at
  }
  return text.length
}

/**
 * Whether two valid JSON texts hold the same value: key order, white space, escapes and the spelling of numbers aside.
 * Numbers are compared by their digits, not as doubles, so 64-bit integers that differ are different.
 */
export function isSameJson(left: string, right: string): boolean {
  return left === right || canonical(left) === canonical(right)
}

function canonical(text: string): string {
  // The reviver's third argument carries the number's own spelling (ECMAScript, JSON.parse source text access).
  const reviver = (_key: string, value: unknown, context?: { source?: string }) =>
    typeof value === 'number' ? { number: canonicalNumber(context?.source ?? String(value)) } : [value]
  return JSON.stringify(sortKeys(JSON.parse(text, reviver as (key: string, value: unknown) => unknown)))
}

/** Objects become sorted lists of pairs, which no key, `__proto__` included, can disturb. */
function sortKeys(value: unknown): unknown {
  if (!Array.isArray(value)) return value
  const [inner] = value
  if (Array.isArray(inner)) return { list: inner.map(sortKeys) }
  if (typeof inner !== 'object' || inner === null) return inner
  const pairs = Object.entries(inner).map(([key, member]) => [key, sortKeys(member)] as const)
  return { pairs: pairs.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0)) }
}

/** `1`, `1.0`, `10e-1` become `1e0`: sign, digits without outer zeros, exponent. Zero has no sign. */
function canonicalNumber(source: string): string {
  const [, sign, whole = '', fraction = '', exponent = '0'] =
    /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/.exec(source) ?? []
  const digits = (whole + fraction).replace(/^0+/, '')
  const trimmed = digits.replace(/0+$/, '')
  if (trimmed === '') return '0'
  return `${sign}${trimmed}e${BigInt(exponent) - BigInt(fraction.length) + BigInt(digits.length - trimmed.length)}`
}
