import assert from 'node:assert/strict'
import { after, describe, test } from 'node:test'
import { createDatabase } from '../support/database.ts'
import { ADMIN_KEY, createTenant, type Reply, startService } from '../support/service.ts'

const database = await createDatabase({ after })
const service = await startService(
  { after },
  {
    databaseUrl: database.url,
    mode: 'api',
    env: { MAX_PAYLOAD_BYTES: '1000', MAX_ENDPOINTS: '1000', RATE_LIMIT_ENDPOINTS_WRITE: '0' },
  },
)
const tenant = await createTenant(service, { tenant_id: 'T', tenant_slug: 'taken' })
const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
const { delivery_ids, event_id } = await tenant.publish()
const URL_2048 = `http://127.0.0.1:9/${'x'.repeat(2048 - 'http://127.0.0.1:9/'.length)}`

const call = (
  key: string | undefined,
  method: string,
  path: string,
  body?: unknown,
  headers?: Record<string, string>,
) =>
  service.call(method, path, {
    ...(key !== undefined && { key }),
    ...(body !== undefined && { body }),
    ...(headers && { headers }),
  })

const ROUTES: Record<string, (fields: object) => Promise<Reply>> = {
  event: (fields) => call(tenant.key, 'POST', '/v1/events', { event_type: 'a', payload: {}, ...fields }),
  endpoint: (fields) =>
    call(tenant.key, 'POST', '/v1/endpoints', { url: 'http://127.0.0.1:9/', subscribed_events: ['*'], ...fields }),
  patch: (fields) => call(tenant.key, 'PATCH', `/v1/endpoints/${endpoint_id}`, { description: 'd', ...fields }),
  tenant: (fields) => call(ADMIN_KEY, 'POST', '/v1/admin/tenants', { tenant_id: 'b', tenant_slug: 'b', ...fields }),
  key: (fields) => call(ADMIN_KEY, 'POST', '/v1/admin/api-keys', { tenant_id: 'T', name: 'n', ...fields }),
  retention: (fields) => call(ADMIN_KEY, 'POST', '/v1/admin/retention/run', { apply: false, ...fields }),
}

const x = (length: number) => 'x'.repeat(length)
const list = (length: number) => Array.from({ length }, (_, index) => `e${index}`)

/** For each field: values that are just within its bounds, and values just beyond. */
const FIELDS: [route: string, field: string, good: unknown[], bad: unknown[]][] = [
  [
    'event',
    'event_type',
    ['a', x(128), 'a.b.c', 'A-Z_0-9.x', '-', '_'],
    [undefined, null, 1, '', x(129), '.', 'a.', '.a', 'a..b', 'a b', 'é', 'a\n', 'a\0', '*', ['a']],
  ],
  ['event', 'payload', [{}, { a: null }], [undefined, null, [], 'text', 1, true]],
  ['event', 'unknown', [], [1, null]],
  ['event', 'tenant_id', [], ['b']],
  [
    'endpoint',
    'url',
    [URL_2048, 'HTTP://127.0.0.1:9/', 'https://example.com'],
    [undefined, null, 1, '', `${URL_2048}x`, ['http://127.0.0.1:9/']],
  ],
  [
    'endpoint',
    'description',
    [undefined, null, '', x(500), '🚀'.repeat(500)],
    [1, x(501), '🚀'.repeat(501), [], {}, 'a\0', '\ud800'],
  ],
  [
    'endpoint',
    'subscribed_events',
    [['*'], list(100), ['*', 'a'], ['a', 'a'], [x(128)]],
    [undefined, null, '*', [], list(101), [''], [x(129)], ['a.*'], ['**'], [1], [null], ['a b']],
  ],
  ['endpoint', 'max_per_second', [undefined, null, 1, 10_000], [0, -1, 10_001, 1.5, '1', true]],
  ['endpoint', 'ordered', [undefined, true, false], [null, 1, 'true']],
  ['endpoint', 'is_active', [], [true]],
  ['endpoint', 'signing_secret', [], ['whsec_x']],
  ['patch', 'url', [URL_2048], [null, 1, '', `${URL_2048}x`]],
  ['patch', 'description', [null, '', x(500)], [1, x(501)]],
  ['patch', 'subscribed_events', [['*'], list(100)], [null, '*', [], list(101), ['']]],
  ['patch', 'is_active', [true, false], [null, 'true', 1, 0]],
  ['patch', 'max_per_second', [null, 1, 10_000], [0, 10_001]],
  ['patch', 'ordered', [true, false], [null, 1]],
  ['patch', 'state', [], ['active']],
  ['patch', 'endpoint_id', [], [endpoint_id]],
  ['patch', 'tenant_id', [], ['b']],
  [
    'tenant',
    'tenant_id',
    ['b', 'B', x(64), '0', 'a._-9'],
    [undefined, null, 1, '', x(65), '_a', '.a', '-a', 'a b', 'é', 'a/b'],
  ],
  [
    'tenant',
    'tenant_slug',
    ['b', x(64), 'a-b', '0'],
    [undefined, null, 1, '', x(65), 'A', 'a--b', '-a', 'a-', 'a_b', 'é', 'a.b'],
  ],
  ['tenant', 'limits', [undefined, {}], [null, 1, [], { max_things: 1 }]],
  ['tenant', 'plan', [], ['free']],
  ['key', 'tenant_id', ['T'], [undefined, null, '', x(65)]],
  ['key', 'name', ['n', x(100), '🚀'], [undefined, null, 1, '', x(101)]],
  ['key', 'api_key', [], ['wb_live_x']],
  ['retention', 'apply', [false], [undefined, null, 'false', 0]],
  ['retention', 'days', [], [1]],
]

describe('each field, just within its bounds and just beyond', () => {
  for (const [route, field, good, bad] of FIELDS) {
    test(`${route} ${field}`, async () => {
      for (const value of good) {
        const { status, text } = await ROUTES[route]!({ [field]: value })
        // The slug of another tenant is a conflict, and its id an update: both are within bounds.
        assert.ok(status < 300 || status === 409, `${JSON.stringify(value)}: ${text}`)
      }
      for (const value of bad) {
        const { status, body } = await ROUTES[route]!({ [field]: value })
        assert.equal(status, 400, JSON.stringify(value))
        const isUrlRule = body.error === 'invalid url' && field === 'url'
        if (isUrlRule) continue
        assert.equal(body.error, 'invalid request')
        for (const { path, message } of body.details) {
          assert.equal(path.split('.')[0], field, message)
          assert.ok(message.length > 0)
        }
      }
    })
  }

  const LIMITS: [string, number[], unknown[]][] = [
    ['monthly_events', [0, Number.MAX_SAFE_INTEGER], [-1, 2 ** 53, 0.5, '1', null]],
    ['monthly_attempts', [0, Number.MAX_SAFE_INTEGER], [-1, 2 ** 53]],
    ['max_endpoints', [0, 100_000], [-1, 100_001]],
    ['max_fanout_endpoints', [0, 10_000], [-1, 10_001]],
    ['max_payload_bytes', [2, 16_777_216], [1, 16_777_217]],
    ['events_write_rate', [0, 1_000_000_000], [-1, 1_000_000_001]],
  ]
  for (const [name, good, bad] of LIMITS) {
    test(`tenant limits.${name}`, async () => {
      for (const value of good) {
        const { status, body } = await ROUTES.tenant!({ limits: { [name]: value } })
        assert.equal(status, 200)
        assert.deepEqual(body.limits, { [name]: value })
      }
      for (const value of bad) {
        const { status, body } = await ROUTES.tenant!({ limits: { [name]: value } })
        assert.equal(status, 400, String(value))
        assert.equal(body.details[0].path, `limits.${name}`)
      }
    })
  }

  test('a limit beyond what a number can hold is told its bound', async () => {
    const { body } = await ROUTES.tenant!({ limits: { monthly_events: 2 ** 53 } })
    const messages = body.details.map(({ message }: { message: string }) => message)
    assert.ok(messages.includes('must be at most 9007199254740991'), messages.join())
  })

  test('an unknown field is refused by name, whatever its name', async () => {
    for (const [name, ask] of Object.entries({ event: '/v1/events', endpoint: '/v1/endpoints' })) {
      for (const field of ['__proto__', 'constructor', 'toString', '', 'Payload']) {
        const known =
          name === 'event' ? '"event_type":"a","payload":{}' : '"url":"http://127.0.0.1:9/","subscribed_events":["*"]'
        const { status, body } = await call(tenant.key, 'POST', ask, `{${known},${JSON.stringify(field)}:{}}`)
        assert.equal(status, 400, field)
        assert.deepEqual(body.details, [{ path: field, message: 'is not a known field' }])
      }
    }
  })

  test('of thousands of mistakes the first twenty are told', async () => {
    const fields = Array.from({ length: 2000 }, (_, n) => `"${n}":1`).join()
    const { status, body } = await call(tenant.key, 'POST', '/v1/events', `{"event_type":"a","payload":{},${fields}}`)
    assert.equal(status, 400)
    assert.equal(body.details.length, 20)
    assert.deepEqual(body.details[0], { path: '0', message: 'is not a known field' })
  })

  test('a content type and an encoding', async () => {
    const publish = (headers: Record<string, string>) =>
      call(tenant.key, 'POST', '/v1/events', { event_type: 'a', payload: {} }, headers)
    for (const parameters of ['', ';', '; charset=utf-8', ';CHARSET="UTF-8"', '; a=b']) {
      assert.equal((await publish({ 'content-type': `Application/JSON${parameters}` })).status, 202, parameters)
    }
    for (const encoding of ['Identity', '']) {
      assert.equal((await publish({ 'content-encoding': encoding })).status, 202, encoding)
    }
    for (const type of ['', 'text/json', 'application/jsonp', ';application/json']) {
      const { status, body } = await publish({ 'content-type': type })
      assert.equal(status, 400, type)
      assert.deepEqual(body.details, [{ path: 'content-type', message: 'must be application/json' }])
    }
    for (const encoding of ['gzip', 'br', 'identity, gzip']) {
      const { status, body } = await publish({ 'content-encoding': encoding })
      assert.equal(status, 400, encoding)
      assert.equal(body.details[0].path, 'content-encoding')
    }
  })

  test('as many endpoints as a tenant may have, active or not', async () => {
    const own = await createTenant(service, { limits: { max_endpoints: 2 } })
    const first = await own.createEndpoint('http://127.0.0.1:9/')
    await own.call('PATCH', `/v1/endpoints/${first.endpoint_id}`, { body: { is_active: false } })
    await own.createEndpoint('http://127.0.0.1:9/')
    const third = { url: 'http://127.0.0.1:9/', subscribed_events: ['*'] }
    const { status, body } = await own.call('POST', '/v1/endpoints', { body: third })
    assert.equal(status, 429)
    assert.deepEqual(body.details, { limit: 2, current: 2 })
  })

  test('an event type that is named twice is subscribed to once', async () => {
    const { body } = await ROUTES.endpoint!({ subscribed_events: ['a', 'b', 'a'] })
    assert.deepEqual(body.subscribed_events, ['a', 'b'])
  })

  test('an idempotency key', async () => {
    const publish = (key: string) =>
      call(tenant.key, 'POST', '/v1/events', { event_type: 'a', payload: {} }, { 'idempotency-key': key })
    for (const key of ['a', x(255), '!~', '"', "'; drop table x; --".replaceAll(' ', '_')]) {
      const { status, body } = await publish(key)
      assert.equal(status, 202)
      assert.equal(body.idempotency_key, key)
    }
    const stored = async () => (await database.sql`select from waybill.events`).length
    const before = await stored()
    for (const key of ['', x(256), 'a b', 'é', 'a\tb']) {
      const { status, body } = await publish(key)
      assert.equal(status, 400, key)
      assert.deepEqual(body.details, [
        { path: 'idempotency-key', message: 'must be 1 to 255 visible ASCII characters' },
      ])
    }
    assert.equal(await stored(), before)
  })

  test('a payload, counted in bytes as it was written', async () => {
    const publish = (payload: string) =>
      call(tenant.key, 'POST', '/v1/events', `{"event_type":"a","payload":${payload}}`)
    const ofBytes = (bytes: number) => `{"a":"${x(bytes - 8)}"}`
    assert.equal((await publish(ofBytes(1000))).status, 202)
    assert.equal((await publish(`{"é":"${x(1000 - 9)}"}`)).status, 202)
    const { status, body } = await publish(ofBytes(1001))
    assert.equal(status, 400)
    assert.deepEqual(body, {
      ok: false,
      error: 'payload too large',
      details: { limit_bytes: 1000, actual_bytes: 1001 },
    })
    assert.equal((await publish(`{"é":"${x(1000 - 8)}"}`)).body.details.actual_bytes, 1001)
    // White space around the payload is not part of it.
    assert.equal((await publish(`${' '.repeat(2000)}${ofBytes(1000)}${'\n'.repeat(2000)}`)).status, 202)
  })

  test('a body without a payload, as a whole', async () => {
    const patch = (bytes: number) =>
      call(tenant.key, 'PATCH', `/v1/endpoints/${endpoint_id}`, '{"description":"d"}'.padEnd(bytes))
    assert.equal((await patch(65_536)).status, 200)
    const { status, body } = await patch(65_537)
    assert.equal(status, 400)
    const details = { limit_bytes: 65_536, actual_bytes: 65_537 }
    assert.deepEqual(body, { ok: false, error: 'payload too large', details })
  })

  test('nesting, 64 deep and no deeper', async () => {
    // The body itself is one level.
    const deep = (depth: number, open = '[', close = ']') =>
      `{"event_type":"a","payload":{"a":${open.repeat(depth)}${open === '[' ? '' : '0'}${close.repeat(depth)}}}`
    assert.equal((await call(tenant.key, 'POST', '/v1/events', deep(62))).status, 202)
    assert.equal((await call(tenant.key, 'POST', '/v1/events', deep(62, '{"a":', '}'))).status, 202)
    for (const body of [deep(63), deep(63, '{"a":', '}'), deep(5000)]) {
      const answer = await call(tenant.key, 'POST', '/v1/events', body)
      assert.equal(answer.status, 400)
      assert.deepEqual(answer.body.details, [{ path: '', message: 'must not nest deeper than 64' }])
    }
  })
})

describe('each parameter, just within its bounds and just beyond', () => {
  const PAGED = ['/v1/deliveries', '/v1/dlq', '/v1/endpoints']
  PAGED.push(`/v1/deliveries/${delivery_ids[0]}/attempts`, `/v1/events/${event_id}/deliveries`)
  const moment = '2026-11-20T09:30:00'
  const uuid = '01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10'
  const cursor = (text: string) => Buffer.from(text).toString('base64url')
  const NUMBERS = [
    '',
    '-1',
    '+1',
    '1.0',
    '1e3',
    '0x10',
    '%201',
    '1%20',
    'a',
    'null',
    'NaN',
    'Infinity',
    '99999999999999999999',
    '%00',
    '٣',
  ]
  const PARAMETERS: [string[], string, string[], string[]][] = [
    [PAGED, 'limit', ['1', '250', '001'], ['0', '251', ...NUMBERS]],
    [PAGED, 'offset', ['0', '10000'], ['10001', ...NUMBERS]],
    [
      PAGED.slice(0, 3),
      'cursor',
      [cursor(uuid)],
      ['', 'x', cursor('1'), cursor(`${uuid} `), cursor(uuid.toUpperCase()), x(65), '%00'],
    ],
    [PAGED.slice(3, 4), 'cursor', [cursor('1')], ['', cursor(uuid), cursor('-1'), cursor('1234567890')]],
    [['/v1/endpoints'], 'active_only', ['true', 'false'], ['', '1', 'TRUE', 'yes', 'null']],
    [
      ['/v1/deliveries'],
      'status',
      ['pending', 'retrying', 'delivered', 'dead_lettered'],
      ['', 'PENDING', 'failed', 'pending,delivered'],
    ],
    [['/v1/dlq'], 'status', [], ['dead_lettered']],
    [
      PAGED.slice(0, 2),
      'endpoint_id',
      [uuid, uuid.toUpperCase()],
      ['', 'x', `{${uuid}}`, uuid.replaceAll('-', ''), `${uuid}%00`, '*'],
    ],
    [PAGED.slice(0, 2), 'event_type', ['a', x(128)], ['', '*', x(129), 'a b', '%ff%zz', 'a%00']],
    ...['since', 'until'].map((name): [string[], string, string[], string[]] => [
      PAGED.slice(0, 2),
      name,
      [
        `${moment}Z`,
        `${moment}.123Z`,
        `${moment}%2B02:00`,
        `${moment}.123456-11:30`,
        `${moment}%2B0200`,
        `${moment}%2B02`,
        `${moment},123456789-11:30`,
        `${moment.slice(0, -3)}Z`,
        `${moment.slice(0, -6)}-02`,
        '1970-01-01T00:00:00Z',
        '1969-12-31T23:59:59Z',
        '0001-01-01T00:00:00Z',
        '9999-12-31T23:59:59Z',
      ],
      [
        '',
        moment,
        `${moment},Z`,
        `${moment}%2B2`,
        '2026-11-20',
        'infinity',
        '-infinity',
        'now',
        '0000-00-00T00:00:00Z',
        '2026-02-30T00:00:00Z',
        '2026-13-01T00:00:00Z',
        '%2B300000-01-01T00:00:00Z',
        '1763630000',
        `${moment}Z%00`,
      ],
    ]),
    [PAGED, 'unknown', [], ['1', '']],
    [PAGED, '__proto__', [], ['1']],
    [PAGED, 'constructor', [], ['1']],
  ]
  for (const [paths, name, good, bad] of PARAMETERS) {
    test(`${name} of ${paths.length === 1 ? paths[0] : `${paths.length} lists`}`, async () => {
      for (const path of paths) {
        for (const value of good) {
          const { status, text } = await tenant.call('GET', `${path}?${name}=${value}`)
          assert.equal(status, 200, `${path} ${value} ${text}`)
        }
        for (const value of [...bad, ...good.map((one) => `${one}&${name}=${one}`)]) {
          const { status, body } = await tenant.call('GET', `${path}?${name}=${value}`)
          assert.equal(status, 400, `${path} ${value}`)
          assert.equal(body.error, 'invalid request')
          assert.equal(body.details[0].path, name)
        }
      }
    })
  }

  test('since must be before until', async () => {
    const ask = (since: string, until: string) => tenant.call('GET', `/v1/deliveries?since=${since}&until=${until}`)
    assert.equal((await ask(`${moment}.000Z`, `${moment}.001Z`)).status, 200)
    for (const until of [`${moment}Z`, `${moment}%2B01:00`]) {
      const { status, body } = await ask(`${moment}Z`, until)
      assert.equal(status, 400)
      assert.deepEqual(body.details, [{ path: 'since', message: 'must be before until, in whole milliseconds' }])
    }
    const { body } = await ask(`${moment}Z`, '1700000000')
    assert.deepEqual(
      body.details.map(({ path }: { path: string }) => path),
      ['until'],
    )
  })

  test('a cursor and an offset exclude each other', async () => {
    const ask = (more: string) => tenant.call('GET', `/v1/deliveries?cursor=${cursor(uuid)}${more}`)
    assert.equal((await ask('')).status, 200)
    assert.equal((await ask('&offset=0')).status, 400)
    assert.equal((await ask('&offset=1')).status, 400)
    assert.equal((await ask('x')).status, 400, 'a cursor with something behind it')
  })
})

describe('several mistakes in one request are all reported', () => {
  const paths = ({ status, body }: Reply) => {
    assert.equal(status, 400)
    assert.equal(body.error, 'invalid request')
    return body.details.map((problem: { path: string }) => problem.path).sort()
  }

  test('two fields', async () => {
    assert.deepEqual(paths(await ROUTES.event!({ event_type: '', payload: [] })), ['event_type', 'payload'])
    assert.deepEqual(paths(await ROUTES.tenant!({ tenant_id: '', limits: { a: 1, max_endpoints: -1 } })), [
      'limits.a',
      'limits.max_endpoints',
      'tenant_id',
    ])
  })
  test('a field that is wrong and one that is unknown', async () => {
    assert.deepEqual(paths(await ROUTES.patch!({ is_active: 1, b: 1, c: 2 })), ['b', 'c', 'is_active'])
  })
  test('a URL that is unsafe and a field that is wrong', async () => {
    const answer = await ROUTES.endpoint!({ url: 'ftp://example.com', subscribed_events: [] })
    assert.deepEqual(paths(answer), ['subscribed_events', 'url'])
    assert.match(JSON.stringify(answer.body.details), /url must start with http/)
  })
  test('several items of a list', async () => {
    assert.deepEqual(paths(await ROUTES.endpoint!({ subscribed_events: ['a', '', 'b', 'c d'] })), [
      'subscribed_events.1',
      'subscribed_events.3',
    ])
  })
  test('two parameters', async () => {
    assert.deepEqual(paths(await tenant.call('GET', '/v1/deliveries?limit=0&status=x&y=1')), ['limit', 'status', 'y'])
  })
  test('a header and the body', async () => {
    const answer = await call(tenant.key, 'POST', '/v1/events', { event_type: '' }, { 'idempotency-key': 'a b' })
    assert.deepEqual(paths(answer), ['event_type', 'idempotency-key', 'payload'])
  })
  test('two headers', async () => {
    const headers = { 'idempotency-key': 'a b', 'content-type': 'text/plain' }
    assert.deepEqual(paths(await call(tenant.key, 'POST', '/v1/events', '{}', headers)), [
      'content-type',
      'idempotency-key',
    ])
  })
})
