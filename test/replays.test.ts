import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { type TestContext, test } from 'node:test'
import type { Db } from '../src/db/open.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { createDeadLetterTaker } from '../src/flow/dead-letter.ts'
import { createLog } from '../src/log.ts'
import { createAttempt } from './support/attempts.ts'
import { createDatabase, startBoss, waitingForLocks } from './support/database.ts'
import { queueAt, startFailing } from './support/queue.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

test('replays of a delivery that is locked keep one connection, and nobody who publishes, waiting', async (t) => {
  const { sql, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const { delivery_ids } = await tenant.publish()
  const id = delivery_ids[0] as string
  const lock = newSession()
  await lock`begin`
  await lock`select from waybill.deliveries where delivery_id = ${id} for update`

  const replays = Array.from({ length: 30 }, () => tenant.call('POST', `/v1/deliveries/${id}/replay`))
  await waitFor(() => waitingForLocks(sql, '%waybill.replay%'), { what: 'a replay to wait' })
  for (let nth = 0; nth < 5; nth++) await tenant.publish()
  assert.ok((await waitingForLocks(sql, '%waybill.replay%')) <= 1)

  await lock`commit`
  // On a slow machine the lock was held for longer than they have.
  for (const { status } of await Promise.all(replays)) assert.ok([202, 500, 503].includes(status), `${status}`)
  assert.equal((await tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202)
})

test('changes that wait for each other leave connections to everybody else', async (t) => {
  const { url: databaseUrl, sql, newSession } = await createDatabase(t)
  const service = await startService(t, { databaseUrl, mode: 'api' })
  const [busy, other] = [await createTenant(service), await createTenant(service)]
  const { endpoint_id } = await busy.createEndpoint('http://127.0.0.1:9/hook')
  const lock = newSession()
  await lock`begin`
  await lock`select from waybill.endpoints where endpoint_id = ${endpoint_id} for update`

  const description = (nth: number) => ({ body: { description: `the ${nth}th` } })
  const changes = Array.from({ length: 40 }, (_, nth) =>
    busy.call('PATCH', `/v1/endpoints/${endpoint_id}`, description(nth)),
  )
  await waitFor(() => waitingForLocks(sql, '%for update of p%'), { what: 'a change to wait' })
  for (let nth = 0; nth < 5; nth++) {
    await other.publish()
    await other.createEndpoint('http://127.0.0.1:9/hook')
  }
  assert.ok((await waitingForLocks(sql, '%for update of p%')) <= 3)
  await lock`commit`
  // On a slow machine the lock was held for longer than they wait for others, or than their statement may take.
  for (const { status } of await Promise.all(changes)) assert.ok([200, 500, 503].includes(status), `${status}`)
})

test('held deliveries are released although a replay of one of them and their release wait for each other', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint(receiver.url('/hook'))
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, breaker, next_probe_at) select tenant_id, endpoint_id, 'open', now() from waybill.endpoints`
  const [id] = (await tenant.publish()).delivery_ids
  // What a replay does: it locks the delivery, then the endpoint's counters.
  const worker = await sql.begin(async (replay) => {
    // The other one is to give way.
    await replay`set local deadlock_timeout = '1h'`
    await replay`select from waybill.deliveries where delivery_id = ${id!} for update`
    const worker = await startService(t, { databaseUrl, mode: 'worker' })
    await waitFor(() => waitingForLocks(sql, '%release_held%'), { what: 'the release to wait' })
    await replay`update waybill.endpoint_stats set probing = ${id!}`
    return worker
  })
  await receiver.until(1)
  assert.deepEqual(
    worker.logs.filter(({ level }) => level === 'error'),
    [],
  )
})

test('dead letters are taken although a replay of one of them and their taking wait for each other', async (t) => {
  const { databaseUrl: url, sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/hook')
  for (let nth = 0; nth < 3; nth++) await tenant.publish()
  const log = createLog('silent')
  const pool = openPool({ max: 2 })
  const boss = await startBoss(t, url)
  const { send: lost } = await createClaim(pool, 1000)({ kind: 'first', thorough: true, max: 10 })
  await sql`update pgboss.job set retry_limit = 0 where name = 'deliveries'`
  const ids = lost.map(({ deliveryId }) => deliveryId)
  await boss.fail('deliveries', ids)

  let taking: Promise<number> | undefined
  // What a replay does: it locks the delivery, then removes the failed job, which by then is locked by who takes it.
  const replaying = sql.begin(async (replay) => {
    await replay`select from waybill.deliveries where delivery_id = ${lost[1]!.deliveryId} for update`
    taking = createDeadLetterTaker(pool, boss, log)()
    await waitFor(() => waitingForLocks(sql), { what: 'the taking to wait' })
    await replay`delete from pgboss.job where name = 'deliveries' and id = ${lost[1]!.deliveryId} and state = 'failed'`
  })
  // Postgres ends one of the two.
  const [replayed] = await Promise.allSettled([replaying])
  await taking
  const dead = await sql`select from waybill.deliveries where dead_letter_reason = 'worker_lost'`
  assert.equal(dead.length, replayed.status === 'fulfilled' ? 2 : 3)
})

/** A tenant with an endpoint, and a delivery whose retry is due in an hour. */
async function startRetrying(t: TestContext) {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  const [id] = (await tenant.publish()).delivery_ids
  await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where id = ${id!}`
  await sql`update waybill.deliveries set status = 'retrying', next_attempt_at = now() + interval '1 hour'`
  return { sql, tenant, id: id! }
}

test('while a replayed retry is on its way to a failing endpoint, no other probe is due', async (t) => {
  const { sql, tenant, id: retried } = await startRetrying(t)
  await sql`
    update waybill.endpoint_stats set pending = 0, retrying = 1, breaker = 'open', breaker_since = now(), next_probe_at = now() + interval '1 second'`
  await tenant.publish()
  assert.equal((await tenant.call('POST', `/v1/deliveries/${retried}/replay`)).status, 202)
  const [standing] =
    await sql`select probing, next_probe_at > now() + interval '30 seconds' as waits from waybill.endpoint_stats`
  assert.deepEqual({ ...standing }, { probing: retried, waits: true })
})

test('while a probe is under way, for as long as an attempt may take, no other is due', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  receiver.script('/hook', () => new Promise<never>(() => {}))
  const tenant = await createTenant(await startService(t, { databaseUrl, mode: 'api' }))
  await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  await sql`update waybill.endpoint_stats set breaker = 'open', breaker_since = now(), next_probe_at = now()`
  await startService(t, { databaseUrl, mode: 'worker', env: { ATTEMPT_TIMEOUT_SECONDS: '60' } })
  await receiver.until(1)
  const [standing] =
    await sql`select next_probe_at > now() + interval '55 seconds' as waits from waybill.endpoint_stats`
  assert.equal(standing!.waits, true)
})

test('a replay of what waits for its retry says that it is due now', async (t) => {
  const { sql, tenant, id } = await startRetrying(t)
  const { body } = await tenant.call('POST', `/v1/deliveries/${id}/replay`)
  const [clock] = await sql`select now()`
  assert.ok(Date.parse(body.next_attempt_at) <= clock!.now.getTime(), body.next_attempt_at)
})

test('a replay that has waited for the record of an attempt is not dated before that attempt', async (t) => {
  const { sql, tenant, id } = await startRetrying(t)
  for (const status of ['retrying', 'dead_lettered']) {
    const replayed = await sql.begin(async (recording) => {
      await recording`select from waybill.deliveries where delivery_id = ${id} for update`
      const replaying = tenant.call('POST', `/v1/deliveries/${id}/replay`)
      await waitFor(() => waitingForLocks(sql), { what: 'the replay to wait' })
      await recording`
        update waybill.deliveries set status = ${status}::waybill.delivery_status, attempt_count = 1, last_attempt_at = clock_timestamp(),
          updated_at = clock_timestamp()`
      return { replaying }
    })
    const { body } = await replayed.replaying
    assert.ok(
      body.updated_at >= body.last_attempt_at,
      `${status}: updated at ${body.updated_at}, attempted at ${body.last_attempt_at}`,
    )
    assert.ok(body.next_attempt_at >= body.last_attempt_at, `${status}: ${body.next_attempt_at}`)
    await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where id = ${id}`
  }
})

test('a replay while a probe is under way leaves that the probe, and brings no other', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/never')
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, breaker, breaker_since, next_probe_at)
    values (${tenant.tenantId}, ${endpoint_id}, 'open', now(), now())`
  const ids: string[] = []
  for (let n = 0; n < 2; n++) ids.push(...(await tenant.publish()).delivery_ids)
  await sql`
    select released from waybill.release_held(array[${tenant.tenantId}], array[${endpoint_id}]::uuid[], array[0], array[1], interval '1 hour')`
  assert.equal((await tenant.call('POST', `/v1/deliveries/${ids[1]}/replay`)).status, 202)
  const [standing] = await sql`select probing, next_probe_at > now() as waits from waybill.endpoint_stats`
  assert.deepEqual({ ...standing }, { probing: ids[0], waits: true })
})

/** A delivery, and what takes its dead letter, which nobody else does. */
async function startTaking(t: TestContext) {
  const { databaseUrl: url, sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  const [id] = (await tenant.publish()).delivery_ids
  const log = createLog('silent')
  const pool = openPool({ max: 2 })
  const boss = await startBoss(t, url)
  const claim = async () => {
    const { send } = await createClaim(pool, 1000)({ kind: 'first', thorough: true, max: 1 })
    return send[0]!
  }
  const standing = async () =>
    (
      await sql`
        select d.status, d.held, j.state from waybill.deliveries d left join pgboss.job j on j.name = 'deliveries' and j.id = d.delivery_id`
    ).map((row) => ({ ...row }))
  return {
    sql,
    tenant,
    boss,
    claim: await claim(),
    claimAgain: claim,
    attempt: createAttempt(pool),
    replay: async () => assert.equal((await tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202),
    take: createDeadLetterTaker(pool, boss, log),
    standing,
  }
}

test('what is replayed before its dead letter is taken stays in the queue', async (t) => {
  const { sql, claim, attempt, replay, take, standing } = await startTaking(t)
  await sql`update pgboss.job set retry_limit = 0 where name = 'deliveries'`
  await attempt(claim, 500)
  assert.deepEqual(await standing(), [{ status: 'dead_lettered', held: false, state: null }])
  await replay()
  const queued = [{ status: 'pending', held: false, state: 'created' }]
  assert.deepEqual(await standing(), queued)
  assert.equal(await take(), 1)
  assert.deepEqual(await standing(), queued)
})

test('a delivery that is given up on again before its dead letter is taken is announced once', async (t) => {
  const { sql, tenant, claim, claimAgain, attempt, replay, take } = await startTaking(t)
  await tenant.createEndpoint('http://127.0.0.1:9/told', { subscribed_events: ['delivery.dead_lettered'] })
  await sql`update pgboss.queue set retry_limit = 0 where name = 'deliveries'`
  await sql`update pgboss.job set retry_limit = 0 where name = 'deliveries'`
  await attempt(claim, 500)
  await replay()
  await attempt(await claimAgain(), 500)
  assert.equal(await take(), 2)
  assert.equal((await sql`select from waybill.announcements`).length, 1)
})

test('what is replayed before it is dead-lettered for its lost worker is sent again', async (t) => {
  const { sql, boss, claim, replay, take, standing } = await startTaking(t)
  await sql`update pgboss.job set retry_limit = 0 where name = 'deliveries'`
  await boss.fail('deliveries', claim.deliveryId)
  await replay()
  assert.equal(await take(), 1)
  assert.deepEqual(await standing(), [{ status: 'pending', held: true, state: null }])
})

test('a replay of what an ordered endpoint is to get later has the one before it made now', async (t) => {
  const { sql, tenant, id: first } = await startRetrying(t)
  await sql`update waybill.endpoints set ordered = true`
  await sql`
    update waybill.endpoint_stats set pending = 0, retrying = 1, breaker = 'open', breaker_since = now(), next_probe_at = now() + interval '1 hour'`
  const [second] = (await tenant.publish()).delivery_ids
  assert.equal((await tenant.call('POST', `/v1/deliveries/${second}/replay`)).status, 202)
  const [standing] = await sql`
    select start_after <= now() as is_due, d.next_attempt_at <= now() as is_shown, probing, next_probe_at <= now() as is_wanted
    from waybill.deliveries d join pgboss.job j on j.name = 'deliveries' and j.id = d.delivery_id, waybill.endpoint_stats
    where d.delivery_id = ${first}`
  assert.deepEqual({ ...standing }, { is_due: true, is_shown: true, probing: null, is_wanted: true })
})

test('a replay of what has lost its job between two attempts leaves it the retries that it has', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false])
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set status = 'retrying', earlier_attempts = 3, attempt_count = 5`
  await sql`update waybill.endpoint_stats set breaker = 'closed', pending = 0, retrying = 1`
  await sql`select from waybill.replay('acme', ${ids[0]!})`
  assert.deepEqual([...(await sql`select held::int from waybill.endpoint_stats`)], [{ held: 1 }])
  await sql`select from waybill.release_held('{acme}', ${[endpoint]}::uuid[], '{0}', '{50}', interval '25 seconds')`
  assert.deepEqual([...(await sql`select retry_count from pgboss.job where name = 'deliveries'`)], [{ retry_count: 2 }])
})

test('a replay opens no day but that of its delivery', async (t) => {
  const { sql, newSession, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const { delivery_ids } = await tenant.publish()
  await sql`update waybill.deliveries set status = 'dead_lettered', completed_at = now()`
  const session = newSession()
  await session`begin`
  await session`select from waybill.replay(${tenant.tenantId}, ${delivery_ids[0] as string})`
  const days = await session`
    select distinct relation::regclass::text as name from pg_locks
    where pid = pg_backend_pid() and relation::regclass::text ~ '(events|deliveries)_\\d{8}$'`
  await session`rollback`
  assert.equal(days.length, 2)
})

for (const [what, stats, endpoints] of [
  ['inactive', "breaker = 'closed'", 'is_active = false'],
  ['ordered', "breaker = 'closed'", 'ordered = true'],
  ['paced', "breaker = 'closed'", 'max_per_second = 1'],
  ['failing', "breaker = 'open'", 'is_active = true'],
  ['recovering', "breaker = 'half_open', ramp = 2", 'is_active = true'],
] as const)
  test(`what is replayed for an endpoint that is ${what} waits in line, as if it had never been finished`, async (t) => {
    const { sql } = await createDatabase(t)
    const { ids } = await startFailing(sql, [false])
    await sql`delete from pgboss.job where name = 'deliveries'`
    await sql`
      update waybill.deliveries set status = 'dead_lettered', dead_letter_reason = 'retries_exhausted', completed_at = now(), spent_retries = 3,
        attempt_count = 4`
    await sql.text(`update waybill.endpoint_stats set ${stats}; update waybill.endpoints set ${endpoints}`)
    const [row] = await sql`
      select status, held, dead_letter_reason, completed_at, next_attempt_at, spent_retries from waybill.replay('acme', ${ids[0]!})`
    const untouched = { dead_letter_reason: null, completed_at: null, next_attempt_at: null, spent_retries: 0 }
    assert.deepEqual({ ...row }, { status: 'pending', held: true, ...untouched })
    assert.deepEqual([...(await sql`select held::int from waybill.endpoint_stats`)], [{ held: 1 }])
    assert.deepEqual([...(await sql`select id from pgboss.job where name = 'deliveries'`)], [])
  })

test('a replay for an ordered endpoint whose probe is due waits for nobody who has its counters', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { ids } = await startFailing(sql, [true])
  await sql`update waybill.endpoints set ordered = true`
  await sql`update waybill.endpoint_stats set next_probe_at = now()`
  await newSession().begin(async (other) => {
    await other`select from waybill.endpoint_stats for update`
    await sql.begin(async (tx) => {
      await tx`set local lock_timeout = '100ms'`
      assert.equal((await tx`select from waybill.replay('acme', ${ids[0]!})`).length, 1)
    })
  })
})

test('a replay of a retry of a failing endpoint has its next probe made no sooner', async (t) => {
  const { sql } = await createDatabase(t)
  const { ids } = await startFailing(sql, [false, true])
  await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where name = 'deliveries'`
  await sql`select from waybill.replay('acme', ${ids[0]!})`
  const [standing] =
    await sql`select probing, next_probe_at > now() + interval '50 minutes' as waits from waybill.endpoint_stats`
  assert.deepEqual({ ...standing }, { probing: ids[0], waits: true })
})

const carryOut = (db: Db, id: string) => db`select waybill.replay_as_requested('acme', ${id})`

test('a replay that was asked for during an attempt is carried out once by those who come to it together', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { ids } = await startFailing(sql, [false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where name = 'deliveries'`
  await sql`insert into waybill.replay_requests values ('acme', ${ids[0]!}, now())`
  const { second } = await sql.begin(async (first) => {
    await carryOut(first, ids[0]!)
    // By the time the second goes on, the attempt that was asked for is being made.
    await first`update pgboss.job set state = 'active' where name = 'deliveries'`
    const second = carryOut(newSession(), ids[0]!)
    await waitFor(() => waitingForLocks(sql, '%replay_as_requested%'), { what: 'the second to wait' })
    return { second }
  })
  await second
  assert.deepEqual([...(await sql`select from waybill.replay_requests`)], [])
})

test('a replay that is asked for while an older one is dropped is kept', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { ids } = await startFailing(sql, [false])
  await sql`update waybill.deliveries set last_attempt_at = now()`
  await sql`update pgboss.job set state = 'active' where name = 'deliveries'`
  await sql`insert into waybill.replay_requests values ('acme', ${ids[0]!}, now() - interval '1 minute')`
  const { dropping } = await sql.begin(async (replay) => {
    await replay`select from waybill.replay('acme', ${ids[0]!})`
    const dropping = carryOut(newSession(), ids[0]!)
    await waitFor(() => waitingForLocks(sql, '%replay_as_requested%'), { what: 'the dropping to wait' })
    return { dropping }
  })
  await dropping
  const [request] =
    await sql`select asked_at > last_attempt_at as is_open from waybill.replay_requests join waybill.deliveries using (delivery_id)`
  assert.deepEqual({ ...request }, { is_open: true })
})

test('a replay that was asked for during an attempt is not carried out while its success is recorded', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const { ids } = await startFailing(sql, [false])
  await sql`update pgboss.job set state = 'active' where name = 'deliveries'`
  await sql`insert into waybill.replay_requests values ('acme', ${ids[0]!}, now())`
  const { carrying } = await sql.begin(async (record) => {
    await record`update waybill.deliveries set status = 'delivered', completed_at = now(), last_attempt_at = now() - interval '1 second'`
    await record`delete from pgboss.job where name = 'deliveries'`
    const carrying = carryOut(newSession(), ids[0]!)
    await waitFor(() => waitingForLocks(sql, '%replay_as_requested%'), { what: 'the replay to wait' })
    return { carrying }
  })
  await carrying
  const [{ status }] = await sql<[{ status: string }]>`select status from waybill.deliveries`
  assert.equal(status, 'delivered')
  assert.deepEqual([...(await sql`select from waybill.replay_requests`)], [])
})

test('a replay that was asked for of what is gone meanwhile is not kept', async (t) => {
  const { sql } = await createDatabase(t)
  const id = randomUUID()
  await sql`insert into waybill.replay_requests values ('acme', ${id}, now())`
  await carryOut(sql, id)
  assert.deepEqual([...(await sql`select from waybill.replay_requests`)], [])
})

test('what is replayed once it is finished stands where claiming has got to, before what was published later', async (t) => {
  const { sql } = await createDatabase(t)
  const { ids } = await startFailing(sql, [false])
  await sql`delete from pgboss.job where name = 'deliveries'`
  await sql`update waybill.deliveries set status = 'delivered'`
  await sql`update waybill.endpoint_stats set breaker = 'closed', pending = 0, delivered = 1`
  await sql`update waybill.queue_clock set tag = 1000`
  await sql`update waybill.claim_marks set old_tag = 1000, next_tag = 1000, since = now()`
  await queueAt(sql, [1001])
  await sql`select from waybill.replay('acme', ${ids[0]!})`
  const claimed = await sql`select delivery_id from waybill.claim_due(false, false, 1, 1000)`
  assert.deepEqual([...claimed], [{ delivery_id: ids[0] }])
})

test('a replay of what is queued for a failing endpoint has that probed now, by whatever is held first', async (t) => {
  const { sql } = await createDatabase(t)
  const { ids } = await startFailing(sql, [true, false])
  await sql`select from waybill.replay('acme', ${ids[1]!})`
  assert.deepEqual(
    [...(await sql`select probing, next_probe_at <= now() as is_due from waybill.endpoint_stats`)],
    [{ probing: null, is_due: true }],
  )
})
