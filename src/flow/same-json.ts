import { randomBytes } from 'node:crypto'

const QUOTE = 34
const BACKSLASH = 92
const NUMERIC = new Uint8Array(128)
for (const code of Buffer.from('0123456789+-.eE')) NUMERIC[code] = 1

/** The index of the quote that closes the string whose opening quote is at `start`. */
function endOfString(text: string, start: number): number {
  let at = start + 1
  while (at < text.length && text.charCodeAt(at) !== QUOTE) at += text.charCodeAt(at) === BACKSLASH ? 2 : 1
  return at
}

/**
 * Whether two valid JSON texts hold the same value: key order, white space, escapes and the spelling of numbers aside.
 * Numbers are compared by their digits, not as doubles, so 64-bit integers that differ are different. It takes time in
 * proportion to the texts, whatever they hold.
 */
export function isSameJson(left: string, right: string): boolean {
  if (left === right) return true
  return isSame(parseExactly(left), parseExactly(right))
}

/** For values that JSON.parse has made: all their keys are own properties, even `__proto__`. */
function isSame(left: unknown, right: unknown): boolean {
  if (left === right) return true
  if (!isObject(left) || !isObject(right) || Array.isArray(left) !== Array.isArray(right)) return false
  if (Array.isArray(left))
    return left.length === right.length && left.every((item, index) => isSame(item, right[index]))
  const keys = Object.keys(left)
  if (keys.length !== Object.keys(right).length) return false
  return keys.every((key) => Object.hasOwn(right, key) && isSame(left[key], right[key]))
}

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === 'object' && value !== null

/** Doubles tell numbers apart that have at most this many digits, outer zeros aside, then an exponent of at most this. */
const SAFE_DIGITS = 15
const SAFE_EXPONENT = 150
/** Safe at a glance, without counting zeros. Nothing shorter than `1e100` is unsafe. */
const SAFE = /^-?[\d.]{1,15}(?:[eE][+-]?\d\d?)?$/
const SHORTEST_UNSAFE = 5
/** What stands before those that are not safe. No text can have it, as nobody can guess it. */
const MARK = randomBytes(12).toString('base64url')

/** JSON.parse, but a number that is not safe as a double becomes a string: the same one however it is spelled, and no other is. */
function parseExactly(text: string): unknown {
  const parts: string[] = []
  let done = 0
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at)
    if (code === QUOTE) at = endOfString(text, at)
    else if (NUMERIC[code]) {
      const start = at
      while (NUMERIC[text.charCodeAt(at + 1)]) at++
      const end = at + 1
      if (end - start < SHORTEST_UNSAFE) continue
      const number = text.slice(start, end)
      if (SAFE.test(number)) continue
      const exact = canonicalNumber(number)
      parts.push(text.slice(done, start), exact.isSafe ? exact.text : `"${MARK}${exact.text}"`)
      done = end
    }
  }
  return JSON.parse(parts.join('') + text.slice(done))
}

/** `1`, `1.0`, `10e-1` become `1e0`: sign, digits without outer zeros, exponent. Zero has no sign. */
function canonicalNumber(number: string): { text: string; isSafe: boolean } {
  const [, sign, whole = '', fraction = '', power = '0'] =
    /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/.exec(number) ?? []
  const digits = whole + fraction
  let start = 0
  let end = digits.length
  while (digits[start] === '0') start++
  while (end > start && digits[end - 1] === '0') end--
  if (start === end) return { text: '0', isSafe: true }
  const exponent = sum(power, digits.length - end - fraction.length)
  const isSafe = end - start <= SAFE_DIGITS && Math.abs(Number(exponent)) <= SAFE_EXPONENT
  return { text: `${sign}${digits.slice(start, end)}e${exponent}`, isSafe }
}

/** A decimal integer of any length plus a small one. BigInt would take more than linear time to read it. */
function sum(integer: string, small: number): string {
  const digits = integer.replace(/^[+-]?0*/, '')
  if (digits.length <= SAFE_DIGITS) return String(Number(integer) + small)
  const minus = integer.startsWith('-')
  const base = 10 ** SAFE_DIGITS
  let result = ''
  let carry = minus ? -small : small
  for (let end = digits.length; end > 0; end -= SAFE_DIGITS) {
    const part = Number(digits.slice(Math.max(0, end - SAFE_DIGITS), end)) + carry
    carry = Math.floor(part / base)
    result = String(part - carry * base).padStart(SAFE_DIGITS, '0') + result
  }
  return (minus ? '-' : '') + `${carry}${result}`.replace(/^0+/, '')
}
