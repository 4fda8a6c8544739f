import assert from 'node:assert/strict'
import { hash, randomUUID } from 'node:crypto'
import { after, describe, test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import { createAuth } from '../../src/http/auth.ts'
import { createSecretBox } from '../../src/secrets.ts'
import { rawRequest } from '../support/raw-http.ts'
import { routesOf } from '../support/routes.ts'
import { ADMIN_KEY, createTenant, ENCRYPTION_KEY, type Reply, startTenant } from '../support/service.ts'
import { waitFor } from '../support/wait.ts'

const { sql, service, tenant: owner } = await startTenant({ after }, { mode: 'api' })
const stranger = await createTenant(service)
const { endpoint_id } = await owner.createEndpoint('http://127.0.0.1:9/hook', { description: 'mine' })
const { event_id, delivery_ids } = await owner.publish('thing.happened', { n: 1 }, 'key-1')
const own: Record<string, string> = { endpoint_id, event_id, delivery_id: delivery_ids[0] ?? '' }

const ROUTES = routesOf(service, own, owner.tenantId)

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

test('a key that was refused is taken as soon as it is there', async () => {
  const key = `wb_live_${'n'.repeat(43)}`
  const ask = async () => (await service.call('GET', `/v1/endpoints/${endpoint_id}`, { key })).status
  assert.equal(await ask(), 401)
  // As an operator does who brings it back from a backup.
  await sql`
    insert into waybill.api_keys (tenant_id, api_key_id, name, key_hash)
    values (${owner.tenantId}, ${randomUUID()}, 'again', decode(${hash('sha256', key, 'hex')}, 'hex'))`
  assert.equal(await ask(), 200)
})

/** Keys as a process knows them whose database answers once `open` is called. */
function slowly() {
  const { promise: opened, resolve: open } = Promise.withResolvers<void>()
  const seen = { answers: 0 }
  let wait = Promise.resolve()
  const pool = (async (...query: Parameters<Pool>) => {
    const rows = await sql(...query)
    seen.answers++
    await wait
    return rows
  }) as unknown as Pool
  const auth = createAuth(pool, ADMIN_KEY, {} as Parameters<typeof createAuth>[2])
  const block = () => {
    wait = opened
  }
  return { auth, block, open, seen, ask: (key: string, bytes = 0) => auth.tenant(`Bearer ${key}`, bytes) }
}

test('made-up keys leave room for the bodies of those who have one', async () => {
  const { auth, block, open, ask } = slowly()
  await ask(owner.key)
  auth.forget()
  block()
  const made = Array.from({ length: 100 }, (_, nth) => ask(`wb_live_made-up${nth}`, 1024 * 1024).catch(() => {}))
  const known = ask(owner.key, 1024 * 1024)
  // Long enough for who waits for room to be refused.
  setTimeout(open, 1500)
  assert.equal((await known).tenantId, owner.tenantId)
  await Promise.all(made)
})

for (const when of ['before', 'after'])
  test(`who asks once a key was withdrawn, ${when} an older look-up has ended, is not answered by that`, async () => {
    const { auth, block, open, seen, ask } = slowly()
    const { tenantId, key } = await createTenant(service)
    block()
    const older = ask(key)
    await waitFor(() => seen.answers === 1)
    await sql`delete from waybill.api_keys where tenant_id = ${tenantId}`
    auth.forget()
    const refused = () => assert.rejects(ask(key), { message: 'invalid API key' })
    const earlier = when === 'before' ? refused() : undefined
    open()
    await older
    await (earlier ?? refused())
  })

test('of many keys that are looked up at once, each is answered for itself', async () => {
  const tenants = await Promise.all(Array.from({ length: 5 }, () => createTenant(service)))
  const owned = await Promise.all(tenants.map((one) => one.createEndpoint('http://127.0.0.1:9/hook')))
  const replies = await Promise.all(
    Array.from({ length: 200 }, (_, nth) => {
      const known = tenants[nth % 10]
      return service.call('GET', '/v1/endpoints', { key: known?.key ?? `wb_live_unknown${nth}` })
    }),
  )
  for (const [nth, { status, body }] of replies.entries())
    assert.deepEqual(
      [status, body.data?.[0].endpoint_id],
      nth % 10 < 5 ? [200, owned[nth % 10]?.endpoint_id] : [401, undefined],
    )
})

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
    assert.deepEqual(body.endpoint_counts, { total: 0, active: 0, inactive: 0 })
    assert.equal(body.queue_age_seconds, 0)
    const { events_count, attempts_count } = (await stranger.call('GET', '/v1/usage/current')).body
    assert.deepEqual([events_count, attempts_count], [0, 0])
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

test('the log tells of each tenant that is stored and each key that is made, and not the key', async () => {
  const admin = (path: string, body: object) => service.call('POST', `/v1/admin/${path}`, { key: ADMIN_KEY, body })
  const logged = async (msg: string, tenantId: string) => {
    const found = () => service.logs.findLast((line) => line.msg === msg && line.tenant_id === tenantId)
    await waitFor(() => found() !== undefined)
    return found()
  }
  const tenant_id = randomUUID()
  for (const limits of [{ max_endpoints: 5 }, { max_endpoints: 6 }]) {
    const { created } = (await admin('tenants', { tenant_id, tenant_slug: tenant_id, limits })).body
    await waitFor(async () => (await logged('tenant.stored', tenant_id))?.created === created)
    assert.deepEqual((await logged('tenant.stored', tenant_id))?.limits, limits)
  }
  const { api_key, api_key_id } = (await admin('api-keys', { tenant_id, name: 'k' })).body
  assert.equal((await logged('api_key.created', tenant_id))?.api_key_id, api_key_id)
  assert.ok(!service.stdout().includes(api_key))
})

test('secrets are shown once: no other answer holds one', async () => {
  const texts = await Promise.all(
    ROUTES.filter((route) => route.kind === 'tenant' && !/rotate|POST \/v1\/endpoints$/.test(route.name)).map(
      async (route) => (await route.ask(owner.key)).text,
    ),
  )
  for (const text of texts) assert.doesNotMatch(text, /whsec_|wb_live_|signing_secret|previous_secret/)
})

test('a secret that was rotated by an id in capitals can be opened', async () => {
  const { body } = await owner.call('POST', `/v1/endpoints/${endpoint_id.toUpperCase()}/rotate-secret`)
  const [row] = await sql`select signing_secret as sealed from waybill.endpoints where endpoint_id = ${endpoint_id}`
  const box = createSecretBox([Buffer.from(ENCRYPTION_KEY, 'base64')])
  assert.equal(box.open(row!.sealed, `${owner.tenantId}/${endpoint_id}`), body.signing_secret)
})

test('a key that was deleted is accepted by no process soon after, nor with a body that had begun before', async (t) => {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api' })
  assert.equal((await tenant.call('GET', '/v1/endpoints')).status, 200)
  const body = '{"event_type":"late","payload":{}}'
  const head = `POST /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${tenant.key}\r\nContent-Type: application/json\r\n`
  let goOn = (_rest: string) => {}
  const late = rawRequest(service.port, `${head}Content-Length: ${body.length}\r\n\r\n{`, (write) => {
    goOn = write
  })
  await sql`delete from waybill.api_keys where tenant_id = ${tenant.tenantId}`
  await waitFor(async () => (await tenant.call('GET', '/v1/endpoints')).status === 401, {
    what: 'the key to be refused',
    timeoutMs: 7000,
  })
  goOn(body.slice(1))
  assert.equal((await late)?.status, 401)
  assert.deepEqual(await sql`select from waybill.events`, [])
})
