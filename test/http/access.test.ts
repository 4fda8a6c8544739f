import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { after, describe, test } from 'node:test'
import { createDatabase } from '../support/database.ts'
import { ADMIN_KEY, createTenant, type Reply, startService } from '../support/service.ts'
import { API } from '../support/validate.ts'

const database = await createDatabase({ after })
const service = await startService({ after }, { databaseUrl: database.url, mode: 'api' })
const owner = await createTenant(service)
const stranger = await createTenant(service)
const { endpoint_id } = await owner.createEndpoint('http://127.0.0.1:9/hook', { description: 'mine' })
const { event_id, delivery_ids } = await owner.publish('thing.happened', { n: 1 }, 'key-1')
const own: Record<string, string> = { endpoint_id, event_id, delivery_id: delivery_ids[0] ?? '' }

/** A body for each route that takes one, which succeeds with the right key. */
const BODIES: Record<string, object> = {
  'POST /v1/admin/tenants': { tenant_id: owner.tenantId, tenant_slug: owner.tenantId },
  'POST /v1/admin/api-keys': { tenant_id: owner.tenantId, name: 'another' },
  'POST /v1/admin/retention/run': { apply: false },
  'POST /v1/events': { event_type: 'thing.happened', payload: {} },
  'POST /v1/endpoints': { url: 'http://127.0.0.1:9/other', subscribed_events: ['nothing.ever'] },
  'PATCH /v1/endpoints/{endpoint_id}': { description: 'changed' },
}

const ROUTES = Object.entries<Record<string, object>>(API.paths).flatMap(([template, item]) =>
  Object.keys(item).map((verb) => {
    const method = verb.toUpperCase()
    const [, id] = /\{(\w+)\}/.exec(template) ?? []
    const body = BODIES[`${method} ${template}`]
    return {
      name: `${method} ${template}`,
      kind: template.startsWith('/v1/admin/') ? 'admin' : template.startsWith('/v1/') ? 'tenant' : 'open',
      id,
      ask: (key: string | undefined, value = own[id ?? ''] ?? ''): Promise<Reply> =>
        service.call(method, template.replace(/\{\w+\}/, encodeURIComponent(value)), {
          ...(key !== undefined && { key }),
          ...(body && { body }),
        }),
    }
  }),
)

const UNKNOWN_KEYS = [
  'nonsense',
  'wb_live_',
  `wb_live_${'x'.repeat(43)}`,
  owner.key.slice(0, -1),
  `${owner.key}x`,
  owner.key.toLowerCase(),
  `${ADMIN_KEY}x`,
]

const error = ({ status, body }: Reply) => [status, body.error, body.details]

describe('each route and each kind of key', () => {
  for (const { name, kind, ask } of ROUTES.filter((route) => route.kind === 'open')) {
    test(`${name} needs no key (${kind})`, async () => {
      for (const key of [undefined, 'nonsense', owner.key, ADMIN_KEY]) assert.equal((await ask(key)).status, 200)
    })
  }

  for (const { name, ask } of ROUTES.filter((route) => route.kind === 'tenant')) {
    test(name, async () => {
      assert.deepEqual(error(await ask(undefined)), [401, 'missing bearer token', undefined])
      for (const key of [...UNKNOWN_KEYS, ADMIN_KEY]) {
        assert.deepEqual(error(await ask(key)), [401, 'invalid API key', undefined], key)
      }
      const { status } = await ask(owner.key)
      assert.ok(status >= 200 && status < 300, String(status))
    })
  }

  for (const { name, ask } of ROUTES.filter((route) => route.kind === 'admin')) {
    test(name, async () => {
      assert.deepEqual(error(await ask(undefined)), [401, 'missing bearer token', undefined])
      for (const key of [...UNKNOWN_KEYS, owner.key, ADMIN_KEY.toUpperCase()]) {
        assert.deepEqual(error(await ask(key)), [401, 'invalid admin key', undefined], key)
      }
      const { status } = await ask(ADMIN_KEY)
      assert.ok(status === 200 || status === 201, String(status))
    })
  }

  test('a key is judged before anything else in the request', async () => {
    const call = (headers: Record<string, string>) =>
      service.call('POST', '/v1/events?x=%ff', { body: '{', headers: { 'content-type': 'text/plain', ...headers } })
    assert.equal((await call({})).status, 401)
    assert.equal((await call({ authorization: 'Bearer nonsense' })).status, 401)
    assert.equal((await call({ authorization: `Bearer ${owner.key}` })).status, 400)
  })
})

describe('another tenant’s record', () => {
  for (const { name, id, ask } of ROUTES.filter((route) => route.id !== undefined)) {
    const notFound = `${id?.replace('_id', '')} not found`

    test(`${name} answers as for a missing one`, async () => {
      const foreign = await ask(stranger.key)
      const missing = await ask(stranger.key, randomUUID())
      assert.deepEqual(error(foreign), [404, notFound, undefined])
      assert.equal(foreign.text, missing.text)
      const names = ({ headers }: Reply) => [...headers.keys()].sort()
      assert.deepEqual(names(foreign), names(missing))
    })

    test(`${name} takes no id but its own, in any case`, async () => {
      const value = own[id ?? ''] ?? ''
      const others = Object.values(own).filter((other) => other !== value)
      const odd = [
        `{${value}}`,
        `${value}\0`,
        ` ${value}`,
        value.replaceAll('-', ''),
        '%ff%zz',

        '*',
        'é',
        "'",
        '1',
        'null',
      ]
      for (const wrong of [...others, ...odd])
        assert.deepEqual(error(await ask(owner.key, wrong)), [404, notFound, undefined], wrong)
      assert.ok((await ask(owner.key, value.toUpperCase())).status < 300)
    })
  }

  test('was not touched by any of this', async () => {
    const { body } = await owner.call('GET', `/v1/endpoints/${endpoint_id}`)
    assert.equal(body.is_active, true)
    assert.equal(body.url, 'http://127.0.0.1:9/hook')
  })

  test('is in no list and no sum, and no filter finds it', async () => {
    for (const path of ['/v1/endpoints', '/v1/deliveries', '/v1/dlq', `/v1/deliveries?endpoint_id=${endpoint_id}`]) {
      const { body } = await stranger.call('GET', path)
      const rows = body.data.filter((row: { tenant_id: string }) => row.tenant_id !== stranger.tenantId)
      assert.deepEqual(rows, [], path)
    }
    assert.deepEqual((await stranger.call('GET', `/v1/deliveries?endpoint_id=${endpoint_id}`)).body.data, [])
    const { body } = await stranger.call('GET', '/v1/metrics/summary')
    assert.deepEqual(body.deliveries_by_status, { pending: 0, retrying: 0, delivered: 0, dead_lettered: 0 })
  })

  test('may have the same idempotency key as one’s own', async () => {
    const theirs = await stranger.publish('thing.happened', { n: 2 }, 'key-1')
    assert.notEqual(theirs.event_id, event_id)
    const again = await owner.call('POST', '/v1/events', {
      body: { event_type: 'thing.happened', payload: { n: 1 } },
      headers: { 'idempotency-key': 'key-1' },
    })
    assert.equal(again.status, 200)
    assert.equal(again.body.event_id, event_id)
    assert.equal(again.headers.get('idempotent-replayed'), 'true')
  })
})

test('secrets are shown once: no other answer holds one', async () => {
  const texts = await Promise.all(
    ROUTES.filter((route) => route.kind === 'tenant' && !/rotate|POST \/v1\/endpoints$/.test(route.name)).map(
      async (route) => (await route.ask(owner.key)).text,
    ),
  )
  for (const text of texts) assert.doesNotMatch(text, /whsec_|wb_live_|signing_secret|previous_secret/)
})
