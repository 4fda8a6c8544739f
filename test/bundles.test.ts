import assert from 'node:assert/strict'
import { suite, type TestContext, test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { type Claim, touch } from '../src/flow/claim.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { fromClaims, unbundle, unclaim } from '../src/flow/give-back.ts'
import { createAttempt } from './support/attempts.ts'
import { assertBooks, publishMany, settled } from './support/deliveries.ts'
import { gate, type Reply, startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** A tenant whose endpoint is at a receiver; workers come as the test says. */
async function start(t: TestContext, env: Record<string, string> = {}) {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, openPool, service: api, tenant } = await startTenant(t, { mode: 'api', env })
  const endpoint = await tenant.createEndpoint(receiver.url('/hook'))
  const pool = openPool({ max: 2 })
  return {
    databaseUrl,
    sql,
    api,
    receiver,
    tenant,
    endpoint,
    pool,
    publish: (count: number) => publishMany(sql, tenant.tenantId, count),
    claim: createClaim(pool, 1e9),
    startWorker: () => startService(t, { databaseUrl, mode: 'worker', env }),
  }
}

type Job = { id: string; ids: string[] | null; state: string; priority: number }

const jobs = (sql: Pool): Promise<Job[]> => sql<Job[]>`
  select id, data -> 'ids' as ids, state::text, priority from pgboss.job where name = 'deliveries' order by priority desc, created_on, id`

/** Nothing is sent twice, all is delivered, and no job is left. */
async function assertDeliveredOnce({ sql, receiver }: Awaited<ReturnType<typeof start>>, count: number): Promise<void> {
  await settled(sql)
  const ids = receiver.at('/hook').map(({ headers }) => headers['service-delivery-id'])
  assert.deepEqual([ids.length, new Set(ids).size], [count, count])
  await waitFor(async () => (await jobs(sql)).length === 0, { timeoutMs: 15_000, what: 'no job to be left' })
  await assertBooks(sql)
}

suite('bundles', { concurrency: 2 }, () => {
  test('deliveries of a tenant that are published together share jobs by sixteen; what is alone has its own', async (t) => {
    const { sql, tenant, publish } = await start(t)
    await publish(35)
    const bundled = await jobs(sql)
    assert.deepEqual(bundled.map(({ ids }) => ids?.length).sort(), [16, 16, 3])
    const deliveries = await sql`select delivery_id, bundle from waybill.deliveries order by delivery_id`
    for (const { id, ids } of bundled)
      assert.deepEqual(
        deliveries.filter(({ bundle }) => bundle === id).map((row) => row.delivery_id),
        ids,
      )

    const { delivery_ids } = await tenant.publish()
    const own = (await jobs(sql)).find(({ ids }) => ids === null)
    assert.equal(own?.id, delivery_ids[0])
  })

  test('what stands at different places in the queue is not bundled, nor what is of different tenants', async (t) => {
    const { sql, api, publish } = await start(t)
    await publish(100)
    const tags = await sql<{ id: string; place: number }[]>`
      select id, floor((data ->> 'tag')::float8)::int as place from pgboss.job where name = 'deliveries'`
    // Sixty-four to a place, and the first at the second step of one.
    assert.deepEqual(tags.map(({ place }) => place).sort(), [0, 0, 0, 0, 1, 1, 1])
    // Two who have published nothing stand at the same place.
    const others = [await createTenant(api), await createTenant(api)]
    for (const other of others) await other.createEndpoint('http://127.0.0.1:9/never')
    const ids = others.map(({ tenantId }) => tenantId)
    await sql`
      select from waybill.publish(${[...ids, ...ids]}::text[],
        array_fill('thing.happened'::text, array[4]), array_fill('{}'::text, array[4]), array_fill(null::text, array[4]),
        '{"rate":0,"window_seconds":60,"fanout":100,"monthly_events":1000000,"monthly_attempts":1000000}')`
    const shared = await sql`
      select priority, array(select distinct tenant_id from waybill.deliveries where bundle = id) as tenants, jsonb_array_length(data -> 'ids') as size
      from pgboss.job where name = 'deliveries' and data ->> 'tenant_id' = any(${ids}::text[])`
    assert.deepEqual(shared.map(({ tenants }) => tenants).sort(), ids.map((id) => [id]).sort())
    assert.deepEqual([shared[0]?.size, shared[1]?.size, shared[0]?.priority], [2, 2, shared[1]?.priority])
  })

  test('what is released together shares jobs, though the rest of the bundle that it was in is under way; a retry has its own', async (t) => {
    const { sql, tenant, endpoint, pool, publish, claim } = await start(t)
    await publish(16)
    const { send: claims } = await claim({ kind: 'first', thorough: true, max: 16 })
    // The first one gave the bundle its id, and would give the next one the same.
    await pool`
      select waybill.hold_claims(array_agg(tenant_id), array_agg(c.id), array_agg(endpoint_id), array_agg(bundle), array_agg(n), true)
      ${fromClaims(claims.slice(0, 11))}`
    const held = claims.slice(0, 11).map(({ deliveryId }) => deliveryId)
    const [first, retried, ...rest] = held
    await sql`update waybill.deliveries set spent_retries = 1 where delivery_id = ${retried!}`
    const released = await sql`
      select released from waybill.release_held(array[${tenant.tenantId}], array[${endpoint.endpoint_id}]::uuid[], array[0], array[50], interval '1 hour')`
    assert.deepEqual(released, [{ released: 11 }])

    assert.deepEqual((await jobs(sql)).map(({ ids, state }) => [ids?.length ?? 1, state]).sort(), [
      [1, 'created'],
      [10, 'created'],
      [5, 'active'],
    ])
    const again = await claim({ kind: 'first', thorough: true, max: 100 })
    assert.deepEqual(
      again.send.map(({ deliveryId }) => deliveryId),
      [first, ...rest],
    )
    assert.ok(again.send.every(({ attemptNumber }) => attemptNumber === 1))
  })

  test('a claim takes no more than was asked for; the rest of a bundle waits in its place', async (t) => {
    const { sql, publish, claim } = await start(t)
    await publish(32)
    const [{ priority } = { priority: 0 }] = await jobs(sql)
    const moments = () => sql`select distinct created_on from pgboss.job where name = 'deliveries' order by 1`
    const before = await moments()
    const first = await claim({ kind: 'first', thorough: true, max: 10 })
    assert.deepEqual([first.send.length, first.more], [10, true])
    const left = (await jobs(sql)).filter(({ ids, state }) => ids === null && state === 'created')
    assert.deepEqual(
      left.map((job) => job.priority),
      Array(6).fill(priority),
    )
    assert.deepEqual(await moments(), before)
    const rest = await claim({ kind: 'first', thorough: true, max: 100 })
    assert.deepEqual([rest.send.length, rest.more], [22, false])
    const all = [...first.send, ...rest.send]
    assert.equal(new Set(all.map(({ deliveryId }) => deliveryId)).size, 32)
    // As if they had not been claimed before.
    assert.ok(all.every(({ attemptNumber }) => attemptNumber === 1))
  })

  test('claims at once take different deliveries, whatever their jobs hold', async (t) => {
    const { publish, claim } = await start(t)
    for (const count of [40, 1, 16, 5, 1, 33]) await publish(count)
    const found = await Promise.all([1, 2].map(() => claim({ kind: 'first', thorough: true, max: 60 })))
    const rest = await claim({ kind: 'first', thorough: true, max: 100 })
    const all = [...found, rest].flatMap(({ send }) => send.map(({ deliveryId }) => deliveryId))
    assert.deepEqual([all.length, new Set(all).size], [96, 96])
  })

  test('a claim that finds others claimed gives whole bundles back as they were', async (t) => {
    const { sql, publish, claim } = await start(t)
    for (let n = 0; n < 20; n++) await publish(1)
    await publish(80)
    const bundles = (await jobs(sql)).filter(({ ids }) => ids !== null)
    const claimed = await sql.begin(async (other) => {
      await other`select from pgboss.job where name = 'deliveries' and not data ? 'ids' for update`
      return await claim({ kind: 'first', thorough: true, max: 20 })
    })
    assert.deepEqual([claimed.send.length, claimed.more], [20, true])
    const oldest = bundles.flatMap(({ ids }) => ids).sort()
    assert.deepEqual(
      claimed.send.map(({ deliveryId }) => deliveryId),
      oldest.slice(0, 20),
    )
    const left = (await jobs(sql)).filter(({ state }) => state === 'created')
    const whole = left.filter(({ ids }) => ids !== null)
    assert.ok(
      whole.length >= 3 &&
        whole.every((job) => bundles.some(({ id, ids }) => id === job.id && ids?.length === job.ids?.length)),
    )
    // Twenty that the other has, and sixty of the eighty.
    assert.equal(left.flatMap(({ id, ids }) => ids ?? id).length, 80)
    assert.ok(left.length - whole.length < 20 + 16)
    assert.equal((await sql`select from pgboss.job where state = 'created' and started_on is not null`).length, 0)
  })

  test('claims that are handed back are due again, each as it was, and others of the bundle stay claimed', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(16)
    const { send } = await claim({ kind: 'first', thorough: true, max: 100 })
    await unclaim(pool, send.slice(0, 6))
    await unclaim(pool, send.slice(0, 6))
    assert.deepEqual((await jobs(sql)).map(({ ids, state }) => [ids?.length ?? 1, state]).sort(), [
      ...Array(6).fill([1, 'created']),
      [10, 'active'],
    ])
    const again = await claim({ kind: 'first', thorough: true, max: 100 })
    assert.deepEqual(
      again.send.map(({ deliveryId, attemptNumber }) => [deliveryId, attemptNumber]),
      send.slice(0, 6).map(({ deliveryId }) => [deliveryId, 1]),
    )
    const [{ count } = { count: 0 }] = await sql<{ count: number }[]>`
      select count::int from waybill.usage where metric = 'attempts'`
    assert.equal(count, 16)
  })

  test('claims that are given back for some seconds are due within the last of them, as retries, have used none, and say so', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(40)
    const { send } = await claim({ kind: 'first', thorough: true, max: 100 })
    await unclaim(pool, send, 30)
    const waits = await sql<{ state: string; retries: number; seconds: number; as_told: boolean; is_retry: boolean }[]>`
      select j.state::text, j.retry_count as retries, extract(epoch from j.start_after - d.updated_at)::float8 as seconds,
        j.start_after = next_attempt_at as as_told, priority <= waybill.first_retry() as is_retry
      from waybill.deliveries d cross join lateral (
        select * from pgboss.job j where j.name = 'deliveries' and j.id = d.delivery_id) j`
    assert.equal(waits.length, 40)
    for (const { seconds, ...rest } of waits) {
      assert.ok(seconds > 28.9 && seconds <= 30, `${seconds} s`)
      assert.deepEqual(rest, { state: 'retry', retries: 0, as_told: true, is_retry: true })
    }
    assert.ok(new Set(waits.map(({ seconds }) => seconds)).size > 35, 'not all at once')
    const [{ count } = { count: -1 }] = await sql<
      { count: number }[]
    >`select count::int from waybill.usage where metric = 'attempts'`
    assert.equal(count, 0)
  })

  test('a delivery that leaves its bundle has a job like that of any other', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(16)
    await publish(1)
    const { send } = await claim({ kind: 'first', thorough: true, max: 100 })
    const [left, alone] = [send.find(({ bundle }) => bundle !== null), send.find(({ bundle }) => bundle === null)]
    const jobOf = async (one: Claim | undefined) => {
      const [row] = await sql`
        select to_jsonb(j) - array['id', 'data', 'created_on', 'start_after', 'keep_until', 'heartbeat_on', 'started_on'] as job,
          data - 'tag' as data, heartbeat_on is not null as is_alive, started_on is not null as is_started,
          keep_until > now() + interval '5 years' as is_kept
        from pgboss.job j where id = ${one!.deliveryId}`
      return row && { ...row }
    }
    await pool.begin((tx) => unbundle(tx, [left!]))
    assert.deepEqual(await jobOf(left), await jobOf(alone))
    await unclaim(pool, [left!, alone!])
    assert.deepEqual(await jobOf(left), await jobOf(alone))
  })

  test('a claim that is handed back late leaves a later one alone, also if that has the same number of retries', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(1)
    const { send } = await claim({ kind: 'first', thorough: true, max: 100 })
    // As after a replay.
    await sql`update pgboss.job set started_on = started_on + interval '20 seconds' where name = 'deliveries'`
    await unclaim(pool, send)
    const state = async () => (await sql`select state::text from pgboss.job where name = 'deliveries'`)[0]?.state
    assert.equal(await state(), 'active')
    await sql`update pgboss.job set started_on = started_on - interval '20 seconds' where name = 'deliveries'`
    await unclaim(pool, send)
    assert.equal(await state(), 'created')
  })

  test('touching a claim touches the job that it shares', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(20)
    const { send } = await claim({ kind: 'first', thorough: true, max: 100 })
    await sql`update pgboss.job set heartbeat_on = now() - interval '1 hour' where name = 'deliveries'`
    await touch(pool, send)
    assert.equal(
      (await sql`select from pgboss.job where name = 'deliveries' and heartbeat_on < now() - interval '1 minute'`)
        .length,
      0,
    )
  })

  test('a bundle of which something was recorded was touched', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(3)
    const { send } = await claim({ kind: 'first', thorough: true, max: 100 })
    await sql`update pgboss.job set heartbeat_on = now() - interval '8 seconds' where name = 'deliveries'`
    await createAttempt(pool)(send[0] as Claim, 200)
    const [bundle] = await jobs(sql)
    assert.deepEqual(
      bundle?.ids,
      send.slice(1).map(({ deliveryId }) => deliveryId),
    )
    assert.equal((await sql`select * from waybill.take_back('3 seconds', 3, 5, 10, true)`).length, 0)
  })

  test('what has left its bundle otherwise is sent by the job that it has then, and once', async (t) => {
    const world = await start(t)
    const { sql, publish, claim, endpoint, tenant } = world
    await publish(96)
    const [first, ...others] = await jobs(sql)
    // As by hand: a sweep holds only what has no job.
    await sql`update waybill.deliveries set held = true, spent_retries = 0, next_attempt_at = null where bundle = ${first?.id ?? ''}`
    await sql`update waybill.endpoint_stats set held = held + 16 where tenant_id = ${tenant.tenantId} and endpoint_id = ${endpoint.endpoint_id}`
    const claimed = await claim({ kind: 'first', thorough: true, max: 16 })
    assert.deepEqual([claimed.send.length, claimed.obsolete.length, claimed.more], [0, 16, true])
    // The worker that has claimed it is lost.
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${first?.id ?? ''}`
    await sql`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`
    assert.deepEqual(await jobs(sql), others)
    await world.startWorker()
    await assertDeliveredOnce(world, 96)
    assert.equal((await sql`select from waybill.attempts where attempt_number > 1`).length, 0)
  })

  test('what a claim finds obsolete leaves its bundle', async (t) => {
    const world = await start(t)
    const { sql, publish, endpoint, tenant } = world
    await publish(48)
    const [first] = await jobs(sql)
    await sql`update waybill.deliveries set held = true, spent_retries = 0, next_attempt_at = null where bundle = ${first?.id ?? ''}`
    await sql`update waybill.endpoint_stats set held = held + 16 where tenant_id = ${tenant.tenantId} and endpoint_id = ${endpoint.endpoint_id}`
    await world.startWorker()
    await assertDeliveredOnce(world, 48)
    assert.equal((await sql`select from waybill.attempts where attempt_number > 1`).length, 0)
  })

  test('each is delivered once, and those that fail are retried by themselves', async (t) => {
    const world = await start(t, { RETRY_DELAY_SECONDS: '1' })
    const failed = new Set<string>()
    world.receiver.script('/hook', ({ headers }) => {
      const id = String(headers['service-delivery-id'])
      if (failed.size >= 20 || failed.has(id)) return 200
      failed.add(id)
      return 500
    })
    await world.publish(70)
    await world.startWorker()
    await settled(world.sql)
    const ids = world.receiver.at('/hook').map(({ headers }) => headers['service-delivery-id'])
    assert.deepEqual([ids.length, new Set(ids).size], [90, 70])
    assert.equal((await jobs(world.sql)).length, 0)
    await assertBooks(world.sql)
  })

  test('of a lost worker’s bundle, what is recorded stays so and the rest is sent again', async (t) => {
    const world = await start(t)
    const { reply: hang, open } = gate()
    const answers: Reply = ({ headers }) =>
      answered.add(String(headers['service-delivery-id'])).size <= 7 ? 200 : hang
    const answered = new Set<string>()
    world.receiver.script('/hook', answers)
    await world.publish(16)
    const doomed = await world.startWorker()
    const delivered = async () => (await world.sql`select from waybill.deliveries where status = 'delivered'`).length
    await waitFor(async () => (await delivered()) === 7 && world.receiver.receipts.length === 16)
    await doomed.kill()
    open()
    await world.startWorker()
    await settled(world.sql)
    assert.equal(world.receiver.receipts.length, 16 + 9)
    const counts =
      await world.sql`select attempt_count as made, count(*)::int from waybill.deliveries group by 1 order by 1`
    assert.deepEqual(
      counts.map((row) => ({ ...row })),
      [
        { made: 1, count: 7 },
        { made: 2, count: 9 },
      ],
    )
    assert.equal((await world.sql`select from waybill.attempts where error = 'worker_lost'`).length, 9)
    assert.equal((await jobs(world.sql)).length, 0)
    await assertBooks(world.sql)
  })

  test('of deliveries whose bundle a worker has lost, and claimed again, only the second attempts are stored', async (t) => {
    const { sql, publish, claim, pool } = await start(t)
    await publish(6)
    const attempt = createAttempt(pool)
    const [recorded, ...lapsed] = (await claim({ kind: 'first', thorough: true, max: 10 })).send as [Claim, ...Claim[]]
    assert.equal((await attempt(recorded, 200)).settled, true)
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = 'deliveries'`
    assert.equal((await sql`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`).length, 5)
    const again = (await claim({ kind: 'first', thorough: true, max: 10 })).send
    assert.deepEqual(
      again.map(({ deliveryId, attemptNumber }) => [deliveryId, attemptNumber]),
      lapsed.map(({ deliveryId }) => [deliveryId, 2]),
    )
    const status = (nth: number) => (nth % 2 === 0 ? 200 : 500)
    const late = lapsed.map((claim, nth) => attempt(claim, status(nth)))
    const second = again.map((claim) => attempt(claim, 200))
    assert.ok((await Promise.all(late)).every(({ settled }) => !settled))
    assert.ok((await Promise.all(second)).every(({ settled }) => settled))
    assert.equal((await jobs(sql)).length, 0)
    await assertBooks(sql)
  })

  test('what an inactive endpoint’s bundle holds waits, and is sent once it is active again', async (t) => {
    const world = await start(t)
    await world.publish(40)
    const { tenant, endpoint, sql } = world
    await tenant.call('PATCH', `/v1/endpoints/${endpoint.endpoint_id}`, { body: { is_active: false } })
    await world.startWorker()
    await waitFor(async () => (await sql`select from waybill.deliveries where held and bundle is null`).length === 40)
    assert.equal((await jobs(sql)).length, 0)
    await tenant.call('PATCH', `/v1/endpoints/${endpoint.endpoint_id}`, { body: { is_active: true } })
    await assertDeliveredOnce(world, 40)
  })

  test('a replay of what waits in a bundle queues nothing twice', async (t) => {
    const world = await start(t)
    await world.publish(5)
    const [bundle] = await jobs(world.sql)
    for (const id of bundle?.ids ?? [])
      assert.equal((await world.tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202)
    assert.deepEqual(await jobs(world.sql), [bundle])
    await world.startWorker()
    await assertDeliveredOnce(world, 5)
  })

  test('what is delivered and replayed while others of its bundle are under way is queued by itself', async (t) => {
    const { publish, claim, pool, tenant } = await start(t)
    await publish(3)
    const { send } = await claim({ kind: 'first', thorough: true, max: 10 })
    const { deliveryId } = send[0] as Claim
    await createAttempt(pool)(send[0] as Claim, 200)
    assert.equal((await tenant.call('POST', `/v1/deliveries/${deliveryId}/replay`)).status, 202)
    assert.deepEqual(
      (await claim({ kind: 'first', thorough: true, max: 10 })).send.map((again) => [
        again.deliveryId,
        again.attemptNumber,
      ]),
      [[deliveryId, 2]],
    )
  })

  test('bundles that are deleted by hand are found missing, and their deliveries sent', async (t) => {
    const world = await start(t)
    await world.publish(20)
    await world.sql`delete from pgboss.job where name = 'deliveries'`
    await world.sql`update waybill.deliveries set updated_at = now() - interval '1 minute', next_attempt_at = now() - interval '1 minute'`
    await world.startWorker()
    await assertDeliveredOnce(world, 20)
  })
})
