import assert from 'node:assert/strict'
import { suite, test } from 'node:test'
import { openDb, type Pool } from '../src/db/open.ts'
import { type Claim, isLate, LAPSE_MS, touch } from '../src/flow/claim.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { unclaim } from '../src/flow/give-back.ts'
import { createInHand } from '../src/flow/in-hand.ts'
import { startTakingBack } from '../src/flow/take-back.ts'
import { createLog } from '../src/log.ts'
import { DELIVERIES } from '../src/queue.ts'
import { createAttempt } from './support/attempts.ts'
import { cleanUp } from './support/cleanup.ts'
import { startBoss, waitingForLocks } from './support/database.ts'
import { assertBooks, publishMany } from './support/deliveries.ts'
import { startProxy } from './support/proxy.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const LOST = 'worker_lost'

test('what lost its worker is due at once; what loses one after the other waits, and is dead-lettered after the fifth', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint(receiver.url('/hook'))
  const cases = {
    'in the hands of a worker': { claims: 1, earlier: 0, failures: 0, silentSeconds: 0 },
    'lost once': { claims: 1, earlier: 0, failures: 0, silentSeconds: 11 },
    'lost twice': { claims: 2, earlier: 0, failures: 0, silentSeconds: 11 },
    'lost 3 times': { claims: 3, earlier: 0, failures: 0, silentSeconds: 11 },
    'lost 5 times': { claims: 5, earlier: 0, failures: 0, silentSeconds: 11 },
    'failed 5 times, then lost': { claims: 6, earlier: 0, failures: 5, silentSeconds: 11 },
    'failed, replayed, then lost once': { claims: 1, earlier: 5, failures: 0, silentSeconds: 11 },
    'failed, replayed, then lost 5 times': { claims: 5, earlier: 3, failures: 0, silentSeconds: 11 },
  }
  const ids: Record<string, string> = {}
  for (const [name, { claims, earlier, failures, silentSeconds }] of Object.entries(cases)) {
    const [id] = (await tenant.publish(name.replaceAll(/\W+/g, '-'))).delivery_ids
    ids[name] = id!
    // As if workers had claimed it so often, had recorded some of the attempts, and were gone.
    await sql`
      update pgboss.job set state = 'active', started_on = now(), retry_count = ${claims - 1}, retry_delay = 60,
        heartbeat_on = now() - ${silentSeconds} * interval '1 second' where name = 'deliveries' and id = ${id!}`
    await sql`
      insert into waybill.attempts (tenant_id, delivery_id, endpoint_id, url, attempt_number, status_code, error, response_truncated, duration_ms, retry_state, started_at)
      select tenant_id, delivery_id, endpoint_id, 'http://x', n, 500, 'http_status', false, 1, 'will_retry', now()
      from waybill.deliveries, generate_series(1, ${earlier + failures}::int) n where delivery_id = ${id!}`
    await sql`update waybill.deliveries set attempt_count = ${earlier + failures}, earlier_attempts = ${earlier} where delivery_id = ${id!}`
  }
  await sql`
    insert into waybill.attempt_counts (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
    select tenant_id, endpoint_id, date_trunc('hour', now(), 'utc'), status_code, count(*), count(*) filter (where attempt_number > 1), sum(duration_ms)
    from waybill.attempts group by 1, 2, 3, 4`

  const touching = setInterval(async () => {
    await sql`update pgboss.job set heartbeat_on = now() where id = ${ids['in the hands of a worker']!}`
  }, 1000)
  t.after(() => clearInterval(touching))
  const worker = await startService(t, { databaseUrl, mode: 'worker' })
  const attemptsOf = async (name: string) => {
    const rows = (await tenant.call('GET', `/v1/deliveries/${ids[name]}/attempts`)).body.data
    return rows.map((row: { status_code: number; error: string }) => row.status_code ?? row.error)
  }
  const becomes = (name: string, status: string) =>
    waitFor(async () => (await tenant.call('GET', `/v1/deliveries/${ids[name]}`)).body.status === status, {
      what: `what was ${name} to be ${status}`,
    })
  for (const name of ['lost once', 'lost twice', 'failed 5 times, then lost', 'failed, replayed, then lost once'])
    await becomes(name, 'delivered')
  assert.deepEqual(await attemptsOf('lost once'), [LOST, 200])
  assert.deepEqual(await attemptsOf('lost twice'), [LOST, LOST, 200])
  assert.deepEqual(await attemptsOf('failed 5 times, then lost'), [500, 500, 500, 500, 500, LOST, 200])
  assert.deepEqual(await attemptsOf('failed, replayed, then lost once'), [500, 500, 500, 500, 500, LOST, 200])
  await becomes('lost 5 times', 'dead_lettered')
  assert.deepEqual(await attemptsOf('lost 5 times'), [LOST, LOST, LOST, LOST, LOST])
  await becomes('failed, replayed, then lost 5 times', 'dead_lettered')
  const ofReplayed = await attemptsOf('failed, replayed, then lost 5 times')
  assert.deepEqual(ofReplayed, [500, 500, 500, LOST, LOST, LOST, LOST, LOST])

  const jobOf = async (name: string) =>
    (
      await sql`
        select state, retry_count, start_after > now() + interval '1 minute' as waits, priority = waybill.retry_priority(start_after) as in_place
        from pgboss.job where name = 'deliveries' and id = ${ids[name]!}`
    )[0]
  assert.deepEqual(
    { ...(await jobOf('lost 3 times')) },
    { state: 'retry', retry_count: 2, waits: true, in_place: true },
  )
  const { next_attempt_at } = (await tenant.call('GET', `/v1/deliveries/${ids['lost 3 times']}`)).body
  assert.ok(Date.parse(next_attempt_at) > Date.now() + 60_000, 'its record says when it is due')
  assert.deepEqual(await attemptsOf('lost 3 times'), [LOST, LOST, LOST])
  const recorded = (await tenant.call('GET', `/v1/deliveries/${ids['lost 3 times']}/attempts`)).body.data
  assert.equal(recorded.at(-1).next_attempt_at, next_attempt_at)
  assert.equal(receiver.receipts.length, 4)
  clearInterval(touching)
  await worker.kill()
  await assertBooks(sql)
})

test('what was claimed when the last worker was lost hours ago is sent by the next one', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint(receiver.url('/hook'))
  for (const count of [1, 3]) await publishMany(sql, tenant.tenantId, count)
  await sql`
    update pgboss.job set state = 'active', started_on = now() - interval '3 hours', heartbeat_on = now() - interval '3 hours' where name = 'deliveries'`
  await startService(t, { databaseUrl, mode: 'worker' })
  await receiver.until(4)
})

test('what is under way while the database’s clock leaps ahead by days is not taken for lost', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl: url, sql, tenant } = await startTenant(t)
  const { reply, open } = gate()
  receiver.script('/busy', reply)
  await tenant.createEndpoint(receiver.url('/busy'))
  const { delivery_ids } = await tenant.publish()
  await receiver.until(1)
  const boss = await startBoss(t, url)
  // As if it were a week ahead now. A leap by less is noticed by what takes back, which then waits for claims to be touched.
  await sql`
    update pgboss.job set started_on = started_on - interval '7 days', heartbeat_on = now() where name = ${DELIVERIES}`
  await sql`update pgboss.queue set monitor_on = null where name = ${DELIVERIES}`
  await boss.supervise(DELIVERIES)
  const [job] = await sql`select state from pgboss.job where name = ${DELIVERIES}`
  assert.equal(job?.state, 'active')
  open()
  await waitFor(async () => (await tenant.call('GET', `/v1/deliveries/${delivery_ids[0]}`)).body.status === 'delivered')
  assert.equal(receiver.receipts.length, 1)
})

suite('workers have time to touch their claims', { concurrency: 3 }, () => {
  type Tools = { sql: Pool; database: string; proxy: Awaited<ReturnType<typeof startProxy>> }
  const absences: Record<
    string,
    { begin: (tools: Tools) => Promise<unknown>; end: (tools: Tools) => Promise<unknown> }
  > = {
    away: { begin: ({ proxy }) => proxy.cut(), end: ({ proxy }) => proxy.restore() },
    locked: {
      begin: ({ sql }) => sql.text('begin; lock table pgboss.job in share row exclusive mode'),
      end: ({ sql }) => sql`commit`,
    },
    'read-only': {
      begin: ({ sql, database }) => sql.text(`alter database "${database}" set default_transaction_read_only = on`),
      end: async ({ sql, database, proxy }) => {
        await sql.text(`alter database "${database}" reset default_transaction_read_only`)
        // It is for new connections.
        await proxy.restore()
      },
    },
  }
  for (const [what, { begin, end }] of Object.entries(absences))
    test(`before anything is taken back after the database was ${what}`, async (t) => {
      const { databaseUrl: url, sql, tenant } = await startTenant(t, { mode: 'api' })
      await tenant.createEndpoint('http://127.0.0.1:9/')
      await tenant.publish()
      await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 1 })
      await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = ${DELIVERIES}`
      const proxy = await startProxy(t, url)
      const pool = openDb(proxy.url, { log: createLog('silent'), name: 'test', max: 1 })
      const tools = { sql, proxy, database: new URL(url).pathname.slice(1) }
      await begin(tools)
      let failedAt = 0
      const log = Object.assign(createLog('silent'), { error: () => (failedAt ||= performance.now()) })
      const loop = startTakingBack({ pool, wake: () => {}, log })
      cleanUp(t, async () => {
        await loop.stop()
        await pool.end()
      })
      // Just before a wait that began with the first failure would end.
      await waitFor(() => failedAt > 0 && performance.now() > failedAt + 4800, { timeoutMs: 30_000 })
      await end(tools)
      const endedAt = performance.now()
      const isTaken = async () =>
        (await sql`select from pgboss.job where name = ${DELIVERIES} and state = 'retry'`).length === 1
      await waitFor(isTaken, { timeoutMs: 30_000, intervalMs: 20 })
      assert.ok(performance.now() > endedAt + 3000, 'workers touch their claims every three seconds')
    })
})

test('a table that is locked for a moment, as vacuum does to cut off its end, is no absence', async (t) => {
  const { sql, databaseUrl: url, newSession } = await startTenant(t, { mode: 'api' })
  const session = newSession()
  const log = createLog('silent')
  const errors: unknown[] = []
  const telling = Object.assign(createLog('silent'), { error: (line: unknown) => errors.push(line) })
  const pool = openDb(url, { log, name: 'test', max: 1 })
  await session.text('begin; lock table pgboss.job in access exclusive mode')
  const loop = startTakingBack({ pool, wake: () => {}, log: telling })
  cleanUp(t, async () => {
    await loop.stop()
    await pool.end()
  })
  await waitFor(async () => errors.length > 0 || (await waitingForLocks(sql, 'do %')) > 0, { intervalMs: 1 })
  await session`commit`
  assert.deepEqual(errors, [])
})

test('a claim that is taken back while its touch waits for the database is late', async (t) => {
  const { sql, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  await tenant.publish()
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 1 })
  const claim = send[0] as Claim
  claim.touchedAt = performance.now() - LAPSE_MS + 200
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = ${DELIVERIES}`
  const claims = newSession()
  await sql
    .begin(async (other) => {
      await other`select pg_advisory_xact_lock(1)`
      const touching = [claims`select pg_advisory_lock(1)`, touch(claims, [claim])]
      await waitFor(() => isLate(claim), { what: 'it to lapse' })
      assert.equal((await sql`select from waybill.take_back('10 seconds', 3, 5, 500, true)`).length, 1)
      return { touching }
    })
    .then(({ touching }) => Promise.all(touching))
  assert.ok(isLate(claim), 'sent, it would arrive twice')
})

test('no more bundles are taken apart than hold what is taken back', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  await publishMany(sql, tenant.tenantId, 1600)
  await sql`
    update pgboss.job set state = 'active', started_on = now(), heartbeat_on = now() - interval '20 seconds' where name = 'deliveries'`
  const bundles = async () => (await sql`select from pgboss.job where name = 'deliveries' and data ? 'ids'`).length
  const takeBack = () => sql`select from waybill.take_back(interval '10 seconds', 3, 5, 160, false)`
  const before = await bundles()
  assert.ok(before >= 100)
  assert.equal((await takeBack()).length, 160)
  assert.equal(await bundles(), before - 10)
  let rest = 0
  for (let taken = 160; taken > 0; rest += taken) taken = (await takeBack()).length
  assert.deepEqual([rest, await bundles()], [1440, 0])
})

test('what a worker cannot put away does not keep it from putting others away', async (t) => {
  const receiver = await startReceiver(t)
  const { reply, open } = gate()
  receiver.script('/half-open', reply)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const halfOpen = await tenant.createEndpoint(receiver.url('/half-open'))
  const inactive = await tenant.createEndpoint(receiver.url('/inactive'))
  for (const n of [1, 2, 3]) await tenant.publish('a.b', { n })
  // It takes one, so two are to be held: which the database refuses. Of the other one all three are to be.
  await sql`update waybill.endpoint_stats set breaker = 'half_open', ramp = 1 where endpoint_id = ${halfOpen.endpoint_id}`
  await tenant.call('PATCH', `/v1/endpoints/${inactive.endpoint_id}`, { body: { is_active: false } })
  await sql.text(`
    create function refuse() returns trigger language plpgsql as $$ begin raise 'it cannot be held'; end $$;
    create trigger refuse before update on waybill.deliveries for each row
      when (new.held and new.endpoint_id = '${halfOpen.endpoint_id}') execute function refuse()`)
  const worker = await startService(t, { databaseUrl, mode: 'worker' })
  await worker.logged('hold.waiting')
  const held = async () =>
    (await sql`select from waybill.deliveries where held and endpoint_id = ${inactive.endpoint_id}`).length
  // The others are tried again for much longer than this waits.
  await waitFor(async () => (await held()) === 3, { what: 'those of the inactive endpoint to be held' })
  // It locks each partition, and may be the victim of a deadlock with what the worker does.
  await waitFor(() => sql.text('drop trigger if exists refuse on waybill.deliveries').then(() => true))
  open()
  await receiver.until(3)
  const usage = await sql`select count::int from waybill.usage where metric = 'attempts'`
  assert.deepEqual([...usage], [{ count: 3 }], 'what was put away is not counted')
})

for (const [lapsed, current, firstToEnd] of [
  [200, 200, 'first'],
  [200, 200, 'second'],
  [200, 500, 'first'],
  [200, 500, 'second'],
  [500, 200, 'first'],
  [500, 200, 'second'],
  [500, 500, 'first'],
  [500, 500, 'second'],
] as const)
  test(`of a delivery that a worker has claimed twice, only the second attempt is stored (${lapsed}, then ${current}; the ${firstToEnd} ends first)`, async (t) => {
    const { sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
    await tenant.createEndpoint('http://127.0.0.1:9/never')
    // One by one: what is published together shares a job.
    for (let n = 0; n < 3; n++) await publishMany(sql, tenant.tenantId, 1)
    const pool = openPool({ max: 2 })
    const claim = createClaim(pool, 1e9)
    const due = async (kind: 'first' | 'retry') => (await claim({ kind, thorough: true, max: 10 })).send
    const [first, other] = (await due('first')) as [Claim, Claim]
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${first.deliveryId}`
    await sql`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`
    const [second] = [...(await due('first')), ...(await due('retry'))] as [Claim]
    assert.equal(second.deliveryId, first.deliveryId)

    const attempt = createAttempt(pool)
    const inOrder = [() => attempt(first, lapsed), () => attempt(second, current)]
    if (firstToEnd === 'second') inOrder.reverse()
    // The first one is alone; what comes meanwhile is one batch.
    const ends = await Promise.all([attempt(other, 200), ...inOrder.map((end) => end())])
    assert.deepEqual(
      ends.map(({ settled }) => settled),
      firstToEnd === 'first' ? [true, false, true] : [true, true, false],
    )
    const stored = await sql`
      select attempt_number, status_code from waybill.attempts where delivery_id = ${first.deliveryId} order by 1`
    assert.deepEqual(
      stored.map((row) => ({ ...row })),
      [
        { attempt_number: 1, status_code: null },
        { attempt_number: 2, status_code: current },
      ],
    )
    await assertBooks(sql)
  })

test('a hold that is tried again leaves alone what has been released and claimed since', async (t) => {
  const { sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/never')
  await publishMany(sql, tenant.tenantId, 1)
  const pool = openPool({ max: 2 })
  const claim = createClaim(pool, 1e9)
  const claimOne = async () => (await claim({ kind: 'first', thorough: true, max: 10 })).send[0] as Claim
  const first = await claimOne()
  const { promise: held, resolve: isHeld } = Promise.withResolvers<void>()
  const { promise: claimedAgain, resolve: goOn } = Promise.withResolvers<void>()
  let tries = 0
  const losing = async (parts: TemplateStringsArray, ...values: never[]) => {
    if (tries++ > 0) return await pool(parts, ...values)
    await pool(parts, ...values)
    isHeld()
    await claimedAgain
    throw Object.assign(new Error('the answer is lost'), { code: 'CONNECTION_CLOSED' })
  }
  const inHand = createInHand({
    pool: losing as unknown as Pool,
    slots: 5,
    closing: new AbortController().signal,
    log: createLog('silent'),
  })
  inHand.take(first, () => () => {})
  const holding = inHand.hold([first], { counted: true })
  await held
  await sql`select * from waybill.release_held(array[${tenant.tenantId}], array[${endpoint_id}]::uuid[], array[0], array[5], '10 seconds')`
  assert.equal((await claimOne()).deliveryId, first.deliveryId)
  goOn()
  await holding
  assert.equal(tries, 2)
  const [state] = await sql`
    select d.held, j.state, (select count::int from waybill.usage where metric = 'attempts') as usage
    from waybill.deliveries d left join pgboss.job j on j.id = d.delivery_id`
  assert.deepEqual({ ...state }, { held: false, state: 'active', usage: 1 })
})

test('who puts several claims away locks their jobs in one order, whichever it is given', async (t) => {
  const { sql, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  for (let n = 0; n < 2; n++) await tenant.publish()
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 2 })
  const [first, second] = send.sort((a, b) => (a.deliveryId < b.deliveryId ? -1 : 1)) as [Claim, Claim]
  const { putting } = await sql.begin(async (other) => {
    await other`select from pgboss.job where id = ${first.deliveryId} for update`
    const putting = unclaim(newSession(), [second, first])
    putting.catch(() => {})
    await waitFor(() => waitingForLocks(sql), { what: 'it to wait' })
    await other`select from pgboss.job where id = ${second.deliveryId} for update nowait`
    return { putting }
  })
  await putting
  assert.deepEqual(
    [...(await sql`select state::text, count(*)::int from pgboss.job where name = ${DELIVERIES} group by 1`)],
    [{ state: 'created', count: 2 }],
  )
})

test('what was claimed without being counted against the month is not taken off its count either', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  for (let n = 0; n < 2; n++) await tenant.publish()
  const used = async () => (await sql`select count::int from waybill.usage where metric = 'attempts'`)[0]?.count
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 2 })
  assert.equal(await used(), 2)
  const [counted, uncounted] = send as [Claim, Claim]
  // As if its tenant were crowding the retries.
  await unclaim(sql, [{ ...uncounted, withinQuota: null }])
  assert.equal(await used(), 2)
  await unclaim(sql, [counted])
  assert.equal(await used(), 1)
})

test('an attempt that lost its worker is shown also when the month has no other left', async (t) => {
  const receiver = await startReceiver(t)
  const env = { MONTHLY_ATTEMPT_LIMIT: '1' }
  const { databaseUrl, sql, openPool, tenant } = await startTenant(t, { mode: 'api', env })
  await tenant.createEndpoint(receiver.url('/hook'))
  const [id] = (await tenant.publish()).delivery_ids
  const pool = openPool()
  const { send } = await createClaim(pool, 1)({ kind: 'first', thorough: true, max: 1 })
  assert.equal(send[0]?.withinQuota, true)
  await startService(t, { databaseUrl, mode: 'worker', env })
  const dead = await waitFor(
    async () => {
      const { body } = await tenant.call('GET', `/v1/deliveries/${id}`)
      return body.status === 'dead_lettered' && body
    },
    { timeoutMs: 60_000 },
  )
  assert.deepEqual(
    [dead.dead_letter_reason, dead.attempt_count, dead.last_error],
    ['monthly_attempt_limit', 1, 'worker_lost'],
  )
  const { data } = (await tenant.call('GET', `/v1/deliveries/${id}/attempts`)).body
  assert.deepEqual(
    data.map((attempt: Record<string, unknown>) => [attempt.error, attempt.retry_state, attempt.next_attempt_at]),
    [[LOST, 'exhausted', null]],
  )
  assert.equal(receiver.receipts.length, 0)
  await assertBooks(sql)
})

test('who records late that the month allowed no attempt leaves alone the replay that has been claimed since', async (t) => {
  const { sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  const [id] = (await tenant.publish()).delivery_ids
  const pool = openPool({ max: 2 })
  const claim = createClaim(pool, 1e9)
  const attempt = createAttempt(pool)
  const claimOne = async () => (await claim({ kind: 'first', thorough: true, max: 1 })).send[0] as Claim

  await sql`update waybill.tenants set limits = '{"monthly_attempts": 0}'`
  const late = await claimOne()
  assert.equal(late.withinQuota, false)
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = 'deliveries'`
  assert.equal((await sql`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`).length, 1)
  await sql`update waybill.tenants set limits = '{}'`
  assert.equal((await attempt(await claimOne(), 200)).settled, true)
  assert.equal((await tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202)
  const replayed = await claimOne()
  assert.deepEqual([replayed.retryCount, replayed.attemptNumber], [late.retryCount, 3])

  assert.equal((await attempt(late, null)).settled, false)
  assert.equal((await attempt(replayed, 200)).settled, true)
  const { status, attempt_count } = (await tenant.call('GET', `/v1/deliveries/${id}`)).body
  assert.deepEqual([status, attempt_count], ['delivered', 3])
  await assertBooks(sql)
})

test('nobody takes back what the month allowed no attempt while that is being recorded', async (t) => {
  const { sql, openPool, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  for (let i = 0; i < 2; i++) await tenant.publish()
  const pool = openPool({ patienceMs: 60_000 })
  await sql`update waybill.tenants set limits = '{"monthly_attempts": 1}'`
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 2 })
  const [failed, forbidden] = send as [Claim, Claim]
  assert.deepEqual([failed.bundle, failed.withinQuota, forbidden.withinQuota], [null, true, false])
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${forbidden.deliveryId}`

  const { promise: released, resolve: release } = Promise.withResolvers<void>()
  const { promise: locked, resolve: isLocked } = Promise.withResolvers<void>()
  const locking = newSession().begin(async (own) => {
    await own`select from pgboss.job where id = ${failed.deliveryId} for update`
    isLocked()
    await released
  })
  await locked
  const attempt = createAttempt(pool)
  const recorded = Promise.all([attempt(failed, 500), attempt(forbidden, null)])
  await waitFor(() => waitingForLocks(sql))
  const back = await sql`select delivery_id from waybill.take_back('10 seconds', 3, 5, 10, true)`
  release()
  await locking
  assert.deepEqual(back, [])
  assert.deepEqual(
    (await recorded).map(({ settled }) => settled),
    [true, true],
  )
  await assertBooks(sql)
})
