import assert from 'node:assert/strict'
import { after, describe, test } from 'node:test'
import { gzipSync } from 'node:zlib'
import { sliceMember } from '../../src/json.ts'
import { createDatabase } from '../support/database.ts'
import { startReceiver } from '../support/receiver.ts'
import { ADMIN_KEY, createTenant, startService } from '../support/service.ts'

const database = await createDatabase({ after })
const env = { RATE_LIMIT_ENDPOINTS_WRITE: '0', MAX_ENDPOINTS: '10000' }
const service = await startService({ after }, { databaseUrl: database.url, env })
const tenant = await createTenant(service)
const receiver = await startReceiver({ after })
await tenant.createEndpoint(receiver.url())
const x = (length: number) => 'x'.repeat(length)
const nested = (depth: number) => `${'{"a":'.repeat(depth)}0${'}'.repeat(depth)}`

const publish = (body: string | Uint8Array, headers: Record<string, string> = {}) =>
  tenant.call('POST', '/v1/events', { body, headers })

function isHeaderValue(text: string): boolean {
  try {
    return new Headers({ any: text }).has('any')
  } catch {
    return false
  }
}

describe('a payload that is odd but JSON arrives as it was published, byte for byte', () => {
  const PAYLOADS: [string, string][] = [
    ['an escaped NUL', '{"a":"\\u0000","\\u0000":1}'],
    ['half a surrogate pair', '{"a":"\\ud800","\\udfff":"\\ud800x"}'],
    [
      'names that JavaScript knows',
      '{"__proto__":{"polluted":true},"constructor":{"prototype":{"polluted":true}},"toString":1}',
    ],
    ['a name twice', '{"a":1,"a":2,"b":{"c":1,"c":[]}}'],
    ['integers beyond 2^53', '{"id":12345678901234567890,"max":9223372036854775807}'],
    ['numbers beyond doubles', '{"a":1e400,"b":-1e400,"c":1e200000,"d":1e-400}'],
    ['spellings of numbers', '{"a":-0,"b":1.0,"c":1.10,"d":1E5,"e":1e+5,"f":0.1e-7}'],
    ['nothing', '{}'],
    ['white space', '{ "a" :\t1 ,\r\n "b" : [ ] , "c":{ } }'],
    ['63 levels', nested(63)],
    ['10,000 names', `{${Array.from({ length: 10_000 }, (_, index) => `"k${index}":${index}`).join()}}`],
    ['as many bytes as there may be', `{"a":"${x(262_144 - 8)}"}`],
    ['emoji, right-to-left and combining text', '{"a":"🚀👩‍👩‍👧 שלום \u202e مرحبا e\u0301 \u2028\u2029\ufeff"}'],
    ['control characters, escaped', '{"a":"\\u0001\\u001f\\u007f\\b\\f\\n\\r\\t","b":"\x7f"}'],
    ['escapes that need none', '{"\\u0061":"\\/\\u0041\\u00e9\\ud83d\\ude80"}'],
    ['text that looks like more JSON', '{"a":"}","b":"{\\"payload\\":1}","payload":{"payload":2},"event_type":"x"}'],
    [
      'text that looks like code',
      '{"a":"\'; drop table events; --","b":"#{jndi:ldap://x}","c":"<script>","d":"%00 %s %n"}',
    ],
    ['the values of literals', '{"a":null,"b":true,"c":false,"d":[null,[],{}],"":"","e":[[[[]]]]}'],
  ]
  for (const [name, payload] of PAYLOADS) {
    test(name, async () => {
      const { status, body } = await publish(`{"event_type":"odd","payload":${payload}}`)
      assert.equal(status, 202)
      const [receipt] = await receiver.until(1)
      receiver.receipts.length = 0
      assert.equal(JSON.parse(receipt?.body.toString() ?? '').id, body.event_id)
      assert.equal(sliceMember(receipt?.body.toString() ?? '', 'data'), payload)
      const read = await tenant.call('GET', `/v1/events/${body.event_id}`)
      assert.equal(sliceMember(read.text, 'payload'), payload)
    })
  }

  test('whatever surrounds it in the body', async () => {
    for (const [text, data] of [
      ['\n\t {"payload" : {"a": 1} , "event_type":"odd"}\r\n ', '{"a": 1}'],
      ['{"payload":{"a":1},"event_type":"odd","payload":{"a":2}}', '{"a":2}'],
      ['{"pay\\u006coad":{"a":3},"\\u0065vent_type":"odd"}', '{"a":3}'],
      ['{"event_type":"o\\u0064d","payload":{"a":"\\""}}', '{"a":"\\""}'],
    ] as const) {
      assert.equal((await publish(text)).status, 202, text)
      const [receipt] = await receiver.until(1)
      receiver.receipts.length = 0
      assert.equal(sliceMember(receipt?.body.toString() ?? '', 'data'), data)
    }
  })
})

describe('a body that is not what it should be is refused', () => {
  const event = (payload: string) => `{"event_type":"odd","payload":${payload}}`
  const latin1 = (text: string) => Buffer.from(text, 'latin1')
  const REFUSED: [string, string | Uint8Array, string, Record<string, string>?][] = [
    ['an array as payload', event('[]'), 'invalid request'],
    ['text as payload', event('"a"'), 'invalid request'],
    ['null as payload', event('null'), 'invalid request'],
    ['an array as body', '[]', 'invalid request'],
    ['text as body', '"a"', 'invalid request'],
    ['null as body', 'null', 'invalid request'],
    ['NaN', event('{"a":NaN}'), 'invalid JSON'],
    ['Infinity', event('{"a":-Infinity}'), 'invalid JSON'],
    ['single quotes', event("{'a':1}"), 'invalid JSON'],
    ['a comment', event('{/* a */}'), 'invalid JSON'],
    ['a comma too many', event('{"a":1,}'), 'invalid JSON'],
    ['a name without quotes', event('{a:1}'), 'invalid JSON'],
    ['a leading zero', event('{"a":01}'), 'invalid JSON'],
    ['hexadecimal', event('{"a":0x1}'), 'invalid JSON'],
    ['a control character', event('{"a":"\n"}'), 'invalid JSON'],
    ['a bare NUL', event('{"a":"\0"}'), 'invalid JSON'],
    ['more after the end', `${event('{}')}{}`, 'invalid JSON'],
    ['an end too early', event('{').slice(0, -1), 'invalid JSON'],
    ['nothing', '', 'invalid JSON'],
    ['white space', ' \n', 'invalid JSON'],
    ['a byte order mark', `\ufeff${event('{}')}`, 'invalid JSON'],
    ['invalid UTF-8', latin1(event('{"a":"\xff\xfe"}')), 'invalid JSON'],
    ['an overlong encoding', latin1(event('{"a":"\xc0\x80"}')), 'invalid JSON'],
    ['half a surrogate pair as UTF-8', latin1(event('{"a":"\xed\xa0\x80"}')), 'invalid JSON'],
    ['UTF-16', Buffer.from(event('{}'), 'utf16le'), 'invalid JSON'],
    [
      'UTF-16 that says so',
      Buffer.from(event('{}'), 'utf16le'),
      'invalid JSON',
      { 'content-type': 'application/json; charset=utf-16' },
    ],
    ['gzip', gzipSync(event('{}')), 'invalid request', { 'content-encoding': 'gzip' }],
    ['gzip that does not say so', gzipSync(event('{}')), 'invalid JSON'],
    ['a form', 'event_type=odd&payload={}', 'invalid request', { 'content-type': 'application/x-www-form-urlencoded' }],
    ['text', event('{}'), 'invalid request', { 'content-type': 'text/plain' }],
    ['no type', event('{}'), 'invalid request', { 'content-type': '' }],
    ['another JSON', event('{}'), 'invalid request', { 'content-type': 'application/json5' }],
    ['64 levels', event(nested(64)), 'invalid request'],
    ['4,600 levels', event(nested(4600)), 'invalid request'],
    ['30,000 brackets', event('['.repeat(30_000)), 'invalid request'],
    ['100,000 brackets that nothing closes', '['.repeat(100_000), 'invalid request'],
    ['a byte too many', event(`{"a":"${x(262_144 - 7)}"}`), 'payload too large'],
    ['10 MB of white space', `${' '.repeat(10_000_000)}${event('{}')}`, 'payload too large'],
  ]
  for (const [name, body, error, headers] of REFUSED) {
    test(`${name}: ${error}`, async () => {
      const answer = await publish(body, headers)
      assert.equal(answer.status, 400, answer.text)
      assert.equal(answer.body.error, error)
    })
  }

  test('nothing of it was stored or sent', () => assert.equal(receiver.receipts.length, 0))
})

describe('poison in every other place is refused, or comes back as it was', () => {
  const POISON = [
    '\0',
    'a\0b',
    '\ud800',
    '\udc00a',
    '__proto__',
    'constructor',
    'prototype',
    'toString',
    'hasOwnProperty',
    '12345678901234567890',
    '1e400',
    '-0',
    'NaN',
    'null',
    'undefined',
    'true',
    '',
    ' ',
    '\t',
    '\n',
    '\r\n',
    '\u0085',
    '\u00a0',
    '\u2028',
    '\ufeff',
    '\u200b',
    '\u202eabc',
    '🚀',
    '👩‍👩‍👧',
    'é',
    'e\u0301',
    'ß',
    'İ',
    'ﬀ',
    'שלום',
    "'",
    '"',
    "'; drop table waybill.events; --",
    '" or 1=1',
    '\\',
    '\\u0000',
    '%00',
    '%ff%zz',
    '%2e%2e%2f',
    '../..',
    '..\\',
    '/etc/passwd',
    '#{7*7}',
    '{{7*7}}',
    '%{jndi:ldap://x}',
    '$(id)',
    '`id`',
    '<script>alert(1)</script>',
    '*',
    '?',
    '#',
    '&a=b',
    ';',
    '|',
    'a'.repeat(300),
    '{01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10}',
    '01932D6F-9A3C-7C41-8A52-6F1D0E6A9B10',
    '01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10\0',
    'infinity',
    '-infinity',
    'epoch',
    '0000-00-00',
    '+300000-01-01T00:00:00Z',
    '0x10',
    '-1',
    '1e3',
    '99999999999999999999',
  ]
  const PLACES: [
    string,
    (poison: string) => ReturnType<typeof tenant.call>,
    ((body: Record<string, unknown>) => unknown)?,
  ][] = [
    ['event_type', (poison) => tenant.call('POST', '/v1/events', { body: { event_type: poison, payload: {} } })],
    [
      'a field’s name',
      (poison) => tenant.call('POST', '/v1/events', { body: { event_type: 'a', payload: {}, [poison]: 1 } }),
    ],
    [
      'description',
      (poison) =>
        tenant.call('POST', '/v1/endpoints', {
          body: { url: 'http://127.0.0.1:9/', subscribed_events: ['x'], description: poison },
        }),
      (body) => body.description,
    ],
    [
      'subscribed_events',
      (poison) =>
        tenant.call('POST', '/v1/endpoints', {
          body: { url: 'http://127.0.0.1:9/', subscribed_events: [poison, 'x'] },
        }),
      (body) => (body.subscribed_events as string[])[0],
    ],
    [
      'url',
      (poison) =>
        tenant.call('POST', '/v1/endpoints', {
          body: { url: `http://127.0.0.1:9/${poison}`, subscribed_events: ['x'] },
        }),
      (body) => String(body.url).slice('http://127.0.0.1:9/'.length),
    ],
    [
      'tenant_id',
      (poison) =>
        service.call('POST', '/v1/admin/api-keys', { key: ADMIN_KEY, body: { tenant_id: poison, name: 'n' } }),
    ],
    [
      'tenant_slug',
      (poison) =>
        service.call('POST', '/v1/admin/tenants', { key: ADMIN_KEY, body: { tenant_id: 'P', tenant_slug: poison } }),
      (body) => body.tenant_slug,
    ],
    [
      'name',
      (poison) =>
        service.call('POST', '/v1/admin/api-keys', {
          key: ADMIN_KEY,
          body: { tenant_id: tenant.tenantId, name: poison },
        }),
      (body) => body.name,
    ],
    ['an event’s id', (poison) => tenant.call('GET', `/v1/events/${encodeURIComponent(poison.toWellFormed())}`)],
    [
      'a delivery’s id',
      (poison) => tenant.call('POST', `/v1/deliveries/${encodeURIComponent(poison.toWellFormed())}/replay`),
    ],
    ...['status', 'endpoint_id', 'event_type', 'since', 'until', 'limit', 'offset', 'cursor'].map(
      (name): [string, (poison: string) => ReturnType<typeof tenant.call>] => [
        `the parameter ${name}`,
        (poison) => tenant.call('GET', `/v1/deliveries?${name}=${encodeURIComponent(poison.toWellFormed())}`),
      ],
    ),
    [
      'a parameter’s name',
      (poison) => tenant.call('GET', `/v1/deliveries?${encodeURIComponent(poison.toWellFormed())}=1`),
    ],
  ]
  for (const [place, ask, read] of PLACES) {
    test(place, async () => {
      for (const poison of POISON) {
        const answer = await ask(poison)
        const about = `${JSON.stringify(poison)}: ${answer.text}`
        if (answer.status < 300) {
          if (read) assert.equal(read(answer.body), poison, about)
        } else assert.ok([400, 404, 409].includes(answer.status), about)
      }
    })
  }

  test('Idempotency-Key', async () => {
    for (const poison of POISON.filter(isHeaderValue)) {
      const { status, body, text } = await publish('{"event_type":"a","payload":{}}', { 'idempotency-key': poison })
      if (status === 202) assert.equal(body.idempotency_key, poison)
      else assert.equal(status, 400, `${JSON.stringify(poison)}: ${text}`)
    }
  })

  test('none of it was a fault of ours, and no prototype was polluted', async () => {
    const errors = service.logs.filter((line) => line.level === 'error' && line.msg !== 'delivery.attempted')
    assert.deepEqual(errors, [])
    const { body } = await tenant.call('GET', '/v1/usage/limits')
    assert.equal(body.polluted, undefined)
  })
})
