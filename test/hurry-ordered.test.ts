import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { catchUp, catchUpLeftOver } from '../src/flow/catch-up.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { createAttempt } from './support/attempts.ts'
import { createDatabase, insertEndpoint, lock, waitingForLocks } from './support/database.ts'
import { publishMany, settled } from './support/deliveries.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

test('hurrying an ordered endpoint reads no deliveries but its own', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const endpoint = await insertEndpoint(sql, { ordered: true })
  const insert = (days: number, count: number, status: string) => sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, ${endpoint}, 'thing', ${status}::waybill.delivery_status, now()
    from (select waybill.make_id(date_trunc('day', now(), 'utc') + ${days} * interval '1 day' + n * interval '1 ms') as id
          from generate_series(1, ${count}) n) made`
  await insert(-1, 2000, 'delivered')
  await insert(0, 1000, 'retrying')
  await sql`
    select waybill.enqueue(json_agg(json_build_object('id', delivery_id, 'priority', 0, 'data', json_build_object('tenant_id', 'acme')))::text)
    from waybill.deliveries where status = 'retrying'`
  await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where name = 'deliveries'`
  await sql.text('analyze waybill.deliveries')
  await sql.text('analyze pgboss.job')
  const session = newSession()
  await session`select waybill.hurry_ordered('acme', ${endpoint})`
  await session`select pg_stat_force_next_flush()`
  const [due] = await sql`select count(*)::int as n from pgboss.job where name = 'deliveries' and start_after <= now()`
  assert.equal(due?.n, 1000)
  const [yesterday] = await sql`
    select seq_tup_read::int as read from pg_stat_user_tables
    where relname = 'deliveries_' || to_char((now() at time zone 'utc')::date - 1, 'YYYYMMDD')`
  assert.equal(yesterday?.read, 0)
})

/** A delivery to an ordered endpoint that waits an hour for its retry. */
async function makeWaiting(sql: Pool) {
  const endpoint = await insertEndpoint(sql)
  await publishMany(sql, 'acme', 1)
  await sql`update waybill.endpoints set ordered = true`
  const [job] = await sql<{ id: string }[]>`
    update pgboss.job set state = 'retry', started_on = now(), start_after = now() + interval '1 hour' where name = 'deliveries' returning id`
  await sql`update waybill.deliveries set status = 'retrying', next_attempt_at = now() + interval '1 hour'`
  await sql`update waybill.endpoint_stats set pending = 0, retrying = 1`
  const isDue = async () =>
    (await sql`select from pgboss.job where name = 'deliveries' and start_after <= now()`).length === 1
  return { endpoint, delivery: job!.id, isDue }
}

test('a URL that is being changed when a failure has been recorded is waited for, and then tried at once', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { endpoint, delivery, isDue } = await makeWaiting(sql)
  const { catchingUp } = await sql.begin(async (changing) => {
    // As a change does, which finds nothing to hurry before the failure is recorded.
    await changing`select from waybill.endpoints for update`
    const failed = { tenantId: 'acme', endpointId: endpoint, url: 'http://x', deliveryId: delivery }
    const catchingUp = catchUp(newSession(), [failed])
    await waitFor(() => waitingForLocks(sql), { what: 'it to wait for the change' })
    await changing`update waybill.endpoints set url = 'http://y'`
    return { catchingUp }
  })
  await catchingUp
  assert.ok(await isDue())
})

test('a retry of an ordered endpoint whose last attempt went to the URL that it has now keeps its backoff', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, delivery, isDue } = await makeWaiting(sql)
  await sql`update waybill.deliveries set attempt_count = 2`
  for (const [nth, url] of ['http://before', 'http://x'].entries())
    await sql`
      insert into waybill.attempts (tenant_id, delivery_id, endpoint_id, url, attempt_number, status_code, error, response_truncated, duration_ms, retry_state, started_at)
      values ('acme', ${delivery}, ${endpoint}, ${url}, ${nth + 1}, 500, 'http_status', false, 1, 'will_retry', now())`
  await catchUpLeftOver(sql, [{ tenant_id: 'acme', endpoint_id: endpoint }])
  assert.equal(await isDue(), false)
  await sql`update waybill.endpoints set url = 'http://before'`
  await catchUpLeftOver(sql, [{ tenant_id: 'acme', endpoint_id: endpoint }])
  assert.equal(await isDue(), true)
})

test('hurrying an ordered endpoint waits for no delivery that is being recorded or replayed, and makes the others due', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const endpoint = await insertEndpoint(sql, { ordered: true })
  const [first] = await sql<{ id: string }[]>`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, ${endpoint}, 'thing', 'retrying', now()
    from (select waybill.make_id(clock_timestamp()) as id from generate_series(1, 2)) made returning delivery_id as id`
  await sql`
    select waybill.enqueue(json_agg(json_build_object('id', delivery_id, 'priority', 0, 'data', json_build_object('tenant_id', 'acme')))::text)
    from waybill.deliveries`
  await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where name = 'deliveries'`
  await newSession().begin(async (recording) => {
    await recording`select from waybill.deliveries where delivery_id = ${first!.id} for update`
    await sql.begin(async (tx) => {
      await tx`set local lock_timeout = '100ms'`
      await tx`select waybill.hurry_ordered('acme', ${endpoint})`
    })
  })
  const due = await sql`
    select start_after <= now() as is_due from pgboss.job where name = 'deliveries' order by id = ${first!.id} desc`
  assert.deepEqual([...due], [{ is_due: false }, { is_due: true }])
})

/** An ordered endpoint that has one delivery and is about to fail at the next, with an hour's backoff. */
async function startFailing(t: TestContext) {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, service, tenant } = await startTenant(t, { env: { RETRY_DELAY_SECONDS: '3600' } })
  const failure = gate(500)
  receiver.script('/old', 200, failure.reply, 200)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/old'), { ordered: true })
  const [first = ''] = (await tenant.publish()).delivery_ids
  await waitFor(async () => (await tenant.call('GET', `/v1/deliveries/${first}`)).body.status === 'delivered')
  const [second = ''] = (await tenant.publish()).delivery_ids
  await receiver.until(2, { path: '/old' })
  return { receiver, databaseUrl, sql, service, tenant, endpoint_id, first, second, fail: failure.open }
}

test('an ordered endpoint whose URL is changed during an attempt that fails does not wait for its backoff', async (t) => {
  const { receiver, tenant, endpoint_id, second, fail } = await startFailing(t)
  await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { url: receiver.url('/new') } })
  fail()
  await receiver.until(1, { path: '/new' })
  await waitFor(async () => (await tenant.call('GET', `/v1/deliveries/${second}`)).body.status === 'delivered')
})

test('an older delivery that is replayed during an attempt of an ordered endpoint goes next, without its backoff', async (t) => {
  const { receiver, sql, tenant, first, second, fail } = await startFailing(t)
  assert.equal((await tenant.call('POST', `/v1/deliveries/${first}/replay`)).status, 202)
  fail()
  await settled(sql)
  const order = receiver.receipts.map(({ headers }) => headers['service-delivery-id'])
  assert.deepEqual(order, [first, second, first, second])
})

for (const what of ['a URL that was changed', 'an older delivery that was replayed'])
  test(`where a worker is interrupted once that failure is recorded, ${what} meanwhile is attended to by a sweep`, async (t) => {
    const { receiver, databaseUrl, sql, service, tenant, endpoint_id, first, fail } = await startFailing(t)
    if (what.includes('URL'))
      await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { url: receiver.url('/new') } })
    else await tenant.call('POST', `/v1/deliveries/${first}/replay`)
    const unlock = await lock(sql, 'waybill.replay_requests in access exclusive mode')
    fail()
    const interrupt = () =>
      sql`select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%failed%'`
    await waitFor(async () => (await interrupt()).length > 0, { what: 'the worker to catch up' })
    await service.logged('record.not_caught_up')
    await unlock()
    await startService(t, { databaseUrl, mode: 'worker' })
    await settled(sql)
    assert.equal(receiver.at(what.includes('URL') ? '/new' : '/old').length, what.includes('URL') ? 1 : 4)
  })

test('nor does one whose URL is changed while that failure is being recorded', async (t) => {
  const { receiver, sql, tenant, endpoint_id, fail } = await startFailing(t)
  // It counts as failing, so the change waits for its counters, too.
  await sql`update waybill.endpoint_stats set failure_streak = 1`
  const patched = await sql.begin(async (lock) => {
    await lock`select from waybill.endpoint_stats for update`
    fail()
    await waitFor(async () => (await waitingForLocks(sql)) === 1, { what: 'the record to wait' })
    const patching = tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { url: receiver.url('/new') } })
    await waitFor(async () => (await waitingForLocks(sql)) === 2, { what: 'the change to wait' })
    return { patching }
  })
  assert.equal((await patched.patching).status, 200)
  await receiver.until(1, { path: '/new' })
})

test('what fails while an older delivery of an ordered endpoint waits for its retry leaves that its time', async (t) => {
  const { sql, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  await publishMany(sql, 'acme', 2)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 2 })
  await sql`update waybill.endpoints set ordered = true`
  const attempt = createAttempt(pool)
  for (const claim of send) await (await attempt(claim, 500)).caughtUp
  const jobs = await sql`select start_after <= now() as is_due from pgboss.job where name = 'deliveries' order by id`
  assert.deepEqual([...jobs], [{ is_due: false }, { is_due: true }])
})
