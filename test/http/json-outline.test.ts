import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { MAX_DEPTH, NotJson, outline, TooDeep } from '../../src/http/json-outline.ts'
import { cpuTime } from '../support/cpu.ts'
import { memberOf } from '../support/json.ts'

const nested = (depth: number) => '['.repeat(depth) + ']'.repeat(depth)
const isObject = (value: unknown) => typeof value === 'object' && value !== null

test('what is inside the values of the outermost object or list is left out, and nothing else', () => {
  for (const [text, left] of [
    ['{"a":{"b":{"c":1}},"d":[1,[2]],"e":"{[","f":1.50}', '{"a":{},"d":[],"e":"{[","f":1.50}'],
    [' {"a" : { } , "a":{ "x" : [ ] } } ', ' {"a" : {} , "a":{} } '],
    ['[[1],{"a":1},2]', '[[],{},2]'],
    ['{}', '{}'],
    ['"a"', '"a"'],
    [' null ', ' null '],
    ['{"a":"\\"}{","b":{"\\u007d":"\\\\"}}', '{"a":"\\"}{","b":{}}'],
  ] as const) {
    assert.equal(outline(text), left)
  }
})

const body = (payload: string) => `{"event_type":"a.b","payload":${payload}}`

test('a member that is left out is told of as it was written', () => {
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
    assert.equal(memberOf(body(payload), 'payload'), payload)
  }
})

test('a member is found wherever it stands and however its name is spelled', () => {
  assert.equal(memberOf('{"payload":{"a":1},"event_type":"a"}', 'payload'), '{"a":1}')
  assert.equal(memberOf(' \n{ "payload" : {"a":1} } ', 'payload'), '{"a":1}')
  assert.equal(memberOf(String.raw`{"p\u0061yload":{"a":1}}`, 'payload'), '{"a":1}')
})

test('of duplicate members the last is told of last', () => {
  assert.equal(memberOf('{"payload":{"a":1},"payload":{"a":2}}', 'payload'), '{"a":2}')
  assert.equal(memberOf(String.raw`{"payload":{"a":1},"payl\u006fad":{"a":2}}`, 'payload'), '{"a":2}')
})

test('a member that is not there is not found', () => {
  assert.equal(memberOf('{}', 'payload'), undefined)
  assert.equal(memberOf('{"a":{"payload":{"a":1}},"b":[{"payload":{"a":1}}]}', 'payload'), undefined)
  assert.equal(memberOf('[{"payload":{"a":1}}]', 'payload'), undefined)
  assert.equal(memberOf('{"a":{"payload":1},"b":"\\"payload\\":2"}', 'payload'), undefined)
})

// Serialised with random white space between the tokens, so that cutting has to find the value's ends itself.
const spacedJson = fc.tuple(fc.json({ maxDepth: 4 }), fc.constantFrom('', ' ', '\n', '\t  ')).map(([json, space]) => {
  const tokens = json.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) ?? []
  return tokens.join(space)
})

test('whatever stands around it, the value that is cut out is the one that JSON.parse sees', () => {
  fc.assert(
    fc.property(fc.array(fc.tuple(fc.string({ unit: 'binary' }), spacedJson)), spacedJson, (others, part) => {
      const payload = `[${part}]`
      const members = [...others, ['payload', payload] as const].map(([key, text]) => `${JSON.stringify(key)}:${text}`)
      assert.equal(memberOf(`{${members.join(' , ')}}`, 'payload'), payload)
    }),
    { numRuns: 300 },
  )
})

test(`${MAX_DEPTH} levels are deep enough, one more is too deep, whatever follows`, () => {
  assert.equal(outline(nested(MAX_DEPTH)), '[[]]')
  assert.throws(() => outline(nested(MAX_DEPTH + 1)), TooDeep)
  assert.throws(() => outline('{"a":'.repeat(MAX_DEPTH + 1)), TooDeep)
  assert.throws(() => outline('['.repeat(1_000_000)), TooDeep)
  assert.equal(outline(`[${nested(1).repeat(100_000).replaceAll('][', '],[')}]`).length, 300_001)
})

test('brackets in strings are text, also behind escaped quotes', () => {
  outline(JSON.stringify({ a: '['.repeat(100), b: `\\"${'{'.repeat(100)}` }))
})

test('what is wrong is named so that it can be seen', () => {
  for (const [text, message] of [
    ['\ufeff{}', 'Unexpected "\\ufeff" at position 0'],
    ['{\u00a0"a":1}', 'Unexpected "\\u00a0" at position 1'],
    ['{\u200b}', 'Unexpected "\\u200b" at position 1'],
    ['{“a”:1}', 'Unexpected "“" at position 1'],
    ['{"a":1,}', 'Unexpected "}" at position 7'],
  ] as const) {
    assert.throws(() => outline(text), { message })
  }
})

/** Fails unless `outline` says of a text what JSON.parse does. */
function assertAgreement(text: string): void {
  let value: unknown
  let isJson = true
  try {
    value = JSON.parse(text)
  } catch {
    isJson = false
  }
  if (!isJson) {
    assert.throws(() => outline(text), NotJson, JSON.stringify(text))
    return
  }
  const emptied = (part: unknown) => (Array.isArray(part) ? [] : isObject(part) ? {} : part)
  const expected = Array.isArray(value)
    ? value.map(emptied)
    : isObject(value)
      ? Object.fromEntries(Object.entries(value as object).map(([key, part]) => [key, emptied(part)]))
      : value
  assert.deepEqual(JSON.parse(outline(text)), expected)
}

test('every character up to the space is judged as JSON.parse judges it, in a string and outside', () => {
  for (let code = 0; code <= 32; code++)
    for (const around of ['{"a":"b?"}', '{"a?":1}', '{"a":"\\?"}', '{"a":?1}', '[1?]'])
      assertAgreement(around.replace('?', String.fromCharCode(code)))
})

test('a text is JSON exactly if it is for JSON.parse, and its outline has the same members', () => {
  const space = fc.constantFrom('', ' ', '\n', '\t  ', '\r')
  const spaced = fc.tuple(fc.json({ maxDepth: 5, stringUnit: 'binary' }), space).map(([json, between]) => {
    const tokens = json.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) ?? []
    return tokens.join(between)
  })
  fc.assert(fc.property(spaced, assertAgreement), { numRuns: 2000 })
})

test('a text that was JSON before something in it was changed is judged as JSON.parse judges it', () => {
  const scraps = [
    '{',
    '}',
    '[',
    ']',
    ',',
    ':',
    '"',
    '\\',
    '\\u00',
    '\\ud800',
    '\\x',
    '0',
    '-',
    '.',
    'e',
    'E+',
    '01',
    '1.',
    'tru',
    'null',
  ]
  const scrap = fc.oneof(
    fc.constantFrom(...scraps, ' ', '\n', '\u0000', '\u000b', '\u00a0', '\ufeff', '\u2028'),
    fc.string({ unit: 'binary', maxLength: 2 }),
  )
  fc.assert(
    fc.property(fc.json({ maxDepth: 3 }), fc.nat(), fc.nat(2), scrap, (json, where, dropped, put) => {
      const at = where % (json.length + 1)
      assertAgreement(json.slice(0, at) + put + json.slice(at + dropped))
    }),
    { numRuns: 5000 },
  )
})

const many = (part: (nth: number) => string) => {
  const parts: string[] = []
  for (let length = 0; length < 256_000; length += (parts.at(-1)?.length ?? 0) + 1) parts.push(part(parts.length))
  return parts.join()
}
let used = 0

for (const [what, make] of [
  ['objects with ever new keys', () => `[${many(() => `{"z${used++}":0}`)}]`],
  ['different keys', () => `{${many(() => `"k${used++}":0`)}}`],
  ['different strings', () => `[${many(() => `"s${used++}"`)}]`],
  ['empty lists', () => `[${many(() => '[]')}]`],
  ['numbers', () => `[${many(() => '0')}]`],
] as const) {
  test(`256 KiB of ${what} take less than thirty times as long as as much text`, () => {
    const of = (value: string) => cpuTime(() => outline(`{"event_type":"a","payload":{"a":${value}}}`), 5)
    of(make())
    const text = of(`"${'x'.repeat(256_000)}"`)
    const took = of(make())
    // JSON.parse takes 100 to 600 times as long as for text.
    assert.ok(took < 30 * Math.max(text, 0.5), `${took} ms, ${text} ms for text`)
  })
}
