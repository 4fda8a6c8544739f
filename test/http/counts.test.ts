import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import type { Pool } from '../../src/db/open.ts'
import { createDatabase, insertEndpoint } from '../support/database.ts'
import { settled } from '../support/deliveries.ts'
import { startReceiver } from '../support/receiver.ts'
import { ADMIN_KEY, createTenant, startTenant } from '../support/service.ts'
import { listenTcp } from '../support/tcp.ts'
import { passMidnight, waitFor } from '../support/wait.ts'

const EVENTS = 5000
const AT_ONCE = 25
const env = {
  RETRY_LIMIT: '1',
  RETRY_DELAY_SECONDS: '1',
  RATE_LIMIT_EVENTS_WRITE: '0',
  RATE_LIMIT_READ: '0',
  LOG_LEVEL: 'warn',
  RETENTION_DAYS: '2',
  // On a slow machine it takes longer than a minute, and the two that fail are not to be spared.
  BREAKER_SECONDS: '3600',
}
const quiet = { LOG_LEVEL: 'info' }

// They count what is used in a month, for over a minute on a slow machine.
await passMidnight(120_000)
const { sql, service, tenant } = await startTenant({ after }, { env: { ...env, ...quiet } })
const receiver = await startReceiver({ after })
// Another tenant's traffic must not show in any number of the first one's.
const other = await createTenant(service)
const get = async (path: string) => (await tenant.call('GET', path)).body

type Endpoint = { endpoint_id: string; path: string; works: boolean }
const endpoints: Endpoint[] = []

/** What the records themselves say, counted row by row. */
async function countRecords() {
  const byStatus = await sql<{ status: string; endpoint_id: string; n: number }[]>`
    select status, endpoint_id, count(*)::int as n from waybill.deliveries where tenant_id = ${tenant.tenantId} group by 1, 2`
  const attempts = await sql<
    { status_code: number | null; endpoint_id: string; n: number; retries: number; ms: number }[]
  >`
    select status_code, endpoint_id, count(*)::int as n, count(*) filter (where attempt_number > 1)::int as retries,
      sum(duration_ms)::int as ms
    from waybill.attempts where tenant_id = ${tenant.tenantId} group by 1, 2`
  const [made] = await sql<{ n: number }[]>`
    select coalesce(sum(attempt_count), 0)::int as n from waybill.deliveries where tenant_id = ${tenant.tenantId}`
  const sum = <T extends { n: number }>(rows: T[], wanted: (row: T) => boolean) =>
    rows.filter(wanted).reduce((total, row) => total + row.n, 0)
  return {
    deliveries: (status: string, endpoint?: string) =>
      sum(byStatus, (row) => row.status === status && (endpoint === undefined || row.endpoint_id === endpoint)),
    attempts: (wanted: (row: (typeof attempts)[number]) => boolean = () => true) => sum(attempts, wanted),
    meanMs: (endpoint: string) => {
      const answered = attempts.filter((row) => row.endpoint_id === endpoint && row.status_code !== null)
      const ms = answered.reduce((total, row) => total + row.ms, 0)
      return answered.length === 0 ? null : Math.round(ms / sum(answered, () => true))
    },
    codes: [...new Set(attempts.map((row) => row.status_code))],
    retries: attempts.reduce((total, row) => total + row.retries, 0),
    attemptCounts: made?.n,
  }
}

/** Holds metrics, health, usage and the dead-letter list against the records, and answers with the metrics. */
async function assertAgreement() {
  const records = await countRecords()
  const metrics = await get('/v1/metrics/summary')
  for (const [status, count] of Object.entries(metrics.deliveries_by_status)) {
    assert.equal(count, records.deliveries(status), status)
  }
  const codes = records.codes.map((code) => [code ?? 'none', records.attempts((row) => row.status_code === code)])
  assert.deepEqual(metrics.attempts_by_status_code, Object.fromEntries(codes))
  assert.equal(metrics.dead_letter_count, records.deliveries('dead_lettered'))
  assert.equal(metrics.retry_count, records.retries)
  assert.equal(records.attemptCounts, records.attempts())
  for (const { endpoint_id } of endpoints) {
    const health = await get(`/v1/endpoints/${endpoint_id}/health`)
    const attempts = records.attempts((row) => row.endpoint_id === endpoint_id)
    const successes = records.attempts(
      (row) => row.endpoint_id === endpoint_id && Math.floor((row.status_code ?? 0) / 100) === 2,
    )
    assert.equal(health.attempts, attempts)
    assert.equal(health.success_rate, attempts === 0 ? null : successes / attempts)
    assert.equal(health.failure_rate, attempts === 0 ? null : (attempts - successes) / attempts)
    assert.equal(health.mean_duration_ms, records.meanMs(endpoint_id))
    assert.equal(
      health.pending_count,
      records.deliveries('pending', endpoint_id) + records.deliveries('retrying', endpoint_id),
    )
    assert.equal(health.dead_letter_count, records.deliveries('dead_lettered', endpoint_id))
    assert.ok(health.recent_status_codes.length <= 20)
  }
  return metrics
}

async function countDeadLetters(): Promise<string[]> {
  const ids: string[] = []
  let cursor: string | null = ''
  while (cursor !== null) {
    const page: { data: { delivery_id: string }[]; next_cursor: string | null } = await get(
      `/v1/dlq?limit=250${cursor && `&cursor=${cursor}`}`,
    )
    ids.push(...page.data.map((row) => row.delivery_id))
    cursor = page.next_cursor
  }
  return ids
}

const isSettled = async () => {
  const { deliveries_by_status: now, queue_age_seconds } = await get('/v1/metrics/summary')
  return now.pending + now.retrying === 0 && queue_age_seconds === 0
}

describe(`after ${EVENTS} events to five endpoints of which two fail`, () => {
  before(async () => {
    for (const [path, works] of [
      ['/a', true],
      ['/b', true],
      ['/c', true],
      ['/refuses', false],
      ['/breaks', false],
    ] as const) {
      const { endpoint_id } = await tenant.createEndpoint(receiver.url(path))
      endpoints.push({ endpoint_id, path, works })
    }
    receiver.script('/refuses', 500)
    // Not an HTTP answer at all: the attempt has no status code.
    receiver.script('/breaks', { status: 200, headers: { 'x-broken': 'yes' }, body: '' })
    await tenant.call('PATCH', `/v1/endpoints/${endpoints[4]?.endpoint_id}`, { body: { url: 'http://127.0.0.1:9/' } })
    await other.createEndpoint(receiver.url('/other'))
    let left = EVENTS
    const publishMany = async () => {
      while (left-- > 0) await tenant.publish('thing.happened', { n: left })
    }
    await Promise.all(Array.from({ length: AT_ONCE }, publishMany))
    for (let i = 0; i < 10; i++) await other.publish()
    await waitFor(isSettled, { timeoutMs: 400_000, intervalMs: 250, what: 'all deliveries to end' })
    await receiver.until(10, { path: '/other' })
  })

  test('every number is what was sent', async () => {
    const metrics = await assertAgreement()
    assert.deepEqual(metrics.deliveries_by_status, {
      pending: 0,
      retrying: 0,
      delivered: 3 * EVENTS,
      dead_lettered: 2 * EVENTS,
    })
    assert.deepEqual(metrics.attempts_by_status_code, { 200: 3 * EVENTS, 500: 2 * EVENTS, none: 2 * EVENTS })
    assert.equal(metrics.retry_count, 2 * EVENTS)
    assert.deepEqual(metrics.endpoint_counts, { total: 5, active: 5, inactive: 0 })
    assert.equal(metrics.queue_age_seconds, 0)
    const usage = await get('/v1/usage/current')
    assert.deepEqual([usage.events_count, usage.attempts_count], [EVENTS, 7 * EVENTS])
    for (const { path, works } of endpoints.slice(0, 4)) {
      assert.equal(receiver.at(path).length, works ? EVENTS : 2 * EVENTS, path)
    }
    const [one, , , refuses, breaks] = await Promise.all(
      endpoints.map(({ endpoint_id }) => get(`/v1/endpoints/${endpoint_id}/health`)),
    )
    assert.deepEqual([one.success_rate, one.recent_status_codes, one.last_failure_at], [1, Array(20).fill(200), null])
    assert.deepEqual(
      [refuses.success_rate, refuses.recent_status_codes, refuses.last_success_at],
      [0, Array(20).fill(500), null],
    )
    assert.deepEqual([breaks.failure_rate, breaks.recent_status_codes], [1, Array(20).fill(null)])
  })

  test('the list of dead letters holds each once', async () => {
    const ids = await countDeadLetters()
    assert.equal(ids.length, 2 * EVENTS)
    assert.equal(new Set(ids).size, ids.length)
  })

  test('replays are counted like everything else', async () => {
    const { data: dead } = await get('/v1/dlq?limit=100')
    const { data: delivered } = await get('/v1/deliveries?status=delivered&limit=100')
    receiver.script('/refuses', 202)
    // One after the other: a slow machine does not get through them all in the time that one has.
    for (const { delivery_id } of [...dead, ...delivered])
      assert.equal((await tenant.call('POST', `/v1/deliveries/${delivery_id}/replay`)).status, 202)
    await waitFor(isSettled, { timeoutMs: 30_000, what: 'all replays to end' })
    const metrics = await assertAgreement()
    const mended = dead.filter((row: { endpoint_id: string }) => row.endpoint_id === endpoints[3]?.endpoint_id).length
    const stillDead = 2 * EVENTS - mended
    assert.equal(metrics.dead_letter_count, stillDead)
    assert.equal(metrics.deliveries_by_status.delivered, 3 * EVENTS + mended)
    const again = mended + 2 * (dead.length - mended) + delivered.length
    assert.equal(metrics.retry_count, 2 * EVENTS + again)
    assert.equal(metrics.attempts_by_status_code[202], mended)
    assert.equal((await get('/v1/usage/current')).attempts_count, 7 * EVENTS + again)
    assert.equal((await countDeadLetters()).length, stillDead)
  })

  test('retention takes out of them what it deletes, and nothing else', async () => {
    const admin = (apply: boolean) =>
      service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply } })
    const rows = await countRecords()
    const total = { deliveries: 5 * EVENTS, attempts: rows.attempts() }
    const unchanged = await admin(true)
    assert.deepEqual([unchanged.body.events, unchanged.body.deliveries, unchanged.body.attempts], [0, 0, 0])
    await assertAgreement()
    await age(4)
    const dry = await admin(false)
    const { events, deliveries, attempts, idempotency_keys } = dry.body
    assert.deepEqual(
      { events, deliveries, attempts, idempotency_keys },
      { events: EVENTS, ...total, idempotency_keys: 0 },
    )
    assert.equal(dry.body.applied, false)
    assert.equal((await countDeadLetters()).length, rows.deliveries('dead_lettered'), 'a dry run deletes nothing')
    const applied = await admin(true)
    assert.deepEqual(applied.body, { ...dry.body, applied: true })
    const metrics = await assertAgreement()
    assert.deepEqual(metrics.deliveries_by_status, { pending: 0, retrying: 0, delivered: 0, dead_lettered: 0 })
    assert.deepEqual(metrics.attempts_by_status_code, {})
    assert.deepEqual(await countDeadLetters(), [])
    const usage = await get('/v1/usage/current')
    assert.equal(usage.events_count, EVENTS, 'what was used stays used')
    const fresh = await tenant.publish()
    await waitFor(isSettled, { timeoutMs: 30_000 })
    assert.equal(fresh.delivery_ids.length, 5)
    await assertAgreement()
    const { body } = await other.call('GET', '/v1/metrics/summary')
    assert.equal(body.deliveries_by_status.delivered, 10, 'the other tenant’s records are of today')
  })
})

test('a 2xx that the receiver breaks off is a failure in every number', async (t) => {
  const breaking = await listenTcp((socket) => {
    socket.once('data', () => socket.end('HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf'))
  })
  t.after(breaking.close)
  const owner = await createTenant(service)
  const { endpoint_id } = await owner.createEndpoint(breaking.url)
  await owner.publish()
  const health = async () => (await owner.call('GET', `/v1/endpoints/${endpoint_id}/health`)).body
  await waitFor(async () => (await health()).dead_letter_count === 1, { timeoutMs: 30_000, what: 'its end' })
  const { success_rate, failure_rate, mean_duration_ms, recent_status_codes, last_success_at } = await health()
  assert.deepEqual([success_rate, failure_rate, recent_status_codes, last_success_at], [0, 1, [200, 200], null])
  assert.equal(mean_duration_ms, null)
  const { body } = await owner.call('GET', '/v1/metrics/summary')
  assert.deepEqual(body.attempts_by_status_code, { 200: 2 })
})

/** Makes all that the tenant has `days` older, as if time had passed: ids carry it. */
async function age(days: number): Promise<void> {
  await sql.text(`
    create or replace function pg_temp.older(id uuid) returns uuid language sql as $$
      select (lpad(to_hex(('x' || translate(substr(id::text, 1, 13), '-', ''))::bit(48)::bigint - ${days} * 86400000::bigint), 12, '0')
        || translate(substr(id::text, 15), '-', ''))::uuid $$;
    update waybill.attempts set delivery_id = pg_temp.older(delivery_id) where tenant_id = '${tenant.tenantId}';
    update waybill.deliveries set delivery_id = pg_temp.older(delivery_id), event_id = pg_temp.older(event_id) where tenant_id = '${tenant.tenantId}';
    update waybill.events set event_id = pg_temp.older(event_id) where tenant_id = '${tenant.tenantId}';
    update waybill.attempt_counts set hour = hour - interval '${days} days' where tenant_id = '${tenant.tenantId}'`)
}

test('health tells the last status codes, newest first, the last success and failure, and rates of 24 hours', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, tenant } = await startTenant(t, { env: { RETRY_LIMIT: '0' } })
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
  const codes = [500, 201, 404, 202, 503, 200]
  receiver.script('/hook', ...(codes as [number, ...number[]]))
  for (const _ of codes) {
    await tenant.publish()
    await settled(sql)
  }
  const health = async () => (await tenant.call('GET', `/v1/endpoints/${endpoint_id}/health`)).body
  const { data } = (await tenant.call('GET', '/v1/deliveries')).body
  const lastAt = (code: number) =>
    data.find((row: { last_status_code: number }) => row.last_status_code === code).last_attempt_at
  const now = await health()
  assert.deepEqual(now.recent_status_codes, codes.toReversed())
  assert.deepEqual([now.last_success_at, now.last_failure_at], [lastAt(200), lastAt(503)])
  assert.deepEqual([now.attempts, now.success_rate], [6, 0.5])
  await sql`update waybill.attempt_counts set hour = hour - interval '24 hours' where status_code >= 300`
  const later = await health()
  assert.deepEqual([later.attempts, later.success_rate], [3, 1])
  await sql`update waybill.attempt_counts set hour = date_trunc('hour', now(), 'utc') - interval '23 hours' where status_code < 300`
  assert.equal((await health()).attempts, 3)

  // A failure does not make the last success forgotten.
  receiver.script('/hook', 502)
  await tenant.publish()
  await settled(sql)
  const failing = await health()
  assert.deepEqual([failing.recent_status_codes[0], failing.last_success_at], [502, now.last_success_at])
  assert.ok(failing.last_failure_at > now.last_failure_at)
})

test('of attempts that are recorded together, the one that ended last is the newest', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, tenant } = await startTenant(t)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  await settled(sql)
  const { promise: opened, resolve: open } = Promise.withResolvers<void>()
  let asked = 0
  let answered = 0
  receiver.script('/hook', async () => {
    const nth = ++asked
    await opened
    await sleep((6 - nth) * 150)
    answered++
    return 200 + nth
  })
  for (let nth = 0; nth < 5; nth++) await tenant.publish()
  await waitFor(() => asked === 5, { what: 'all to be under way' })
  await sql.begin(async (locked) => {
    // The record of the first to end waits, and those of the others come behind it.
    await locked`select from waybill.endpoint_stats where endpoint_id = ${endpoint_id} for update`
    open()
    await waitFor(() => answered === 5, { what: 'all to be answered' })
  })
  await settled(sql)
  const { body } = await tenant.call('GET', `/v1/endpoints/${endpoint_id}/health`)
  assert.deepEqual(body.recent_status_codes, [201, 202, 203, 204, 205, 200])
})

test('what is held makes the queue as old as it has been due, unless its endpoint takes nothing now', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  const patch = (body: object) => tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body })
  await patch({ ordered: true })
  await tenant.publish()
  const age = async (): Promise<number> => (await tenant.call('GET', '/v1/metrics/summary')).body.queue_age_seconds
  await sql`update waybill.deliveries set updated_at = now() - interval '1 day' where held`
  await waitFor(async () => (await age()) > 0)
  assert.ok((await age()) < 3600, 'it is as old as itself')
  await sql`update waybill.deliveries set status = 'retrying'`
  assert.ok((await age()) > 3600, 'it has been due since its retry was')
  await patch({ is_active: false })
  assert.equal(await age(), 0)
  await patch({ is_active: true })
  assert.ok((await age()) > 3600)
  await sql`update waybill.endpoint_stats set breaker = 'open'`
  assert.equal(await age(), 0)
})

test('the queue is as old as its oldest due delivery, whatever waits for retries before it or was replayed only now', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  const age = async (): Promise<number> => (await tenant.call('GET', '/v1/metrics/summary')).body.queue_age_seconds
  for (let nth = 0; nth < 12; nth++) await Promise.all(Array.from({ length: 100 }, () => tenant.publish()))
  await sql`update waybill.deliveries set status = 'retrying', next_attempt_at = now() + interval '1 hour'`
  assert.equal(await age(), 0)
  const [due = ''] = (await tenant.publish()).delivery_ids
  await sql`update waybill.deliveries set next_attempt_at = now() - interval '1 minute' where delivery_id = ${due}`
  assert.ok((await age()) >= 60, 'a newer one is due')

  await sql`update waybill.deliveries set status = 'pending', held = true, next_attempt_at = null, earlier_attempts = 1, updated_at = now()`
  assert.ok((await age()) < 60)
  await sql`update waybill.deliveries set updated_at = now() - interval '2 minutes' where event_id in (
    select event_id from waybill.events order by event_id offset 100 limit 1)`
  assert.ok((await age()) >= 120, 'one that is held was replayed before those that are older')
})

test('a tenant’s queue is as old as what is due first at any of its endpoints, be it queued or held', async (t) => {
  const { sql } = await createDatabase(t)
  type Waiting = { ago: number; many: number; held: boolean; earlier: number }
  const queued = (ago: number, many = 1): Waiting => ({ ago, many, held: false, earlier: 0 })
  const held = (ago: number, many = 1): Waiting => ({ ago, many, held: true, earlier: 0 })
  const replayed = (ago: number): Waiting => ({ ...held(ago), earlier: 1 })
  const cases: [what: string, age: number, ...endpoints: [rule: string, ...Waiting[]][]][] = [
    ['the first of many that wait for retries', 100, ['is_active = true', queued(100), queued(-3600, 1000)]],
    ['paced, and one waits for its retry', 100, ['max_per_second = 1', held(100), queued(-3600)]],
    ['queued before others were held', 200, ['max_per_second = 1', queued(200), held(100)]],
    ['held before others were queued', 200, ['max_per_second = 1', held(200), queued(100)]],
    ['behind many that are held', 100, ['is_active = false', held(200, 600), queued(100), queued(-3600, 600)]],
    ['held one after the other', 200, ['max_per_second = 1', held(200), held(100)]],
    ['held after replays', 200, ['max_per_second = 1', replayed(200), replayed(100), held(50)]],
    ['held before a replay', 200, ['max_per_second = 1', held(200), replayed(100)]],
    ['of two endpoints', 200, ['is_active = true', queued(200)], ['is_active = true', queued(100)]],
    ['of two endpoints, one inactive', 100, ['is_active = false', held(200)], ['max_per_second = 1', held(100)]],
  ]
  // One transaction, in which no time passes.
  const ages = await sql.begin(async (tx) => {
    for (const [tenant, , ...endpoints] of cases)
      for (const [rule, ...waiting] of endpoints) {
        const endpoint = await insertEndpoint(tx, { tenant })
        await tx.text(`update waybill.endpoints set ${rule} where endpoint_id = '${endpoint}'`)
        await tx`insert into waybill.endpoint_stats (tenant_id, endpoint_id, retrying) values (${tenant}, ${endpoint}, 1)`
        for (const { ago, many, held, earlier } of waiting)
          await tx`
            insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, earlier_attempts, next_attempt_at, updated_at)
            select ${tenant}, waybill.make_delivery_id(id), id, ${endpoint}, 'thing', ${held}, ${earlier}, case when ${!held} then at end, at
            from (select now() - ${ago} * interval '1 second' as at, waybill.make_id(now() - ${ago} * interval '1 second') as id
              from generate_series(1, ${many})) made`
      }
    return await tx<{ what: string; age: number }[]>`
      select what, round(waybill.queue_age(what))::int as age from unnest(${cases.map(([what]) => what)}::text[]) what`
  })
  assert.deepEqual(
    ages.map(({ what, age }) => [what, age]),
    cases.map(([what, age]) => [what, age]),
  )
})

test('the age of the queue is found without a look at all that is held for an endpoint', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  const hold = (endpoint: string, count: number) => sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(id), id, ${endpoint}, 'thing', true, now()
    from (select waybill.make_id(now() + n * interval '1 ms') as id from generate_series(1, ${count}) n) made`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held) values (${tenant.tenantId}, ${endpoint_id}, 50000, 50000)`
  // Postgres knows of few.
  for (let nth = 0; nth < 50; nth++) await hold(crypto.randomUUID(), 1)
  await sql.text('analyze waybill.deliveries')
  await hold(endpoint_id, 50_000)
  const readBefore = await readDeliveries(sql)
  let calls = 0
  const read = await waitFor(async () => {
    calls++
    await tenant.call('GET', '/v1/metrics/summary')
    return (await readDeliveries(sql)) - readBefore
  })
  assert.ok(read / calls < 5000, `${read} rows in ${calls} calls`)
})

/** How many rows of deliveries have been read by index so far, as far as that has been told. */
async function readDeliveries(sql: Pool): Promise<number> {
  const [row] = await sql<{ read: number }[]>`
    select coalesce(sum(idx_tup_fetch), 0)::int as read from pg_stat_user_tables where relname like 'deliveries%'`
  return row?.read ?? 0
}
