import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { memberOf } from '../support/json.ts'
import { ODD_PAYLOADS, POISON, REFUSED_BODIES } from '../support/poison.ts'
import { startReceiver } from '../support/receiver.ts'
import { ADMIN_KEY, startTenant } from '../support/service.ts'

const env = { RATE_LIMIT_ENDPOINTS_WRITE: '0', MAX_ENDPOINTS: '10000' }
const { sql, service, tenant } = await startTenant({ after }, { env })
const receiver = await startReceiver({ after })
await tenant.createEndpoint(receiver.url())
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
  for (const [name, payload] of ODD_PAYLOADS) {
    test(name, async () => {
      const { status, body } = await publish(`{"event_type":"odd","payload":${payload}}`)
      assert.equal(status, 202)
      const [receipt] = await receiver.until(1)
      receiver.receipts.length = 0
      assert.equal(JSON.parse(receipt?.body.toString() ?? '').id, body.event_id)
      assert.equal(memberOf(receipt?.body.toString() ?? '', 'data'), payload)
      const read = await tenant.call('GET', `/v1/events/${body.event_id}`)
      assert.equal(memberOf(read.text, 'payload'), payload)
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
      assert.equal(memberOf(receipt?.body.toString() ?? '', 'data'), data)
    }
  })
})

describe('a body that is not what it should be is refused', () => {
  const countStored = async () => (await sql`select count(*)::int as n from waybill.events`)[0]?.n
  let storedBefore: number
  before(async () => {
    storedBefore = await countStored()
  })
  for (const [name, body, error, headers] of REFUSED_BODIES) {
    test(`${name}: ${error}`, async () => {
      const answer = await publish(body, headers)
      assert.equal(answer.status, 400, answer.text)
      assert.equal(answer.body.error, error)
    })
  }

  test('nothing of it was stored', async () => assert.equal(await countStored(), storedBefore))
})

describe('poison in every other place is refused, or comes back as it was', () => {
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

  test('none of it was a fault of ours', () => {
    const errors = service.logs.filter((line) => line.level === 'error' && line.msg !== 'delivery.attempted')
    assert.deepEqual(errors, [])
  })
})
