import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { isSameJson, isTooDeep, MAX_DEPTH, sliceMember } from '../src/json.ts'

const nested = (depth: number) => '['.repeat(depth) + ']'.repeat(depth)
const body = (payload: string) => `{"event_type":"a.b","payload":${payload}}`

test('a member is cut out as it was written', () => {
  for (const payload of [
    '{}',
    '{"z":1,"a":1.0,"big":12345678901234567890,"e":1E+2,"minus":-0.0}',
    '{ "spaced" : [ 1 ,\n 2 ] }',
    String.raw`{"nul":"\u0000","lone":"\ud800","slash":"\/","quote":"\"}{,","back":"\\"}`,
    '{"a":1,"a":2}',
    '{"__proto__":{"x":1},"constructor":null}',
    '{"payload":{"payload":1}}',
    '{"emoji":"😀","line":"\u2028"}',
  ]) {
    assert.equal(sliceMember(body(payload), 'payload'), payload)
  }
})

test('a member is found wherever it stands and however its name is spelled', () => {
  assert.equal(sliceMember('{"payload":{"a":1},"event_type":"a"}', 'payload'), '{"a":1}')
  assert.equal(sliceMember(' \n{ "payload" : {"a":1} } ', 'payload'), '{"a":1}')
  assert.equal(sliceMember(String.raw`{"p\u0061yload":{"a":1}}`, 'payload'), '{"a":1}')
})

test('the last of duplicate members counts, as in JSON.parse', () => {
  assert.equal(sliceMember('{"payload":{"a":1},"payload":{"a":2}}', 'payload'), '{"a":2}')
  assert.equal(sliceMember(String.raw`{"payload":{"a":1},"payl\u006fad":{"a":2}}`, 'payload'), '{"a":2}')
})

test('a member that is not there is not found', () => {
  assert.equal(sliceMember('{}', 'payload'), undefined)
  assert.equal(sliceMember('{"a":{"payload":1},"b":"\\"payload\\":2"}', 'payload'), undefined)
})

// Serialised with random white space between the tokens, so that cutting has to find the value's ends itself.
const spacedJson = fc.tuple(fc.json({ maxDepth: 4 }), fc.constantFrom('', ' ', '\n', '\t  ')).map(([json, space]) => {
  const tokens = json.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) ?? []
  return tokens.join(space)
})

test('whatever stands around it, the value that is cut out is the one that JSON.parse sees', () => {
  fc.assert(
    fc.property(fc.array(fc.tuple(fc.string({ unit: 'binary' }), spacedJson)), spacedJson, (others, payload) => {
      const members = [...others, ['payload', payload] as const].map(([key, text]) => `${JSON.stringify(key)}:${text}`)
      assert.equal(sliceMember(`{${members.join(' , ')}}`, 'payload'), payload)
    }),
    { numRuns: 300 },
  )
})

test(`${MAX_DEPTH} levels are deep enough, one more is too deep`, () => {
  assert.equal(isTooDeep(nested(MAX_DEPTH)), false)
  assert.equal(isTooDeep(nested(MAX_DEPTH + 1)), true)
  assert.equal(isTooDeep('{"a":'.repeat(MAX_DEPTH + 1)), true)
})

test('depth is counted without recursion, whatever the text is', () => {
  assert.equal(isTooDeep('['.repeat(1_000_000)), true)
  assert.equal(isTooDeep(nested(1).repeat(100_000)), false)
  fc.assert(fc.property(fc.string({ unit: 'binary' }), (text) => typeof isTooDeep(text) === 'boolean'))
})

test('brackets in strings are text, also behind escaped quotes', () => {
  assert.equal(isTooDeep(JSON.stringify({ a: '['.repeat(100), b: `\\"${'{'.repeat(100)}` })), false)
})

const SAME: [string, string, string][] = [
  ['{"a":1,"b":2}', '{"b":2,"a":1}', 'key order'],
  ['{"a":{"x":1,"y":[{"p":1,"q":2}]}}', '{"a":{"y":[{"q":2,"p":1}],"x":1}}', 'key order, at depth'],
  ['{"a":1}', ' { "a" : 1 } ', 'white space'],
  ['{"a":1}', '{"a":1.0}', '1 and 1.0'],
  ['{"a":100}', '{"a":1e2}', '100 and 1e2'],
  ['{"a":0.001}', '{"a":1E-3}', '0.001 and 1E-3'],
  ['{"a":0}', '{"a":-0.0e5}', 'zero has no sign'],
  ['{"a":10000000000000000000000}', '{"a":1e22}', 'large integers and exponents'],
  ['{"a":"é/"}', String.raw`{"\u0061":"\u00e9\/"}`, 'escapes'],
  ['{"a":1,"a":2}', '{"a":2}', 'the last of duplicate keys'],
]

const DIFFERENT: [string, string, string][] = [
  ['{"a":9007199254740993}', '{"a":9007199254740992}', 'integers beyond 2^53'],
  ['{"a":12345678901234567890}', '{"a":12345678901234567891}', '64-bit integers'],
  ['{"a":0.1}', '{"a":0.10000000000000000001}', 'digits beyond a double'],
  ['{"a":1e400}', '{"a":1e401}', 'numbers beyond every double'],
  ['{"a":1}', '{"a":-1}', 'the sign'],
  ['{"a":1}', '{"a":"1"}', 'a number and a string'],
  ['{"a":null}', '{}', 'null and absent'],
  ['{"a":false}', '{"a":null}', 'false and null'],
  ['{"a":[1,2]}', '{"a":[2,1]}', 'the order of a list'],
  ['{"a":[]}', '{"a":{}}', 'an empty list and an empty object'],
  ['{"a":[["k",1]]}', '{"a":{"k":1}}', 'a list of pairs and an object'],
  ['{"__proto__":{"a":1}}', '{"__proto__":{"a":2}}', 'what stands under __proto__'],
  ['{"__proto__":{"a":1}}', '{}', '__proto__ and absent'],
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

function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted)
  if (typeof value !== 'object' || value === null) return value
  const entries = Object.entries(value).map(([key, member]) => [key, sorted(member)] as const)
  return { entries: entries.sort(([a], [b]) => (a < b ? -1 : 1)) }
}
