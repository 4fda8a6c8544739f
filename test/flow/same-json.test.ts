import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { isSameJson } from '../../src/flow/same-json.ts'
import { cpuTime } from '../support/cpu.ts'

const SAME: [string, string, string][] = [
  ['{"a":1,"b":2}', '{"b":2,"a":1}', 'key order'],
  ['{"a":{"x":1,"y":[{"p":1,"q":2}]}}', '{"a":{"y":[{"q":2,"p":1}],"x":1}}', 'key order, at depth'],
  ['{"a":1}', ' { "a" : 1 } ', 'white space'],
  ['{"a":1}', '{"a":1.0}', '1 and 1.0'],
  ['{"a":100}', '{"a":1e2}', '100 and 1e2'],
  ['{"a":0.001}', '{"a":1E-3}', '0.001 and 1E-3'],
  ['{"a":0}', '{"a":-0.0e5}', 'zero has no sign'],
  ['{"a":10000000000000000000000}', '{"a":1e22}', 'large integers and exponents'],
  ['{"a":1e100}', '{"a":0.1e101}', 'large numbers'],
  ['{"a":1.5e-400}', '{"a":15E-401}', 'numbers smaller than every double'],
  ['{"a":0}', '{"a":0e999}', 'zero, however large its exponent'],
  ['{"a":-0}', '{"a":0.00000000000000000000}', 'zero, however many digits it has'],
  ['{"a":12345678901234567890}', '{"a":1234567890.1234567890e10}', '64-bit integers'],
  ['{"a":1e999999999999999}', '{"a":0.1e1000000000000000}', 'exponents of 15 and of 16 digits'],
  ['{"a":1e-1000000000000000}', '{"a":10e-1000000000000001}', 'negative exponents'],
  ['{"a":10e-10000000000000000000000000000000}', '{"a":1e-9999999999999999999999999999999}', 'exponents that borrow'],
  ['{"a":10e9999999999999999999999999999999}', '{"a":1e+00010000000000000000000000000000000}', 'exponents that carry'],
  ['[true,false,null,"e",1]', '[true, false, null, "e", 1e0]', 'words'],
  ['{"a":"é/"}', String.raw`{"\u0061":"\u00e9\/"}`, 'escapes'],
  ['{"a":1,"a":2}', '{"a":2}', 'the last of duplicate keys'],
]

const DIFFERENT: [string, string, string][] = [
  ['{"a":9007199254740993}', '{"a":9007199254740992}', 'integers beyond 2^53'],
  ['{"a":12345678901234567890}', '{"a":12345678901234567891}', '64-bit integers'],
  ['{"a":0.1}', '{"a":0.10000000000000000001}', 'digits beyond a double'],
  ['{"a":1e400}', '{"a":1e401}', 'numbers beyond every double'],
  ['{"a":1e-400}', '{"a":0}', 'a number smaller than every double and zero'],
  ['{"a":[1e400,1e401]}', '{"a":[1e401,1e400]}', 'the order of numbers beyond every double'],
  ['{"a":1e400}', '{"a":1e200}', 'a number beyond every double and a large one'],
  ['{"a":1e400}', '{"a":-1e400}', 'the sign of a number beyond every double'],
  ['{"a":1e1000000000000000000000000}', '{"a":1e1000000000000000000000001}', 'exponents'],
  ['{"a":1e1000000000000000000000000}', '{"a":1e-1000000000000000000000000}', 'the signs of exponents'],
  ['{"a":"1e400"}', '{"a":"10e399"}', 'strings that look like numbers'],
  ['{"a":"1e400"}', '{"a":1e400}', 'a large number and a string'],
  ['{"a":1}', '{"a":-1}', 'the sign'],
  ['{"a":1}', '{"a":"1"}', 'a number and a string'],
  ['{"a":null}', '{}', 'null and absent'],
  ['{"a":false}', '{"a":null}', 'false and null'],
  ['{"a":[1,2]}', '{"a":[2,1]}', 'the order of a list'],
  ['{"a":[]}', '{"a":{}}', 'an empty list and an empty object'],
  ['{"a":[["k",1]]}', '{"a":{"k":1}}', 'a list of pairs and an object'],
  ['{"__proto__":{"a":1}}', '{"__proto__":{"a":2}}', 'what stands under __proto__'],
  ['{"__proto__":{"a":1}}', '{}', '__proto__ and absent'],
  ['{"__proto__":{}}', '{"a":{}}', '__proto__ and another name'],
  ['{"a":{"number":"1e0"}}', '{"a":1}', 'an object and a number'],
  [String.raw`{"a":"\ud800"}`, String.raw`{"a":"\ud801"}`, 'lone surrogates'],
  [String.raw`{"a":"\u0000"}`, '{"a":""}', 'NUL and empty'],
]

for (const [left, right, what] of SAME) {
  test(`the same JSON: ${what}`, () => {
    assert.ok(isSameJson(left, right) && isSameJson(right, left))
  })
}
for (const [left, right, what] of DIFFERENT) {
  test(`different JSON: ${what}`, () => {
    assert.ok(!isSameJson(left, right) && !isSameJson(right, left))
  })
}

// Each in a size of about so many characters.
const LARGE: [string, (size: number) => [string, string]][] = [
  ['zeros within a number', (n) => [`1${zeros(n)}1`, `1${zeros(n)}1.0`]],
  ['zeros behind a number', (n) => [`1${zeros(n)}`, `1e${n}`]],
  ['zeros before a number', (n) => [`0.${zeros(n)}1`, `1e-${n + 1}`]],
  ['digits', (n) => [`${'1'.repeat(n)}2`, `${'1'.repeat(n)}.2e1`]],
  ['digits of an exponent', (n) => [`1e${'1'.repeat(n)}2`, `10e${'1'.repeat(n + 1)}`]],
  ['digits that carry', (n) => [`1e${'9'.repeat(n)}`, `0.1e1${zeros(n)}`]],
  ['digits that borrow', (n) => [`10e-1${zeros(n)}`, `1e-${'9'.repeat(n)}`]],
  ['zeros of an exponent', (n) => [`1e${zeros(n)}1`, '10']],
  ['numbers', (n) => lists(n / 2, '1', '1')],
  ['numbers with exponents', (n) => lists(n / 4, '1e1', '10')],
  ['numbers beyond every double', (n) => lists(n / 6, '1e999', '10e998')],
  [
    'different numbers of many digits',
    (n) => [`[${digits(n / 20)}]`, `[${digits(n / 20).map((number) => `${number}0`)}]`],
  ],
  ['strings', (n) => lists(n / 3, '""', ' ""')],
  ['lists', (n) => lists(n / 3, '[]', ' []')],
  ['objects', (n) => lists(n / 3, '{}', ' {}')],
  ['keys', (n) => objects(n, (at) => `k${at}`)],
  ['keys that are numbers', (n) => objects(n, String)],
]
const zeros = (length: number) => '0'.repeat(length)
const digits = (count: number) => Array.from({ length: Math.ceil(count) }, (_, nth) => `${nth}.1234567890123`)

function lists(length: number, left: string, right: string): [string, string] {
  return [`[${Array(Math.ceil(length)).fill(left)}]`, `[${Array(Math.ceil(length)).fill(right)}]`]
}

function objects(length: number, name: (n: number) => string): [string, string] {
  const members = Array.from({ length }, (_, n) => `"${name(n * 7)}":${n}`)
  return [`{${members}}`, `{${members.reverse()}}`]
}

for (const [what, make] of LARGE) {
  test(`64 times as many ${what} take less than 1,024 times as long: not the square of it`, () => {
    const timeOf = (size: number) => {
      const [left, right] = make(size)
      return cpuTime(() => {
        assert.ok(isSameJson(`{"a":${left}}`, `{"a":${right}}`))
        assert.ok(!isSameJson(`{"a":${left}}`, `{"a":[${right}]}`))
      })
    }
    // The first one is slow whatever it reads.
    const few = Math.min(timeOf(2000), timeOf(2000), timeOf(2000))
    const many = timeOf(128_000)
    // Where digits were gone through once for each zero, or keys for each key, it would be 4,096 times as long, and seconds.
    assert.ok(many < 1024 * Math.max(few, 1), `${few} ms for few, ${many} ms for many`)
  })
}

const shuffle = (value: unknown): unknown => {
  if (Array.isArray(value)) return value.map(shuffle)
  if (typeof value !== 'object' || value === null) return value
  return Object.fromEntries(
    Object.entries(value)
      .reverse()
      .map(([key, member]) => [key, shuffle(member)]),
  )
}

// fromEntries above cannot turn the order of keys that look like array indexes, and need not.
test('no order of keys makes a value another one', () => {
  fc.assert(
    fc.property(fc.jsonValue({ maxDepth: 4 }), (value) => {
      assert.ok(isSameJson(JSON.stringify(value), JSON.stringify(shuffle(value), null, 2)))
    }),
    { numRuns: 300 },
  )
})

test('two JSON values are the same exactly when they are deeply equal', () => {
  const small = fc.jsonValue({ maxDepth: 2, stringUnit: fc.constantFrom('a', 'b') })
  fc.assert(
    fc.property(small, small, (left, right) => {
      const equal = JSON.stringify(sorted(left)) === JSON.stringify(sorted(right))
      assert.equal(isSameJson(JSON.stringify(left), JSON.stringify(right)), equal)
    }),
    { numRuns: 1000 },
  )
})

// Numbers as their digits and exponent; two of those are equal exactly when the numbers are, for digits have no zero behind them.
const aNumber = fc
  .tuple(
    fc.constantFrom('', '-'),
    fc.stringMatching(/^[1-9]([0-9]{0,25}[1-9])?$/),
    fc.oneof(
      fc.integer({ min: -40, max: 40 }),
      fc.integer({ min: -500, max: 500 }),
      fc.bigInt(-(10n ** 40n), 10n ** 40n),
    ),
  )
  .map(([sign, digits, exponent]) => ({ sign, digits, exponent: BigInt(exponent) }))
type ANumber = { sign: string; digits: string; exponent: bigint }

/** With the decimal point moved `by` digits to the left of the last, and `more` zeros behind. */
function spell({ sign, digits, exponent }: ANumber, by: number, more: number, e: string): string {
  const padded = digits.padStart(by + 1, '0')
  const cut = padded.length - by
  const fraction = padded.slice(cut) + (by > 0 ? '0'.repeat(more) : '')
  const power = exponent + BigInt(by)
  if (fraction === '' && power >= 0n && power < 30n && e === 'E') return sign + padded + '0'.repeat(Number(power))
  return `${sign}${padded.slice(0, cut)}${fraction && '.'}${fraction}${power === 0n ? '' : `${e}${power}`}`
}

test('a number is the same however it is spelled, and no other', () => {
  const spelling = fc.tuple(fc.nat(30), fc.nat(4), fc.constantFrom('e', 'E'))
  fc.assert(
    fc.property(aNumber, spelling, spelling, fc.constantFrom(-1n, 1n), (number, one, two, step) => {
      const [left, right] = [spell(number, ...one), spell(number, ...two)]
      assert.ok(isSameJson(`[${left}]`, `[${right}]`), `${left} ${right}`)
      const last = number.digits.at(-1) === '1' ? '3' : '1'
      for (const other of [
        { ...number, sign: number.sign ? '' : '-' },
        { ...number, exponent: number.exponent + step },
        { ...number, digits: number.digits.slice(0, -1) + last },
        { ...number, digits: `${number.digits}${last}` },
      ]) {
        const different = spell(other, ...two)
        assert.ok(!isSameJson(`[${left}]`, `[${different}]`), `${left} ${different}`)
      }
    }),
    { numRuns: 2000 },
  )
})

/** The same value in another spelling: keys turned round, white space, escapes, points and exponents. */
function respell(value: unknown): string {
  if (Array.isArray(value)) return `[ ${value.map(respell).join(' ,\n')}]`
  if (typeof value === 'string') {
    const units = Array.from({ length: value.length }, (_, at) => value.charCodeAt(at).toString(16).padStart(4, '0'))
    return `"${units.map((unit) => `\\u${unit}`).join('')}"`
  }
  if (typeof value === 'number') {
    const [digits, power = '0'] = JSON.stringify(value).split('e')
    return `${digits}${digits!.includes('.') ? '000e' : '.0E'}${Number(power) < 0 ? power : `+${Number(power)}`}`
  }
  if (typeof value !== 'object' || value === null) return String(value)
  const members = Object.entries(value).map(([key, member]) => `${respell(key)} : ${respell(member)}`)
  return `\t{${members.reverse().join(',')} }`
}

test('a value is the same however it is spelled, and no other where one part of it is changed', () => {
  const anyJson = fc.jsonValue({ maxDepth: 5, stringUnit: 'binary' })
  fc.assert(
    fc.property(anyJson, fc.nat(), (value, which) => {
      const text = JSON.stringify(value)
      assert.ok(isSameJson(text, respell(value)))
      assert.ok(isSameJson(respell(value), text))
      const changed = changeOne(value, which % countParts(value))
      assert.ok(!isSameJson(text, JSON.stringify(changed)) && !isSameJson(respell(changed), text))
    }),
    { numRuns: 1000 },
  )
})

const parts = (value: unknown): unknown[] => (typeof value === 'object' && value !== null ? Object.values(value) : [])
const countParts = (value: unknown): number => parts(value).reduce<number>((sum, part) => sum + countParts(part), 1)

/** With its `nth` part, itself being the first, put into a list. */
function changeOne(value: unknown, nth: number): unknown {
  let left = nth
  return JSON.parse(JSON.stringify(change(value)))

  function change(part: unknown): unknown {
    if (left-- === 0) return [part]
    if (Array.isArray(part)) return part.map(change)
    if (typeof part !== 'object' || part === null) return part
    return Object.fromEntries(Object.entries(part).map(([key, member]) => [key, change(member)]))
  }
}

function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted)
  if (typeof value !== 'object' || value === null) return value
  const entries = Object.entries(value).map(([key, member]) => [key, sorted(member)] as const)
  return { entries: entries.sort(([a], [b]) => (a < b ? -1 : 1)) }
}
