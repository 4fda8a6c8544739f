import assert from 'node:assert/strict'
import { after, beforeEach, describe, test } from 'node:test'
import { identifier } from '../../src/db/statement.ts'
import { createRateCounter } from '../../src/flow/rate-counter.ts'
import { firstOfNextMonth } from '../../src/http/usage.ts'
import type { Scope } from '../support/cleanup.ts'
import { createDatabase, lock, waitingForLocks } from '../support/database.ts'
import { settled } from '../support/deliveries.ts'
import { rawRequest } from '../support/raw-http.ts'
import { startReceiver } from '../support/receiver.ts'
import {
  ADMIN_KEY,
  type Call,
  caller,
  createTenant,
  type Reply,
  startService,
  startTenant,
} from '../support/service.ts'
import { passMidnight, waitFor } from '../support/wait.ts'

const NEXT_MONTH = () => new Date(Date.UTC(new Date().getUTCFullYear(), new Date().getUTCMonth() + 1, 1)).toISOString()

beforeEach(() => passMidnight())

/** Where a month begins while the one before lasts in UTC. */
const EAST = { TZ: 'Pacific/Kiritimati' }

/** Two API processes on one database, and a way to make tenants whose calls take turns between them. */
async function twoProcesses(scope: Scope, env: Record<string, string>) {
  const database = await createDatabase(scope)
  const first = await startService(scope, { databaseUrl: database.url, mode: 'api', env: { ...EAST, ...env } })
  const second = await startService(scope, {
    databaseUrl: database.url,
    mode: 'api',
    env: { ...EAST, ...env },
    args: ['--no-migrate'],
  })
  return {
    database,
    port: Number(new URL(first.url).port),
    async newTenant(limits?: Record<string, number>) {
      const tenant = await createTenant(first, limits ? { limits } : {})
      const calls = [tenant.call, caller(second.url, tenant.key)]
      let turn = 0
      const call: Call = (...args) => (calls[turn++ % 2] as Call)(...args)
      return { tenant, call, admin: caller(first.url, ADMIN_KEY) }
    },
  }
}

const publish = (call: Call) => call('POST', '/v1/events', { body: { event_type: 'a.b', payload: {} } })
const create = (call: Call) =>
  call('POST', '/v1/endpoints', { body: { url: 'http://127.0.0.1:9/', subscribed_events: ['nothing'] } })

/** Sends 100 requests at once; answers with how many got each status, and the refusals. */
async function hundred(send: () => Promise<Reply>) {
  const replies = await Promise.all(Array.from({ length: 100 }, send))
  const refused = replies.filter((reply) => reply.status === 429)
  return { passed: replies.filter((reply) => reply.status < 300).length, refused, replies }
}

const QUOTAS = {
  MONTHLY_EVENT_LIMIT: '3',
  MONTHLY_ATTEMPT_LIMIT: '10',
  MAX_ENDPOINTS: '3',
  MAX_FANOUT_ENDPOINTS: '3',
  MAX_PAYLOAD_BYTES: '100',
}
const quotas = await twoProcesses({ after }, QUOTAS)

// A window of a day: no test crosses its end, which is midnight UTC.
const RATES = {
  RATE_LIMIT_WINDOW_SECONDS: '86400',
  RATE_LIMIT_EVENTS_WRITE: '5',
  RATE_LIMIT_ENDPOINTS_WRITE: '5',
  RATE_LIMIT_DELIVERIES_REPLAY: '5',
  RATE_LIMIT_READ: '5',
}
const rates = await twoProcesses({ after }, RATES)

describe('a quota lets exactly as much through as it says, with 100 requests at once to two processes', () => {
  for (const [how, limit, limits] of [
    ['the service’s limit', 3, undefined],
    ['a tenant’s own limit', 7, { monthly_events: 7 }],
  ] as const) {
    test(`monthly events, by ${how}`, async () => {
      const { call } = await quotas.newTenant(limits)
      for (let i = 0; i < limit - 1; i++) assert.equal((await publish(call)).status, 202)
      const { passed, refused } = await hundred(() => publish(call))
      assert.deepEqual([passed, refused.length], [1, 99])
      for (const { body, headers } of refused) {
        const details = { limit, current: limit, resets_at: NEXT_MONTH() }
        assert.deepEqual(body, { ok: false, error: 'monthly event limit exceeded', details })
        assert.equal(headers.get('retry-after'), null)
      }
      const { body } = await call('GET', '/v1/usage/current')
      assert.equal(body.events_count, limit)
      assert.equal((await call('GET', '/v1/usage/limits')).body.monthly.events, limit)
    })
  }

  test('endpoints', async () => {
    const { call } = await quotas.newTenant()
    for (let i = 0; i < 2; i++) assert.equal((await create(call)).status, 201)
    const { passed, refused } = await hundred(() => create(call))
    assert.deepEqual([passed, refused.length], [1, 99])
    for (const { body } of refused) {
      assert.deepEqual(body, { ok: false, error: 'maximum endpoint count exceeded', details: { limit: 3, current: 3 } })
    }
    assert.equal((await call('GET', '/v1/endpoints')).body.data.length, 3)
  })

  test('endpoints, also where two are made at the same moment', async () => {
    const { call } = await quotas.newTenant({ max_endpoints: 1 })
    const { sql, newSession } = quotas.database
    const unlock = await lock(newSession(), 'waybill.endpoints in share mode')
    const made = [create(call), create(call)]
    await waitFor(async () => (await waitingForLocks(sql)) === 2, { what: 'both to be under way' })
    await unlock()
    const statuses = (await Promise.all(made)).map(({ status }) => status)
    assert.deepEqual(statuses.sort(), [201, 429])
  })

  test('fan-out: an event may match as many endpoints, and not one more; nothing of it is stored', async () => {
    const { tenant, call } = await quotas.newTenant({ max_endpoints: 10, monthly_events: 1000 })
    for (let i = 0; i < 3; i++) await tenant.createEndpoint(`http://127.0.0.1:9/${i}`, { subscribed_events: ['a.b'] })
    assert.equal((await publish(call)).body.endpoint_count, 3)
    const fourth = await tenant.createEndpoint('http://127.0.0.1:9/4')
    const keyed = { body: { event_type: 'a.b', payload: {} }, headers: { 'idempotency-key': 'k' } }
    const { status, body } = await call('POST', '/v1/events', keyed)
    assert.equal(status, 429)
    assert.deepEqual(body, {
      ok: false,
      error: 'maximum fan-out endpoints exceeded',
      details: { limit: 3, current: 4 },
    })
    const { passed, refused } = await hundred(() => publish(call))
    assert.deepEqual([passed, refused.length], [0, 100])
    assert.equal((await call('GET', '/v1/usage/current')).body.events_count, 1)
    assert.equal((await call('GET', '/v1/deliveries')).body.data.length, 3)
    await call('PATCH', `/v1/endpoints/${fourth.endpoint_id}`, { body: { is_active: false } })
    assert.equal((await call('POST', '/v1/events', keyed)).status, 202, 'the refused key is free again')
  })

  test('payload size, by the service’s limit and a tenant’s own', async () => {
    const { tenant, call, admin } = await quotas.newTenant({ monthly_events: 1000 })
    const sized = (bytes: number) => ({ body: { event_type: 'a', payload: { a: 'x'.repeat(bytes - 8) } } })
    assert.equal((await call('POST', '/v1/events', sized(100))).status, 202)
    const { status, body } = await call('POST', '/v1/events', sized(101))
    assert.equal(status, 400)
    assert.deepEqual(body.details, { limit_bytes: 100, actual_bytes: 101 })
    const limits = { monthly_events: 1000, max_payload_bytes: 300_000 }
    const own = { tenant_id: tenant.tenantId, tenant_slug: tenant.tenantId, limits }
    assert.equal((await admin('POST', '/v1/admin/tenants', { body: own })).status, 200)
    await waitFor(async () => (await call('POST', '/v1/events', sized(300_000))).status === 202)
    await waitFor(async () => (await call('POST', '/v1/events', sized(300_000))).status === 202)
    assert.equal((await call('POST', '/v1/events', sized(300_001))).body.details.limit_bytes, 300_000)
    assert.equal((await call('GET', '/v1/usage/limits')).body.hard.max_payload_bytes, 300_000)
    assert.equal((await call('GET', '/v1/safety/limits')).body.hard_limits.max_payload_bytes, 300_000)
  })

  test('monthly attempts: what the worker may not send is dead-lettered, and no more is published or replayed', async (t) => {
    const receiver = await startReceiver(t)
    const { tenant, call } = await quotas.newTenant({ monthly_events: 1000 })
    await tenant.createEndpoint(receiver.url())
    // Who asks to be told of dead letters could not be told of these.
    await tenant.createEndpoint(receiver.url('/told'), { subscribed_events: ['delivery.dead_lettered'] })
    const { passed } = await hundred(() => publish(call))
    assert.equal(passed, 100, 'nothing has been attempted yet')
    await startService(t, { databaseUrl: quotas.database.url, mode: 'worker', env: QUOTAS })
    await waitFor(async () => (await call('GET', '/v1/metrics/summary')).body.deliveries_by_status.pending === 0)
    const { sql } = quotas.database
    await waitFor(async () => (await sql`select from pgboss.job where name = 'dead_letters'`).length === 0)
    const told = await sql`
      select event_type from waybill.announcements where tenant_id = ${tenant.tenantId} union all
      select event_type from waybill.events where tenant_id = ${tenant.tenantId} and event_type = 'delivery.dead_lettered'`
    assert.equal(told.length, 0)
    assert.equal(receiver.receipts.length, 10)
    const { body: metrics } = await call('GET', '/v1/metrics/summary')
    assert.deepEqual(metrics.deliveries_by_status, { pending: 0, retrying: 0, delivered: 10, dead_lettered: 90 })
    const { body: dead } = await call('GET', '/v1/dlq?limit=250')
    assert.equal(dead.data.length, 90)
    for (const row of dead.data) {
      assert.equal(row.dead_letter_reason, 'monthly_attempt_limit')
      assert.equal(row.attempt_count, 0)
      assert.equal(row.last_error, null)
    }
    const details = { limit: 10, current: 10, resets_at: NEXT_MONTH() }
    const refusal = { ok: false, error: 'monthly attempt limit exceeded', details }
    const usage = (await call('GET', '/v1/usage/current')).body
    const published = await publish(call)
    const replayed = await call('POST', `/v1/deliveries/${dead.data[0].delivery_id}/replay`)
    for (const { status, body } of [published, replayed]) {
      assert.equal(status, 429)
      assert.deepEqual(body, refusal)
    }
    assert.equal(usage.attempts_count, 10)
    assert.equal(usage.events_count, 100)
  })
})

test('what is dead-lettered because the month is used up shows how its last attempt went, and is in the log', async (t) => {
  const receiver = await startReceiver(t)
  receiver.script('/', 500)
  const env = { MONTHLY_ATTEMPT_LIMIT: '1', RETRY_DELAY_SECONDS: '1', RETRY_DELAY_MAX_SECONDS: '1' }
  const { service, tenant } = await startTenant(t, { env })
  await tenant.createEndpoint(receiver.url())
  const [id] = (await tenant.publish()).delivery_ids
  assert.equal((await service.logged('delivery.dead_lettered')).delivery_id, id)
  const dead = await waitFor(async () => {
    const { body } = await tenant.call('GET', `/v1/deliveries/${id}`)
    return body.status === 'dead_lettered' ? body : null
  })
  const { dead_letter_reason, attempt_count, last_status_code, last_error } = dead
  assert.deepEqual(
    { dead_letter_reason, attempt_count, last_status_code, last_error },
    { dead_letter_reason: 'monthly_attempt_limit', attempt_count: 1, last_status_code: 500, last_error: 'http_status' },
  )
  assert.equal(receiver.receipts.length, 1)
  const { body } = await tenant.call('GET', `/v1/deliveries/${id}/attempts`)
  assert.deepEqual(
    body.data.map((attempt: Record<string, unknown>) => [
      attempt.attempt_number,
      attempt.retry_state,
      attempt.next_attempt_at,
    ]),
    [[1, 'exhausted', null]],
  )
})

describe('a rate limit lets exactly as much through as it says, with 100 requests at once to two processes', () => {
  const unknown = '01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10'
  const ACTIONS: [string, (call: Call) => Promise<Reply>, number][] = [
    ['events:write', publish, 202],
    ['endpoints:write', create, 201],
    ['deliveries:replay', (call) => call('POST', `/v1/deliveries/${unknown}/replay`), 404],
    ['read', (call) => call('GET', '/v1/dlq'), 200],
  ]
  for (const [action, send, status] of ACTIONS) {
    test(action, async () => {
      const { tenant, call } = await rates.newTenant()
      for (let i = 1; i <= 4; i++) {
        const { headers } = await send(call)
        assert.deepEqual([headers.get('x-ratelimit-limit'), headers.get('x-ratelimit-remaining')], ['5', String(5 - i)])
      }
      const { replies, refused } = await hundred(() => send(call))
      assert.equal(replies.filter((reply) => reply.status === status).length, 1)
      assert.equal(refused.length, 99)
      const places = refused.map(({ body }) => body.details.current).sort((a, b) => a - b)
      assert.deepEqual(
        places,
        Array.from({ length: 99 }, (_, index) => index + 6),
      )
      const midnight = new Date(new Date().setUTCHours(0, 0, 0, 0)).toISOString()
      for (const { body, headers } of refused) {
        const { current, retry_after_seconds, ...rest } = body.details
        const expected = {
          tenant_id: tenant.tenantId,
          action,
          limit: 5,
          window_seconds: 86_400,
          window_start: midnight,
        }
        assert.deepEqual(rest, expected)
        assert.equal(body.error, 'rate limit exceeded')
        assert.ok(Number.isInteger(retry_after_seconds) && retry_after_seconds > 0 && retry_after_seconds <= 86_400)
        assert.equal(headers.get('retry-after'), String(retry_after_seconds))
        assert.equal(headers.get('x-ratelimit-limit'), '5')
        assert.equal(headers.get('x-ratelimit-remaining'), '0')
        assert.equal(headers.get('x-ratelimit-reset'), String(retry_after_seconds))
      }
    })
  }

  test('requests that are refused count; other actions, other tenants and wrong keys do not', async () => {
    const { call } = await rates.newTenant()
    const other = await rates.newTenant()
    for (let i = 0; i < 7; i++) assert.equal((await call('POST', '/v1/events', { key: 'wb_live_x' })).status, 401)
    assert.equal((await call('POST', '/v1/events', { body: '{' })).body.error, 'invalid JSON')
    assert.equal((await call('POST', '/v1/events', { body: { event_type: '', payload: {} } })).status, 400)
    assert.equal(
      (await call('POST', '/v1/events', { body: '', headers: { 'content-type': 'text/plain' } })).status,
      400,
    )
    const tooLarge = { event_type: 'a', payload: { a: 'x'.repeat(300_000) } }
    assert.equal((await call('POST', '/v1/events', { body: tooLarge })).body.error, 'payload too large')
    const fifth = await publish(call)
    assert.equal(fifth.status, 202)
    assert.equal(fifth.headers.get('x-ratelimit-remaining'), '0')
    assert.equal((await publish(call)).status, 429)
    const malformed = await call('POST', '/v1/events', { body: '{' })
    assert.equal(malformed.status, 429, 'the rate limit goes before the body')
    assert.equal(malformed.body.details.current, 7)
    assert.equal((await call('GET', '/v1/dlq')).status, 200)
    for (let i = 0; i < 4; i++) assert.equal((await call('GET', '/v1/dlq?limit=x')).status, 400)
    assert.equal((await call('GET', '/v1/dlq?limit=x')).status, 429)
    assert.equal((await publish(other.call)).status, 202)
  })

  test('a publish beyond the limit is answered, and counted, without waiting for its body', async () => {
    const { tenant, admin } = await rates.newTenant()
    for (let i = 0; i < 5; i++) assert.equal((await publish(tenant.call)).status, 202)
    const head = `POST /v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ${tenant.key}\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n`
    for (const place of [6, 7]) {
      const answer = await rawRequest(rates.port, head)
      assert.equal(answer?.status, 429)
      assert.equal(JSON.parse(answer.body).details.current, place)
    }
    const limits = { events_write_rate: 9 }
    await admin('POST', '/v1/admin/tenants', {
      body: { tenant_id: tenant.tenantId, tenant_slug: tenant.tenantId, limits },
    })
    assert.equal((await publish(tenant.call)).headers.get('x-ratelimit-remaining'), '1')
  })

  test('of publishes beyond the limit that wait to be counted only so many bodies wait with them', async () => {
    const { tenant } = await rates.newTenant({ events_write_rate: 1 })
    for (const status of [202, 429]) assert.equal((await publish(tenant.call)).status, status)
    const head = `POST /v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ${tenant.key}\r\ncontent-type: application/json\r\ncontent-length: 200000\r\n\r\n`
    await rates.database.sql.begin(async (holder) => {
      await holder`select from waybill.rate_windows where tenant_id = ${tenant.tenantId} for update`
      const answers = Array.from({ length: 200 }, () => rawRequest(rates.port, head))
      // Of those that are let in, the first would be answered with 500, seconds later.
      assert.equal((await Promise.race(answers))?.status, 503)
    })
  })

  test('who finds a window of the days to come, as the database’s clock was ahead, is told to wait for one window', async () => {
    const { tenant, call } = await rates.newTenant()
    assert.equal((await call('GET', '/v1/dlq')).status, 200)
    await rates.database
      .sql`update waybill.rate_windows set window_start = window_start + interval '2 days', count = 5 where tenant_id = ${tenant.tenantId}`
    const { status, body, headers } = await call('GET', '/v1/dlq')
    assert.deepEqual([status, body.details.retry_after_seconds, headers.get('retry-after')], [429, 86_400, '86400'])
  })

  test('a window that the database lost in a crash begins anew', async () => {
    const { tenant } = await rates.newTenant()
    for (let i = 0; i < 5; i++) await publish(tenant.call)
    assert.equal((await publish(tenant.call)).status, 429)
    await rates.database.sql`delete from waybill.rate_windows where tenant_id = ${tenant.tenantId}`
    const remaining: (string | null)[] = []
    for (let i = 0; i < 5; i++) remaining.push((await publish(tenant.call)).headers.get('x-ratelimit-remaining'))
    assert.deepEqual(remaining, ['4', '3', '2', '1', '0'])
    assert.equal((await publish(tenant.call)).status, 429)
  })

  for (const [limit, counter] of [
    ['events_write_rate', 'rate_windows'],
    ['monthly_events', 'usage'],
  ] as const) {
    test(`of two publishes that both find room under ${limit} and share the last place, one is refused`, async () => {
      const { sql } = rates.database
      const { tenant, call } = await rates.newTenant({ [limit]: 2 })
      assert.equal((await publish(call)).status, 202)
      let publishing: Promise<Reply[]> | undefined
      await sql.begin(async (holder) => {
        await holder`select from ${identifier(`waybill.${counter}`)} where tenant_id = ${tenant.tenantId} for update`
        publishing = Promise.all([publish(call), publish(call)])
        await waitFor(async () => (await waitingForLocks(sql)) === 2)
      })
      const replies = await publishing!
      assert.deepEqual(replies.map(({ status }) => status).sort(), [202, 429])
      const [counted] = await sql`
        select (select count from waybill.rate_windows where tenant_id = ${tenant.tenantId}) as requests,
          (select count::int from waybill.usage where tenant_id = ${tenant.tenantId} and metric = 'events') as events,
          (select count(*)::int from waybill.events where tenant_id = ${tenant.tenantId}) as stored`
      assert.deepEqual({ ...counted }, { requests: 3, events: 2, stored: 2 })
    })
  }

  test('a publish that finds the window full is accepted if the window has ended before it is counted', async () => {
    const { sql } = rates.database
    const { tenant, call } = await rates.newTenant({ events_write_rate: 2 })
    for (const status of [202, 202, 429]) assert.equal((await publish(call)).status, status)
    // It has read that the window is full, and waits to be counted.
    let publishing: Promise<Reply> | undefined
    await sql.begin(async (holder) => {
      await holder`select from waybill.rate_windows where tenant_id = ${tenant.tenantId} for update`
      publishing = publish(call)
      await waitFor(async () => (await waitingForLocks(sql)) === 1)
      // The next window, in which another process has counted one.
      await holder`
        update waybill.rate_windows set window_start = window_start + interval '1 day', count = 1 where tenant_id = ${tenant.tenantId}`
    })
    assert.equal((await publishing!).status, 202)
    const [counted] = await sql`select count from waybill.rate_windows where tenant_id = ${tenant.tenantId}`
    assert.deepEqual({ ...counted }, { count: 2 })
  })

  test('a tenant that is created by several at once is created, for each of them', async () => {
    const { admin } = await rates.newTenant()
    for (let round = 0; round < 10; round++) {
      const body = { tenant_id: `twin-${round}`, tenant_slug: `twin-${round}` }
      const replies = await Promise.all(Array.from({ length: 8 }, () => admin('POST', '/v1/admin/tenants', { body })))
      for (const { status, text } of replies) assert.equal(status, 200, text)
    }
  })

  test('of tenants that take each other’s slugs at once each is told that it has it, or that it is taken', async () => {
    const { admin } = await rates.newTenant()
    const put = (id: string, slug: string) =>
      admin('POST', '/v1/admin/tenants', { body: { tenant_id: `swap-${id}`, tenant_slug: `swap-${slug}` } })
    for (let round = 0; round < 10; round++) {
      await Promise.all([put('a', `a${round}`), put('b', `b${round}`)])
      const replies = await Promise.all(
        Array.from({ length: 6 }, () => [put('a', `b${round}`), put('b', `a${round}`)]).flat(),
      )
      for (const { status, text } of replies) assert.ok(status === 200 || status === 409, text)
    }
  })

  test('a tenant’s new limits hold for the request that comes after the answer', async () => {
    const { tenant, admin } = await quotas.newTenant()
    for (let limit = 2; limit < 22; limit++) {
      const body = { tenant_id: tenant.tenantId, tenant_slug: tenant.tenantId, limits: { max_payload_bytes: limit } }
      assert.equal((await admin('POST', '/v1/admin/tenants', { body })).status, 200)
      assert.equal((await tenant.call('GET', '/v1/safety/limits')).body.hard_limits.max_payload_bytes, limit)
    }
  })

  test('a tenant’s new limits hold in other processes long before what those remember is old', async () => {
    const { tenant, call, admin } = await quotas.newTenant()
    // Each process in turn.
    const both = async () => [await call('GET', '/v1/usage/limits'), await call('GET', '/v1/usage/limits')]
    await both()
    const body = { tenant_id: tenant.tenantId, tenant_slug: tenant.tenantId, limits: { monthly_events: 9 } }
    assert.equal((await admin('POST', '/v1/admin/tenants', { body })).status, 200)
    await waitFor(async () => (await both()).every((reply) => reply.body.monthly.events === 9), { timeoutMs: 3000 })
  })

  test('a tenant that is only given another slug keeps its limits; new ones replace all of them', async () => {
    const { tenant, admin } = await quotas.newTenant({ max_endpoints: 5, monthly_events: 6 })
    const put = async (tenant_slug: string, more: object = {}) =>
      (await admin('POST', '/v1/admin/tenants', { body: { tenant_id: tenant.tenantId, tenant_slug, ...more } })).body
        .limits
    assert.deepEqual(await put(`${tenant.tenantId}-new`), { max_endpoints: 5, monthly_events: 6 })
    assert.deepEqual(await put(tenant.tenantId, { limits: { max_endpoints: 7 } }), { max_endpoints: 7 })
  })

  test('a tenant that is changed shows when it was, and still when it was made', async () => {
    const { tenant, admin } = await quotas.newTenant()
    const at = '2026-01-02T03:04:05.678Z'
    await quotas.database
      .sql`update waybill.tenants set created_at = ${at}, updated_at = ${at} where tenant_id = ${tenant.tenantId}`
    const { body } = await admin('POST', '/v1/admin/tenants', {
      body: { tenant_id: tenant.tenantId, tenant_slug: tenant.tenantId },
    })
    assert.equal(body.created_at, at)
    assert.ok(body.updated_at > at)
  })

  test('a tenant is told its own limits', async () => {
    const monthly = { events: 11, attempts: 12 }
    const hard = { max_endpoints: 13, max_fanout_endpoints: 14, max_payload_bytes: 15 }
    const own = { monthly_events: monthly.events, monthly_attempts: monthly.attempts, ...hard }
    const { call } = await rates.newTenant(own)
    assert.deepEqual((await call('GET', '/v1/usage/limits')).body, { ok: true, monthly, hard })
    assert.deepEqual((await call('GET', '/v1/safety/limits')).body.hard_limits, hard)
  })

  test('a tenant’s own rate of events goes before the service’s', async () => {
    const { call } = await rates.newTenant({ events_write_rate: 3 })
    const { passed } = await hundred(() => publish(call))
    assert.equal(passed, 3)
    assert.equal((await call('GET', '/v1/safety/limits')).body.rate_limits['events:write'].limit, 3)
  })

  test('a window ends, and the next begins anew; 0 switches a limit off', async (t) => {
    const off = { RATE_LIMIT_EVENTS_WRITE: '0', RATE_LIMIT_ENDPOINTS_WRITE: '0' }
    const env = { RATE_LIMIT_WINDOW_SECONDS: '2', RATE_LIMIT_READ: '1', ...off }
    const service = await startService(t, { databaseUrl: rates.database.url, mode: 'api', env })
    const { call, tenantId } = await createTenant(service)
    const { body: limited } = await waitFor(async () => {
      await call('GET', '/v1/dlq')
      const second = await call('GET', '/v1/dlq')
      return second.status === 429 ? second : null
    })
    const { window_start, retry_after_seconds, current } = limited.details
    assert.equal(Date.parse(window_start) % 2000, 0)
    assert.ok(current >= 2)
    await new Promise((resolve) => setTimeout(resolve, retry_after_seconds * 1000))
    assert.equal((await call('GET', '/v1/dlq')).status, 200, 'after waiting as long as the answer said')
    for (let i = 0; i < 5; i++) {
      const { status, headers } = await publish(call)
      assert.equal(status, 202)
      assert.equal(headers.get('x-ratelimit-limit'), null)
    }
    assert.equal((await call('POST', '/v1/endpoints', { body: {} })).status, 400)
    const counted = await rates.database.sql`select action from waybill.rate_windows where tenant_id = ${tenantId}`
    assert.deepEqual([...counted], [{ action: 'read' }])
    await new Promise((resolve) => setTimeout(resolve, 2000))
    const { body } = await call('GET', '/v1/safety/limits')
    assert.deepEqual(body.rate_limits['events:write'], { limit: 0, window_seconds: 2 })
    assert.deepEqual(body.rate_limits.read, { limit: 1, window_seconds: 2 })
    assert.equal(body.protections.rate_limiting, true)
  })
})

test('a service that limits no rate says so', async (t) => {
  const actions = ['EVENTS_WRITE', 'ENDPOINTS_WRITE', 'DELIVERIES_REPLAY', 'READ']
  const env = Object.fromEntries(actions.map((action) => [`RATE_LIMIT_${action}`, '0']))
  const { tenant } = await startTenant(t, { mode: 'api', env })
  assert.equal((await tenant.call('GET', '/v1/safety/limits')).body.protections.rate_limiting, false)
})

test('what was used in another month does not count in this one', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, tenant } = await startTenant(t, { env: { MONTHLY_EVENT_LIMIT: '1', MONTHLY_ATTEMPT_LIMIT: '1' } })
  await tenant.createEndpoint(receiver.url())
  const { delivery_ids } = await tenant.publish()
  await receiver.until(1)
  await settled(sql)
  assert.equal((await tenant.call('POST', '/v1/events', { body: { event_type: 'a', payload: {} } })).status, 429)
  assert.equal((await tenant.call('POST', `/v1/deliveries/${delivery_ids[0]}/replay`)).status, 429)
  await sql`update waybill.usage set month = month - interval '1 month'`
  const { body } = await tenant.call('GET', '/v1/usage/current')
  assert.deepEqual([body.events_count, body.attempts_count], [0, 0])
  await tenant.publish()
  await receiver.until(2)
  await settled(sql)
  await sql`update waybill.usage set month = month - interval '2 months' where metric = 'attempts'`
  assert.equal((await tenant.call('POST', `/v1/deliveries/${delivery_ids[0]}/replay`)).status, 202)
  await receiver.until(3)
})

test('what is held without having been counted gives its tenant no attempts beyond the month', async (t) => {
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/never')
  for (let n = 0; n < 3; n++) await tenant.publish()
  await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { is_active: false } })
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    select tenant_id, month, 'attempts', 5 from waybill.usage where metric = 'events'`
  await startService(t, { databaseUrl, mode: 'worker' })
  const held = async () => (await sql`select from waybill.deliveries where held`).length
  await waitFor(async () => (await held()) === 3, { what: 'all to be held' })
  assert.equal((await tenant.call('GET', '/v1/usage/current')).body.attempts_count, 5)
})

test('what a tenant may attempt in a month goes before what the service allows, also in the worker', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const api = await startService(t, { databaseUrl, mode: 'api' })
  const tenant = await createTenant(api, { limits: { monthly_attempts: 2 } })
  await tenant.createEndpoint(receiver.url())
  const ids: string[] = []
  for (let n = 0; n < 4; n++) ids.push(...(await tenant.publish()).delivery_ids)
  await startService(t, { databaseUrl, mode: 'worker' })
  await settled(sql)
  const { body } = await tenant.call('GET', '/v1/metrics/summary')
  assert.deepEqual(body.deliveries_by_status, { pending: 0, retrying: 0, delivered: 2, dead_lettered: 2 })
  assert.equal((await tenant.call('POST', `/v1/deliveries/${ids[0]}/replay`)).status, 429)
})

/** Counts requests as an API process does; what is called in one turn is one batch. */
async function startCounting(t: Scope, windowSeconds: number) {
  const { sql, openPool } = await createDatabase(t)
  const pool = openPool()
  return { sql, count: createRateCounter(pool, windowSeconds) }
}

test('of requests that are counted together each has the place of its own tenant and action', async (t) => {
  const { count } = await startCounting(t, 86_400)
  const asked = [
    ['zeta', 'read'],
    ['acme', 'read'],
    ['acme', 'deliveries:replay'],
    ['zeta', 'read'],
    ['acme', 'read'],
    ['zeta', 'endpoints:write'],
  ] as const
  const batch = async () => {
    const places = await Promise.all(asked.map(([tenantId, action]) => count({ tenantId, action })))
    return places.map((place) => place.count)
  }
  assert.deepEqual(await batch(), [1, 1, 1, 2, 2, 1])
  assert.deepEqual(await batch(), [3, 3, 2, 4, 4, 2])
})

test('of a flood only a tenant’s share is counted, and nobody else waits for all of it', async (t) => {
  const { count } = await startCounting(t, 86_400)
  const order: string[] = []
  const ask = (tenantId: string) =>
    count({ tenantId, action: 'read' }).then(({ count: place }) => {
      order.push(tenantId)
      return place
    })
  const flood = Promise.allSettled(Array.from({ length: 2600 }, () => ask('zeta')))
  assert.equal(await ask('acme'), 1)
  assert.ok(order.length < 600, `${order.length} before it`)
  const refused = (await flood).filter(({ status }) => status === 'rejected')
  // A thousand are being counted, and a thousand wait for that, though not for longer than a second.
  assert.ok(refused.length >= 600, `${refused.length} are refused`)
  assert.equal(await ask('zeta'), 2601 - refused.length)
})

test('a request whose window has ended meanwhile counts in the next one, which others have begun and filled', async (t) => {
  const { sql, count } = await startCounting(t, 86_400)
  const asked = { tenantId: 'acme', action: 'read' } as const
  await count(asked)
  const [next] = await sql<{ start: Date }[]>`
    update waybill.rate_windows set window_start = window_start + interval '1 day', count = 5 returning window_start as start`
  for (const place of [6, 7]) {
    const { count: counted, windowStart, secondsLeft } = await count(asked)
    assert.deepEqual([counted, windowStart], [place, next?.start])
    assert.ok(secondsLeft > 86_400, 'who is refused is told when that one ends')
  }
})

for (const zone of ['Pacific/Kiritimati', 'America/Los_Angeles'])
  test(`limits start anew with the month of UTC, also where it is the time of ${zone}`, (t) => {
    const before = process.env.TZ
    t.after(() => {
      if (before === undefined) delete process.env.TZ
      else process.env.TZ = before
    })
    process.env.TZ = zone
    const next = (moment: string) => firstOfNextMonth(new Date(moment)).toISOString()
    assert.equal(next('2026-11-30T23:59:59.999Z'), '2026-12-01T00:00:00.000Z')
    assert.equal(next('2026-12-01T00:00:00.000Z'), '2027-01-01T00:00:00.000Z')
  })
