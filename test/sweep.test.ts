import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import { setTimeout } from 'node:timers/promises'
import type { Db, Pool } from '../src/db/open.ts'
import { createLog } from '../src/log.ts'
import { createClockMender } from '../src/upkeep/clock-set-back.ts'
import { startSweep } from '../src/upkeep/sweep.ts'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase, insertEndpoint } from './support/database.ts'
import { assertBooks, NO_LIMITS, publishMany, settled } from './support/deliveries.ts'
import { queueAt } from './support/queue.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** A database in which the tenant `acme` has one endpoint, for all types. */
async function createWithEndpoint(t: TestContext) {
  const { sql, openPool, newSession } = await createDatabase(t)
  await insertEndpoint(sql)
  return { sql, openPool, newSession }
}

test('deliveries whose jobs were deleted behind the service are all sent after all', async (t) => {
  const database = await createDatabase(t)
  const receiver = await startReceiver(t)
  receiver.script('/late', 500, 200)
  const api = await startService(t, { databaseUrl: database.url, mode: 'api' })
  const tenant = await createTenant(api)
  await tenant.createEndpoint(receiver.url('/prompt'), { subscribed_events: ['prompt'] })
  await tenant.createEndpoint(receiver.url('/late'), { subscribed_events: ['late'] })
  for (let n = 0; n < 20; n++)
    await tenant.call('POST', '/v1/events', { body: { event_type: 'prompt', payload: { n } } })
  await database.sql`delete from pgboss.job where name = 'deliveries'`

  const worker = await startService(t, { databaseUrl: database.url, mode: 'worker', env: { RETRY_DELAY_SECONDS: '3' } })
  await tenant.call('POST', '/v1/events', { body: { event_type: 'late', payload: {} } })
  await receiver.until(1, { path: '/late' })
  await waitFor(
    async () =>
      (await database.sql`delete from pgboss.job where name = 'deliveries' and state = 'retry' returning id`).length >
      0,
    { what: 'the retry to be queued, and lost' },
  )

  await Promise.all([
    receiver.until(20, { path: '/prompt', timeoutMs: 120_000 }),
    receiver.until(2, { path: '/late', timeoutMs: 120_000 }),
  ])
  await waitFor(() => worker.logs.some((line) => line.msg === 'sweep.jobs_recreated'), { what: 'the log to say so' })
  const delivered = async () => (await tenant.call('GET', '/v1/metrics/summary')).body.deliveries_by_status
  await waitFor(async () => (await delivered()).delivered === 21, { what: 'all to be recorded' })
  assert.deepEqual(await delivered(), { pending: 0, retrying: 0, delivered: 21, dead_lettered: 0 })
  const [attempts] = await database.sql`select max(attempt_number) as most, count(*)::int as n from waybill.attempts`
  assert.deepEqual({ ...attempts }, { most: 2, n: 22 })
})

test('a delivery without a job is found behind more than one look can hold', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const create = async () => (await tenant.createEndpoint(receiver.url('/hook'))).endpoint_id
  const [before] = [await create(), await create()].sort()
  const { delivery_ids } = await tenant.publish()
  await sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, next_attempt_at, updated_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(event), event, ${before!}, 'later', 'retrying', now() + interval '1 day', now()
    from waybill.make_id(clock_timestamp()) as event, generate_series(1, 100000)`
  await sql`update waybill.endpoint_stats set retrying = 100000 where endpoint_id = ${before!}`
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set updated_at = now() - interval '1 minute' where delivery_id = any(${delivery_ids})`
  await startService(t, { databaseUrl, mode: 'worker' })
  await receiver.until(2, { timeoutMs: 60_000 })
})

test('a rate window that begins tomorrow, because the clock was ahead, refuses nobody until then, nor says so', async (t) => {
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api', env: { RATE_LIMIT_EVENTS_WRITE: '1' } })
  const publish = () => tenant.call('POST', '/v1/events', { body: { event_type: 'a', payload: {} } })
  assert.equal((await publish()).status, 202)
  await sql`update waybill.rate_windows set window_start = window_start + interval '1 day'`
  const { status, headers } = await publish()
  const waits = ['retry-after', 'x-ratelimit-reset'].map((name) => Number(headers.get(name)))
  assert.deepEqual([status, waits], [429, [60, 60]])
  await startService(t, { databaseUrl, mode: 'worker' })
  await waitFor(async () => (await publish()).status === 202, { what: 'an event to be accepted' })
})

test('what is to begin tomorrow, because the clock was ahead, begins now', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const create = async (name: string, change: object) => {
    const { endpoint_id } = await tenant.createEndpoint(receiver.url(`/${name}`), { subscribed_events: [name] })
    for (let n = 0; n < 2; n++) await tenant.publish(name)
    await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: change })
    return endpoint_id
  }
  const paced = await create('paced', { max_per_second: 100 })
  await sql`update waybill.endpoint_stats set next_slot = now() + interval '1 day' where endpoint_id = ${paced}`
  await sql`
    update pgboss.job set start_after = now() + interval '1 day', data = data || jsonb_build_object('slot', extract(epoch from now() + interval '1 day') * 1000)
    where id = (select min(delivery_id::text)::uuid from waybill.deliveries where endpoint_id = ${paced})`
  const ordered = await create('ordered', { ordered: true })
  await sql`
    update pgboss.job set start_after = now() + interval '1 day'
    where id = (select min(delivery_id::text)::uuid from waybill.deliveries where endpoint_id = ${ordered})`
  await startService(t, { databaseUrl, mode: 'worker' })
  await receiver.until(2, { path: '/paced', timeoutMs: 60_000 })
  await receiver.until(2, { path: '/ordered', timeoutMs: 60_000 })
})

test('when an endpoint last succeeded or failed is not tomorrow because the clock was ahead', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id: id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  await tenant.publish()
  const mend = createClockMender(sql, 300)
  const last = async () => {
    const { body } = await tenant.call('GET', `/v1/endpoints/${id}/health`)
    return [body.last_success_at, body.last_failure_at].map((at) => at && Date.parse(at) - Date.now())
  }
  await sql`update waybill.endpoint_stats set last_success_at = now() + interval '1 day'`
  await mend()
  const [success, never] = await last()
  assert.ok(success! < 1000, `it succeeded ${success} ms from now`)
  assert.equal(never, null)
  await sql`update waybill.endpoint_stats set last_success_at = now() - interval '1 hour', last_failure_at = now() + interval '1 day'`
  await mend()
  const [before, failure] = await last()
  assert.ok(before! < -3_500_000 && failure! < 1000, `it succeeded ${before} ms from now, and failed ${failure} ms`)
})

test('what was queued, failed or claimed tomorrow, because the clock was ahead, is sent now, and schedules run', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const publish = async (name: string) => {
    await tenant.createEndpoint(receiver.url(`/${name}`), { subscribed_events: [name] })
    return (await tenant.publish(name)).delivery_ids[0]!
  }
  const [queued, failed, claimed] = [await publish('queued'), await publish('failed'), await publish('claimed')]
  const late = await publish('late')
  await sql`update pgboss.job set start_after = now() + interval '1 day' where id = ${queued}`
  await sql`
    update pgboss.job set state = 'retry', started_on = now() + interval '1 day', start_after = now() + interval '1 day 2 seconds',
      priority = waybill.retry_priority(now() + interval '1 day 2 seconds') where id = ${failed}`
  // Claimed before the clock was ahead, and failed while it was.
  await sql`
    update pgboss.job set state = 'retry', started_on = now(), start_after = now() + interval '1 year',
      priority = waybill.retry_priority(now() + interval '1 year') where id = ${late}`
  await sql`
    update pgboss.job set state = 'active', started_on = now() + interval '1 day', heartbeat_on = now() + interval '1 day' where id = ${claimed}`
  await sql`update pgboss.version set cron_on = now() + interval '1 day'`
  await sql`update pgboss.queue set monitor_on = now() + interval '1 day', monitor_claim_on = now() + interval '1 day', maintain_on = now() + interval '1 day'`
  await startService(t, { databaseUrl, mode: 'worker' })
  for (const name of ['queued', 'failed', 'claimed', 'late'])
    await receiver.until(1, { path: `/${name}`, timeoutMs: 60_000 })
  // A claim that was lost, and a retry, are not the first attempt.
  const attempts = await waitFor(async () => {
    const rows =
      await sql`select event_type, attempt_count from waybill.deliveries where status = 'delivered' order by event_type`
    return rows.length === 4 && rows.map(({ attempt_count }) => attempt_count)
  })
  assert.deepEqual(attempts, [2, 2, 2, 1])
  const waiting = () => sql`
    select cron_on as until from pgboss.version where cron_on > now() + interval '1 hour' union all
    select greatest(monitor_on, monitor_claim_on, maintain_on) from pgboss.queue where greatest(monitor_on, monitor_claim_on, maintain_on) > now() + interval '1 hour'`
  await waitFor(async () => (await waiting()).length === 0, { what: 'schedules to run again' })
})

test('what is due in a while as it should be is left so, also beside what is mended', async (t) => {
  const { sql } = await createWithEndpoint(t)
  for (let n = 0; n < 2; n++) await publishMany(sql, 'acme', 1)
  const [asked, late] = await sql<{ id: string }[]>`select id from pgboss.job where name = 'deliveries' order by id`
  // One receiver has asked for the longest wait that it may ask for, like so many others that it waits for another day.
  for (const [id, wait] of [
    [asked!.id, '2 days'],
    [late!.id, '1 year'],
  ])
    await sql`
      update pgboss.job set state = 'retry', started_on = now(), start_after = now() + ${wait!}::interval,
        priority = waybill.retry_priority(now() + ${wait!}::interval) where id = ${id!}`
  const usual = { next_slot: '2 seconds', failing_since: '-1 hour', next_probe_at: '300 seconds' }
  const mend = createClockMender(sql, 300)
  for (const ahead of [undefined, ...Object.keys(usual)]) {
    const standing = Object.entries(usual).map(([column, from]) => `${column} = now() + interval '${from}'`)
    await sql.text(`update waybill.endpoint_stats set breaker = 'open', ${standing.join()}`)
    const read = async () => ({
      ...(await sql`select next_slot, failing_since, next_probe_at from waybill.endpoint_stats`)[0],
    })
    const before = await read()
    if (ahead) await sql.text(`update waybill.endpoint_stats set ${ahead} = now() + interval '1 day'`)
    await mend()
    const after = await read()
    if (ahead) {
      assert.ok(Number(after[ahead]) <= Date.now(), `${ahead} is mended`)
      before[ahead] = after[ahead]
    }
    assert.deepEqual(after, before, ahead)
  }
  const jobs = await sql`
    select start_after > now() as waits, priority = waybill.retry_priority(start_after) as in_place from pgboss.job where name = 'deliveries' order by id`
  assert.deepEqual(
    jobs.map((job) => ({ ...job })),
    [
      { waits: true, in_place: true },
      { waits: false, in_place: true },
    ],
  )
})

test('a retry that was given back for a minute keeps its time, or if that was tomorrow, waits for a minute from now', async (t) => {
  const { sql } = await createWithEndpoint(t)
  for (let n = 0; n < 2; n++) await publishMany(sql, 'acme', 1)
  const jobs = await sql<{ id: string }[]>`
    update pgboss.job set state = 'active', started_on = now(), heartbeat_on = now() where name = 'deliveries' returning id`
  await sql`select waybill.unclaim(${jobs.map(({ id }) => id)}::uuid[], '{0,0}', 60)`
  await sql`
    update pgboss.job set start_after = start_after + interval '1 day', heartbeat_on = heartbeat_on + interval '1 day' where id = ${jobs[0]!.id}`
  await createClockMender(sql, 300)()
  const waits = await sql<{ id: string; seconds: number; is_new: boolean }[]>`
    select id, extract(epoch from start_after - now())::float8 as seconds, started_on is null as is_new from pgboss.job where name = 'deliveries'`
  assert.equal(waits.length, 2)
  for (const { id, seconds, is_new } of waits) {
    assert.ok(seconds > 45 && seconds <= 60, `${id === jobs[0]!.id ? 'mended' : 'as it was'}: ${seconds} s`)
    assert.ok(is_new, 'uses no retry')
  }
})

test('what comes from tomorrow is mended while others change it', async (t) => {
  const { sql, openPool } = await createWithEndpoint(t)
  // One by one, so that each has a job of its own.
  await sql`
    select from generate_series(1, 1500) n,
      lateral waybill.publish(array['acme'], array['a'], array['{}'], array[n::text], ${JSON.stringify(NO_LIMITS)})`
  const [queued] = await sql`select count(*)::int as jobs from pgboss.job where name = 'deliveries'`
  assert.equal(queued?.jobs, 1500)
  const pool = openPool({ max: 9 })
  // As a worker does that fails attempts while the clock is ahead. Where one statement mended jobs and deliveries, this crashed Postgres 18 now and then.
  const delay = (nth: number) => pool`
    update pgboss.job set start_after = now() + interval '1 hour' where name = 'deliveries' and id in (
      select id from pgboss.job where name = 'deliveries' and abs(hashtext(id::text)) % 16 = ${nth % 16} order by id for update)`
  await Promise.all(Array.from({ length: 16 }, (_, nth) => delay(nth)))
  let isOver = false
  const delaying = Array.from({ length: 8 }, async (_, nth) => {
    for (; !isOver; nth++) await delay(nth)
  })
  const mend = () => createClockMender(pool, 0)()
  for (let round = 0; round < 160; round++) await mend()
  isOver = true
  await Promise.all(delaying)
  await mend()
  const [late] = await sql`
    select count(*) filter (where start_after > now() + interval '1 minute')::int as jobs,
      (select count(*)::int from waybill.deliveries where next_attempt_at > now() + interval '1 minute') as deliveries
    from pgboss.job where name = 'deliveries'`
  assert.deepEqual({ ...late }, { jobs: 0, deliveries: 0 })
})

test('what has lost its job is held once, while it is being replayed', async (t) => {
  const { sql, openPool } = await createWithEndpoint(t)
  await publishMany(sql, 'acme', 30_000)
  await sql`update waybill.deliveries set status = 'delivered'`
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql.text('vacuum analyze waybill.deliveries')
  await sql.text('vacuum analyze pgboss.job')
  await publishMany(sql, 'acme', 4000)
  await sql`delete from pgboss.job where name = 'deliveries'`
  const lost = await sql<{ id: string }[]>`select delivery_id as id from waybill.deliveries where status = 'pending'`
  const log = createLog('silent')
  const pool = openPool({ max: 9 })
  for (let round = 0; round < 10; round++) {
    await sql`
      update waybill.deliveries set held = false, next_attempt_at = now() - interval '1 hour', updated_at = now() - interval '1 hour'
      where status = 'pending'`
    await sql`update waybill.endpoint_stats set pending = 4000, held = 0`
    let isOver = false
    // Where one statement found lost deliveries and held them, this crashed Postgres 18 within a few rounds.
    const replaying = Array.from({ length: 8 }, async (_, nth) => {
      for (let at = nth; !isOver; at = (at + 8) % lost.length)
        await pool`select from waybill.replay('acme', ${lost[at]?.id ?? ''})`
    })
    const sweep = startSweep({ pool, log, longestWaitSeconds: 0 })
    cleanUp(t, () => {
      isOver = true
      return sweep.stop()
    })
    const held = async () => {
      sweep.wake()
      const [row] = await sql`
        select count(*)::int as rows, (select held::int from waybill.endpoint_stats) as counted from waybill.deliveries where held`
      return { ...row }
    }
    await waitFor(async () => (await held()).rows === 4000, { what: 'all to be held' })
    isOver = true
    await Promise.all(replaying)
    await sweep.stop()
    assert.deepEqual(await held(), { rows: 4000, counted: 4000 })
  }
})

test('what is held, waits in a bundle, is due later or has changed a moment ago is not taken for lost', async (t) => {
  const { sql, openPool } = await createWithEndpoint(t)
  for (const count of [2, 1, 1, 1, 1]) await publishMany(sql, 'acme', count)
  await sql`delete from pgboss.job where name = 'deliveries' and not data ? 'ids'`
  await sql`update waybill.deliveries set updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
  const ids = (await sql`select delivery_id as id from waybill.deliveries where bundle is null order by 1`).map(
    ({ id }) => id,
  )
  const [lost, held, later, changed] = ids as [string, string, string, string]
  await sql`update waybill.deliveries set held = true, next_attempt_at = null where delivery_id = ${held}`
  await sql`update waybill.endpoint_stats set held = 1`
  await sql`update waybill.deliveries set next_attempt_at = now() + interval '1 hour' where delivery_id = ${later}`
  await sql`update waybill.deliveries set updated_at = now() where delivery_id = ${changed}`
  const sweep = startSweep({ pool: openPool(), log: createLog('silent'), longestWaitSeconds: 0 })
  cleanUp(t, sweep.stop)
  const isHeld = async () => (await sql`select from waybill.deliveries where delivery_id = ${lost} and held`).length > 0
  await waitFor(isHeld, { what: 'the lost one to be held' })
  const now =
    await sql`select delivery_id as id from waybill.deliveries where held and next_attempt_at is null order by 1`
  assert.deepEqual(
    now.map(({ id }) => id),
    [lost, held],
  )
  assert.deepEqual([...(await sql`select held::int from waybill.endpoint_stats`)], [{ held: 2 }])
})

test('lost jobs are found although nothing else of a sweep can be done', async (t) => {
  const { sql, openPool } = await createWithEndpoint(t)
  await publishMany(sql, 'acme', 1)
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
  await sql`alter table waybill.replay_requests rename to gone_1`
  await sql`alter table waybill.attempts rename to gone_2`
  const told: string[] = []
  const log = Object.assign(createLog('silent'), { error: (_: unknown, msg: string) => void told.push(msg) })
  const sweep = startSweep({ pool: openPool(), log, longestWaitSeconds: 0 })
  cleanUp(t, sweep.stop)
  const isHeld = async () => (await sql`select from waybill.deliveries where held`).length === 1
  await waitFor(isHeld, { what: 'the lost one to be held' })
  assert.deepEqual(told, ['sweep.replays_failed', 'sweep.not_caught_up'])
})

test('what has lost its job comes back with the retries that it had left', async (t) => {
  const { sql, openPool } = await createWithEndpoint(t)
  await publishMany(sql, 'acme', 1)
  await sql`delete from pgboss.job where name = 'deliveries'`
  // It has been replayed after two attempts, and has failed three times since.
  await sql`
    update waybill.deliveries set status = 'retrying', attempt_count = 5, earlier_attempts = 2,
      updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
  await sql`update waybill.endpoint_stats set pending = 0, retrying = 1`
  const sweep = startSweep({ pool: openPool(), log: createLog('silent'), longestWaitSeconds: 0 })
  cleanUp(t, sweep.stop)
  await waitFor(async () => (await sql`select from waybill.deliveries where held`).length === 1, {
    what: 'it to be held',
  })
  await sql`
    select from waybill.endpoints e, waybill.release_held(array[e.tenant_id], array[e.endpoint_id], array[0], array[50], interval '1 minute')`
  assert.deepEqual([...(await sql`select retry_count from pgboss.job where name = 'deliveries'`)], [{ retry_count: 3 }])
})

test('more lost jobs than one look repairs are repaired without a rest', async (t) => {
  const { sql, openPool } = await createWithEndpoint(t)
  await publishMany(sql, 'acme', 1001)
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
  const sweep = startSweep({ pool: openPool(), log: createLog('silent'), longestWaitSeconds: 0 })
  cleanUp(t, sweep.stop)
  const held = async () => (await sql`select from waybill.deliveries where held`).length
  await waitFor(async () => (await held()) === 1001, { what: 'all to be held' })
})

test('a sweep through a long queue leaves the database nine tenths of the time', async (t) => {
  const { sql } = await createWithEndpoint(t)
  await publishMany(sql, 'acme', 1)
  const looks: number[] = []
  const pool = new Proxy(sql, {
    apply(pool, self, [text, ...values]) {
      const isLook = String(text).includes('sum(queued)')
      if (isLook) looks.push(performance.now())
      const asked = Reflect.apply(pool, self, [text, ...values])
      return isLook ? setTimeout(100).then(() => asked) : asked
    },
  })
  const sweeper = startSweep({ pool, log: createLog('silent'), longestWaitSeconds: 300 })
  cleanUp(t, sweeper.stop)
  await waitFor(() => looks.length === 2, { what: 'the second look' })
  const [first = 0, second = 0] = looks
  assert.ok(second - first >= 999, `the second came ${second - first} ms after the first`)
})

test('a probe that is due tomorrow, because the clock was ahead, is made now', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint(receiver.url())
  await tenant.publish()
  await sql`
    update waybill.endpoint_stats set breaker = 'open', breaker_since = now(), next_probe_at = now() + interval '1 day'
    where endpoint_id = ${endpoint_id}`
  await startService(t, { databaseUrl, mode: 'worker' })
  await receiver.until(1, { timeoutMs: 60_000 })
})

test('a replay whose job is lost is one attempt more, and leaves no gap', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint(receiver.url())
  const worker = await startService(t, { databaseUrl, mode: 'worker' })
  const id = (await tenant.publish()).delivery_ids[0]!
  await settled(sql)
  await worker.stop()
  await tenant.call('POST', `/v1/deliveries/${id}/replay`)
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
  await startService(t, { databaseUrl, mode: 'worker' })
  await settled(sql)
  const { data } = (await tenant.call('GET', `/v1/deliveries/${id}/attempts`)).body
  assert.deepEqual(
    data.map((row: { status_code: number }) => row.status_code),
    [200, 200],
  )
  await assertBooks(sql)
})

test('what was queued or given up on in a leap of the clock that nobody has seen comes now', async (t) => {
  const { sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  const pool = openPool()
  const mendClock = createClockMender(pool, 300)
  await mendClock()
  const [queued] = (await tenant.publish()).delivery_ids
  const [lost] = (await tenant.publish()).delivery_ids
  await sql`update pgboss.job set state = 'active', started_on = now(), retry_count = retry_limit where id = ${lost!}`
  await sql`select from waybill.fail_jobs('deliveries', array[${lost!}]::uuid[], null, array[${lost!} || ':14'])`
  await sql`update pgboss.job set start_after = now() + interval '1 day' where id = ${queued!} or name = 'dead_letters'`
  const ahead = () => sql`select name from pgboss.job where state < 'active' and start_after > now()`
  assert.equal((await ahead()).length, 2)
  await waitFor(
    async () => {
      await mendClock()
      return (await ahead()).length === 0
    },
    { what: 'both to be due' },
  )
})

test('all that comes from tomorrow is mended together, however much', async (t) => {
  const { sql } = await createWithEndpoint(t)
  await queueAt(sql, Array(2001).fill(1))
  await sql`update pgboss.job set start_after = now() + interval '1 day' where name = 'deliveries'`
  await createClockMender(sql, 300)()
  assert.deepEqual([...(await sql`select from pgboss.job where name = 'deliveries' and start_after > now()`)], [])
})

test('a first attempt that was queued tomorrow, because the clock was ahead, keeps its place', async (t) => {
  const { sql } = await createWithEndpoint(t)
  await queueAt(sql, [7])
  await sql`update pgboss.job set start_after = now() + interval '1 day' where name = 'deliveries'`
  await createClockMender(sql, 300)()
  const jobs = await sql`select priority, start_after <= now() as is_due from pgboss.job where name = 'deliveries'`
  assert.deepEqual([...jobs], [{ priority: -7, is_due: true }])
})

test('jobs are looked at whenever the clock has been set back, however slow that was before', async (t) => {
  const { sql } = await createWithEndpoint(t)
  let now = performance.now()
  t.mock.method(performance, 'now', () => now)
  const slow = new Proxy(sql, {
    get(pool, name) {
      if (name === 'begin') now += 1000
      return Reflect.get(pool, name)
    },
  })
  const mend = createClockMender(slow, 300)
  await mend()
  await queueAt(sql, [1])
  await sql`update pgboss.job set start_after = now() + interval '1 day' where name = 'deliveries'`
  const isDue = async () => (await sql`select from pgboss.job where start_after <= now()`).length > 0
  await mend()
  assert.equal(await isDue(), false, 'it is not time for another look')
  // Where the mender's clock goes on and the database's does not, that has been set back.
  now += 8000
  await mend()
  assert.equal(await isDue(), true)
})

test('a probe is not made sooner because it waits for longer than probes usually do, as for one that is under way', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const tenant = await createTenant(await startService(t, { databaseUrl, mode: 'api' }))
  await tenant.createEndpoint(receiver.url())
  await tenant.publish()
  await sql`
    update waybill.endpoint_stats set breaker = 'open', breaker_since = now(), next_probe_at = now() + interval '65 seconds'`
  // Mended after what concerns endpoints.
  await sql`update pgboss.version set cron_on = now() + interval '1 day'`
  await startService(t, { databaseUrl, mode: 'worker', env: { BREAKER_PROBE_MAX_SECONDS: '5' } })
  const ahead = () => sql`select from pgboss.version where cron_on > now() + interval '1 hour'`
  await waitFor(async () => (await ahead()).length === 0, { what: 'a sweep' })
  const [probe] = await sql`select next_probe_at > now() + interval '30 seconds' as waits from waybill.endpoint_stats`
  assert.equal(probe!.waits, true)
})

/** How many rows of deliveries were read so far; what these sessions have read is known. */
async function readBy(...sessions: Pool[]): Promise<number> {
  for (const session of sessions) await session`select pg_stat_force_next_flush()`
  const [row] = await sessions[0]!<[{ read: number }]>`
    select sum(idx_tup_fetch + seq_tup_read)::int as read from pg_stat_user_tables where relname ~ '^deliveries_(2|default)'`
  return row.read
}

test('a sweep reads each delivery that waits once, for however many endpoints, also by statistics of a shorter queue', async (t) => {
  const { openPool, newSession } = await createWithEndpoint(t)
  // Of one connection: what it has read must be known in time.
  const sql = newSession()
  await sql.text('vacuum analyze waybill.deliveries')
  await sql`
    with made as materialized (select gen_random_uuid() as endpoint_id, waybill.make_id(clock_timestamp()) as event_id from generate_series(1, 25000)
    ), counted as (
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending) select 'acme', endpoint_id, 1 from made
    )
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, updated_at, next_attempt_at)
    select 'acme', waybill.make_delivery_id(event_id), event_id, endpoint_id, 'a', now() - interval '1 minute', now() - interval '1 minute' from made`
  await sql`
    select waybill.enqueue_new(array_agg(tenant_id), array_agg(delivery_id), array_agg(1.0::float8), array_agg(false), null)
    from waybill.deliveries
    where delivery_id <> (select delivery_id from waybill.deliveries order by endpoint_id desc limit 1)`
  const pool = openPool()
  const before = await readBy(pool, sql)
  const sweep = startSweep({ pool, log: createLog('silent'), longestWaitSeconds: 0 })
  cleanUp(t, sweep.stop)
  const held = () => pool`select from waybill.endpoint_stats where held = 1`
  await waitFor(async () => (await held()).length === 1, { what: 'the lost one to be held' })
  const rows = (await readBy(pool, sql)) - before
  assert.ok(rows < 35_000, `${rows} of 25,000 were read`)
})

test('of two that sweep at once one reads nothing of what waits', async (t) => {
  const { openPool, newSession } = await createWithEndpoint(t)
  const sql = newSession()
  await publishMany(sql, 'acme', 20)
  await sql`update waybill.deliveries set updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
  const pool = openPool()
  let hasAsked = false
  const watched = (sql: Db) =>
    new Proxy(sql, {
      apply(sql, _, statement: [TemplateStringsArray]) {
        const asking = Reflect.apply(sql, null, statement) as Promise<unknown>
        return asking.finally(() => {
          hasAsked ||= statement[0].join('').includes('waybill.sweeping')
        })
      },
    })
  const watching = new Proxy(pool, {
    get(pool, name) {
      if (name !== 'begin') return Reflect.get(pool, name)
      return (run: (sql: Db) => Promise<unknown>) => pool.begin((sql) => run(watched(sql)))
    },
  })
  const before = await readBy(pool, sql)
  await newSession().begin(async (other) => {
    await other`select pg_advisory_xact_lock(hashtext('waybill.sweeping'))`
    const sweep = startSweep({ pool: watching, log: createLog('silent'), longestWaitSeconds: 0 })
    cleanUp(t, sweep.stop)
    await waitFor(() => hasAsked, { what: 'it to ask whether another one sweeps' })
  })
  assert.equal((await readBy(pool, sql)) - before, 0)
})
