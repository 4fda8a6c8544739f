import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { after, describe, test } from 'node:test'
import { ERRORS, type ErrorCode } from '../../src/errors.ts'
import { createDatabase } from '../support/database.ts'
import { ADMIN_KEY, type CallOptions, createTenant, startService } from '../support/service.ts'

const database = await createDatabase({ after })
// A window that does not end while the tests run.
const env = { RATE_LIMIT_WINDOW_SECONDS: '86400' }
const service = await startService({ after }, { databaseUrl: database.url, mode: 'api', env })
const tenant = await createTenant(service, { tenant_id: 'first', tenant_slug: 'first' })
/** Nothing is left for this one. */
const poor = await createTenant(service, {
  limits: { monthly_events: 0, max_endpoints: 0, max_payload_bytes: 10 },
})
const spent = await createTenant(service, { limits: { monthly_attempts: 0 } })
const narrow = await createTenant(service, { limits: { max_fanout_endpoints: 0 } })
await narrow.createEndpoint('http://127.0.0.1:9/')
const slow = await createTenant(service, { limits: { events_write_rate: 1 } })
await slow.publish()
const { event_id } = await tenant.publish('thing.happened', { n: 1 }, 'key')

const ID = randomUUID()
const EVENT = { event_type: 'thing.happened', payload: {} }
const ENDPOINT = { url: 'http://127.0.0.1:9/', subscribed_events: ['*'] }
const NEXT_MONTH = () => new Date(Date.UTC(new Date().getUTCFullYear(), new Date().getUTCMonth() + 1, 1)).toISOString()
const monthly = () => ({ limit: 0, current: 0, resets_at: NEXT_MONTH() })

/** Requests that meet each error, with the details it must have, or what makes them at that time; undefined: none. */
const CASES: [ErrorCode, string, string, CallOptions, unknown][] = [
  ['invalid_json', 'POST', '/v1/events', { key: tenant.key, body: '' }, 'the body is empty'],
  [
    'invalid_request',
    'POST',
    '/v1/events',
    { key: tenant.key, body: { ...EVENT, more: 1 } },
    [{ path: 'more', message: 'is not a known field' }],
  ],
  ...(
    [
      ['ftp://example.com/', 'url must start with http:// or https://'],
      ['javascript:alert(1)', 'url must start with http:// or https://'],
      ['example.com', 'url must start with http:// or https://'],
      ['https://user:secret@example.com/', 'url must not include username or password credentials'],
      ['https://user@example.com/', 'url must not include username or password credentials'],
      ['http://10.0.0.1/', 'url hostname is blocked for SSRF protection'],
      ['http://169.254.169.254/latest/meta-data', 'url hostname is blocked for SSRF protection'],
      ['http://metadata.google.internal/', 'url hostname is blocked for SSRF protection'],
      ['http://[fd00::1]/', 'url hostname is blocked for SSRF protection'],
    ] as const
  ).map(([url, details]): (typeof CASES)[number] => [
    'invalid_url',
    'POST',
    '/v1/endpoints',
    { key: tenant.key, body: { ...ENDPOINT, url } },
    details,
  ]),
  [
    'payload_too_large',
    'POST',
    '/v1/events',
    { key: poor.key, body: { ...EVENT, payload: { a: '12345' } } },
    { limit_bytes: 10, actual_bytes: 13 },
  ],
  ['missing_token', 'GET', '/v1/dlq', {}, undefined],
  ['invalid_api_key', 'GET', '/v1/dlq', { key: 'wb_live_x' }, undefined],
  ['invalid_admin_key', 'POST', '/v1/admin/tenants', { key: 'x' }, undefined],
  ['event_not_found', 'GET', `/v1/events/${ID}`, { key: tenant.key }, undefined],
  ['endpoint_not_found', 'GET', `/v1/endpoints/${ID}`, { key: tenant.key }, undefined],
  ['delivery_not_found', 'GET', `/v1/deliveries/${ID}`, { key: tenant.key }, undefined],
  [
    'tenant_not_found',
    'POST',
    '/v1/admin/api-keys',
    { key: ADMIN_KEY, body: { tenant_id: 'nobody', name: 'n' } },
    undefined,
  ],
  ['not_found', 'GET', '/v2/events', { key: tenant.key }, undefined],
  [
    'key_reused',
    'POST',
    '/v1/events',
    { key: tenant.key, body: EVENT, headers: { 'idempotency-key': 'key' } },
    { event_id },
  ],
  [
    'slug_taken',
    'POST',
    '/v1/admin/tenants',
    { key: ADMIN_KEY, body: { tenant_id: 'second', tenant_slug: 'first' } },
    undefined,
  ],
  ['monthly_events', 'POST', '/v1/events', { key: poor.key, body: EVENT }, monthly],
  ['monthly_attempts', 'POST', '/v1/events', { key: spent.key, body: EVENT }, monthly],
  ['endpoint_count', 'POST', '/v1/endpoints', { key: poor.key, body: ENDPOINT }, { limit: 0, current: 0 }],
  ['fanout', 'POST', '/v1/events', { key: narrow.key, body: EVENT }, { limit: 0, current: 1 }],
]

describe('every error has its status, its string and its details', () => {
  for (const [code, method, path, options, expectedDetails] of CASES) {
    test(`${ERRORS[code].join(' ')}${code === 'invalid_url' ? `: ${(options.body as { url: string }).url}` : ''}`, async () => {
      const { status, body } = await service.call(method, path, options)
      const [expected, error] = ERRORS[code]
      const details = typeof expectedDetails === 'function' ? expectedDetails() : expectedDetails
      assert.equal(status, expected)
      assert.deepEqual(body, { ok: false, error, ...(details !== undefined && { details }) })
    })
  }

  test('429 rate limit exceeded', async () => {
    const { status, body, headers } = await slow.call('POST', '/v1/events', { body: EVENT })
    assert.equal(status, 429)
    assert.equal(body.error, 'rate limit exceeded')
    const names = ['action', 'current', 'limit', 'retry_after_seconds', 'tenant_id', 'window_seconds', 'window_start']
    assert.deepEqual(Object.keys(body.details).sort(), names)
    assert.equal(headers.get('retry-after'), String(body.details.retry_after_seconds))
  })

  test('500 internal error says nothing; the log line with its request id says what', async () => {
    await database.sql`alter table waybill.endpoints rename to elsewhere`
    const headers = { 'x-request-id': 'find-me' }
    const answer = await tenant.call('GET', '/v1/endpoints', { headers })
    await database.sql`alter table waybill.elsewhere rename to endpoints`
    assert.equal(answer.status, 500)
    assert.equal(answer.headers.get('x-request-id'), 'find-me')
    assert.deepEqual(answer.body, { ok: false, error: 'internal error' })
    const line = await service.logged('request.failed')
    const { request_id, tenant_id, method, path } = line
    assert.deepEqual([request_id, tenant_id, method, path], ['find-me', tenant.tenantId, 'GET', '/v1/endpoints'])
    assert.match(line.text, /does not exist/)
    assert.doesNotMatch(line.text, new RegExp(tenant.key))
  })

  test('no error is left out, but those of a client that is slow and of a service that is busy', () => {
    const met = new Set<string>([...CASES.map(([code]) => code), 'rate_limited', 'internal'])
    // test/room.test.ts, test/overload.test.ts
    assert.deepEqual(
      Object.keys(ERRORS).filter((code) => !met.has(code)),
      ['request_timeout', 'overloaded'],
    )
  })
})
