import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { createDatabase } from './support/database.ts'
import { assertBooks, publishMany, settled, watchInFlight } from './support/deliveries.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const SLOTS = 40

test('while attempts cannot be recorded, three times as many as there are slots wait for it, each slot makes one more at most, and none is lost', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint(receiver.url('/hook'))
  await publishMany(sql, tenant.tenantId, 7 * SLOTS)
  await sql.begin(async (lock) => {
    await lock`lock table waybill.attempts in access exclusive mode`
    await startService(t, { databaseUrl, mode: 'worker', env: { WORKER_CONCURRENCY: String(SLOTS) } })
    await receiver.until(3 * SLOTS)
    const [now] = await sql`select now()::text as now`
    // Twice as long as an idle worker takes to look again, by what the worker itself has done since.
    const touched = () =>
      sql`select from pgboss.job where name = 'deliveries' and started_on < ${now!.now}::text::timestamptz
        and heartbeat_on > ${now!.now}::text::timestamptz + interval '1 second'`
    await waitFor(async () => (await touched()).length > 0, { what: 'the worker to touch what it holds' })
    // How many slots make one more is for the lanes, which know no pace any more.
    assert.ok(receiver.receipts.length <= 4 * SLOTS, `${receiver.receipts.length} were sent`)
  })
  await settled(sql)
  const ids = new Set(receiver.receipts.map(({ headers }) => headers['service-delivery-id']))
  assert.equal(receiver.receipts.length, 7 * SLOTS)
  assert.equal(ids.size, 7 * SLOTS, 'each was sent once')
  await assertBooks(sql)
})

test('no more requests are under way than there are slots, however many wait for their endpoints', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const paths = ['/a', '/b', '/c', '/d', '/e']
  for (const path of paths) await tenant.createEndpoint(receiver.url(path))
  const events = 500
  await publishMany(sql, tenant.tenantId, events)
  let most = 0
  const look = () => {
    most = Math.max(
      most,
      seen.reduce((sum, { inFlight }) => sum + inFlight, 0),
    )
  }
  const seen = paths.map((path) => watchInFlight(receiver, path, 200, { delayMs: 20, look }))
  const env = { WORKER_CONCURRENCY: String(SLOTS), ENDPOINT_CONCURRENCY: '9' }
  await startService(t, { databaseUrl, mode: 'worker', env })
  await settled(sql)
  assert.ok(most > SLOTS / 2 && most <= SLOTS, `${most} requests were under way`)
  assert.equal(receiver.receipts.length, paths.length * events)
  await assertBooks(sql)
})

for (const slots of [2, 4])
  test(`a worker with ${slots} slots uses the last one beside endpoints that hang`, async (t) => {
    const { url: databaseUrl } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const service = await startService(t, { databaseUrl, env: { WORKER_CONCURRENCY: String(slots) } })
    receiver.script('/hangs', () => new Promise(() => {}))
    for (let nth = 1; nth < slots; nth++) {
      const hanging = await createTenant(service)
      await hanging.createEndpoint(receiver.url('/hangs'))
      for (let n = 0; n < 20; n++) await hanging.publish()
    }
    await receiver.until(slots - 1, { path: '/hangs' })
    const last = receiver.at('/hangs').at(-1)
    await waitFor(() => Date.now() - last!.at > 1500, { what: 'the worker to be strained' })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.publish()
    // Those that hang do so for a minute.
    await receiver.until(1, { path: '/hook', timeoutMs: 20_000 })
  })

test('a new endpoint does not wait for those of another tenant that failed quickly, and then hang', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const service = await startService(t, { databaseUrl, env: { WORKER_CONCURRENCY: '8' } })
  const crowd = await createTenant(service)
  for (let n = 0; n < 40; n++) {
    await crowd.createEndpoint(receiver.url(`/hangs/${n}`))
    receiver.script(`/hangs/${n}`, 500, 500, () => new Promise<never>(() => {}))
  }
  await publishMany(sql, crowd.tenantId, 5)
  await waitFor(() => Date.now() - receiver.receipts.at(-1)!.at > 2000, { what: 'the worker to be strained' })
  const tenant = await createTenant(service)
  await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  // Those that hang do so for a minute.
  await receiver.until(1, { path: '/hook' })
})

test('an endpoint that answered 500 once, and is paced, does not wait for those of others that hang', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const env = { RETRY_DELAY_SECONDS: '2', RETRY_DELAY_MAX_SECONDS: '2', WORKER_CONCURRENCY: '8' }
  const service = await startService(t, { databaseUrl, env })
  // A quarter of the slots: each breaks off once, then hangs.
  const hanging = ['/hangs', '/hangs-too']
  for (const path of hanging) {
    receiver.script(
      path,
      () => null,
      () => new Promise<never>(() => {}),
    )
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url(path))
    await tenant.publish()
  }
  for (const path of hanging) await receiver.until(2, { path })
  const tenant = await createTenant(service)
  // So late that it says nothing of how many more it could take.
  const late = async () => {
    await sleep(600)
    return 500
  }
  receiver.script('/hook', late, 200)
  const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'), { max_per_second: 20 })
  await tenant.publish()
  const failed = () => sql`select from waybill.endpoint_stats where endpoint_id = ${id} and failure_streak = 1`
  await waitFor(async () => (await failed()).length > 0)
  for (let n = 0; n < 5; n++) await tenant.publish()
  await receiver.until(7, { path: '/hook' })
  for (const path of hanging) assert.equal(receiver.at(path).length, 2, 'they hang all the while')
})

for (const ordered of [false, true])
  test(`retries of one tenant that hang${ordered ? ' at ordered endpoints' : ''} leave a slot for another’s, and come as there is room`, async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const env = { RETRY_DELAY_SECONDS: '1', RETRY_DELAY_MAX_SECONDS: '1', WORKER_CONCURRENCY: '16' }
    const service = await startService(t, { databaseUrl, env })
    const crowd = await createTenant(service)
    const hanging = gate()
    // Of the three of an ordered endpoint, one at a time.
    const firsts = ordered ? 10 : 30
    for (let n = 0; n < 10; n++) {
      const { endpoint_id } = await crowd.createEndpoint(receiver.url(`/crowd/${n}`))
      await crowd.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { ordered } })
      const failures = Array<number>(firsts / 10).fill(500)
      receiver.script(`/crowd/${n}`, 500, ...failures.slice(1), hanging.reply)
    }
    await publishMany(sql, crowd.tenantId, 3)
    const retried = () => receiver.receipts.length - firsts
    // Of the eight for retries, one is left to other tenants, and one to endpoints that are well or take a few at a time.
    const most = ordered ? 7 : 6
    await waitFor(() => retried() === most, { what: 'its part of the slots to be taken' })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url('/hook'))
    receiver.script('/hook', 500, 200)
    await tenant.publish()
    await receiver.until(2, { path: '/hook' })
    assert.equal(retried() - 2, most)
    hanging.open()
    await settled(sql)
    assert.equal(retried() - 2, 30, 'each was sent twice')
    await assertBooks(sql)
  })

for (const [where, fields, whose] of [
  ['', {}, 'its own'],
  ['', {}, 'another’s'],
  [' at ordered endpoints', { ordered: true }, 'another’s'],
  [' at paced endpoints', { max_per_second: 50 }, 'another’s'],
] as const)
  test(`retries of one tenant that hang${where} leave a slot for an endpoint of ${whose} that is mended`, async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const env = {
      RETRY_DELAY_SECONDS: '1',
      RETRY_DELAY_MAX_SECONDS: '1',
      WORKER_CONCURRENCY: '16',
      BREAKER_FAILURES: '3',
      BREAKER_SECONDS: '1',
      BREAKER_PROBE_SECONDS: '1',
      BREAKER_PROBE_MAX_SECONDS: '1',
    }
    const service = await startService(t, { databaseUrl, env })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url('/mended'), { subscribed_events: ['mended'] })
    let isMended = false
    receiver.script('/mended', () => (isMended ? 200 : 500))
    for (let n = 0; n < 12; n++) await tenant.publish('mended')
    const opened = () => sql`select from waybill.endpoint_stats where breaker = 'open'`
    await waitFor(async () => (await opened()).length === 1, { what: 'its breaker to open' })
    const crowd = whose === 'its own' ? tenant : await createTenant(service)
    const hanging = gate()
    for (let n = 0; n < 30; n++) {
      await crowd.createEndpoint(receiver.url(`/hangs/${n}`), fields)
      receiver.script(`/hangs/${n}`, 500, hanging.reply)
    }
    await publishMany(sql, crowd.tenantId, 1)
    const hang = () => receiver.receipts.filter(({ path }) => path.startsWith('/hangs')).length - 30
    await waitFor(() => hang() >= 6, { what: 'its other retries to take what they may' })
    isMended = true
    const delivered = () => sql`select from waybill.deliveries where event_type = 'mended' and status = 'delivered'`
    await waitFor(async () => (await delivered()).length === 12, { timeoutMs: 30_000, what: 'all of its deliveries' })
    assert.ok(hang() <= 7, 'the others hang all the while')
    hanging.open()
    await settled(sql)
    await assertBooks(sql)
  })

test('retries that come again later, as their tenant’s have their part of the slots, do not use up its month meanwhile', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const env = { RETRY_DELAY_SECONDS: '1', RETRY_DELAY_MAX_SECONDS: '1', WORKER_CONCURRENCY: '64' }
  const service = await startService(t, { databaseUrl, env })
  // All first attempts, 24 of 32 slots for retries, and seven more.
  const tenant = await createTenant(service, { limits: { monthly_attempts: 120 + 24 + 7 } })
  const hanging = gate()
  for (let n = 0; n < 10; n++) {
    await tenant.createEndpoint(receiver.url(`/crowd/${n}`))
    receiver.script(`/crowd/${n}`, 500, ...Array<number>(11).fill(500), hanging.reply)
  }
  await publishMany(sql, tenant.tenantId, 12)
  await receiver.until(120 + 24)
  const used = async () => (await sql`select count::int from waybill.usage where metric = 'attempts'`)[0]?.count
  await waitFor(async () => (await used()) === 120 + 24, { what: 'what was beyond these to be given back' })
  for (let n = 0; n < 100; n++) {
    assert.equal(await used(), 120 + 24)
    await sleep(10)
  }
  hanging.open()
  await settled(sql)
  assert.equal(receiver.receipts.length, 120 + 24 + 7)
  await assertBooks(sql)
})

test('what is put away unsent, as its endpoint hangs or is inactive, is not counted against the month', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  const hanging = gate()
  receiver.script('/hangs', hanging.reply)
  await tenant.createEndpoint(receiver.url('/hangs'))
  const { endpoint_id: inactive } = await tenant.createEndpoint(receiver.url('/inactive'))
  await publishMany(sql, tenant.tenantId, 2 * SLOTS)
  await tenant.call('PATCH', `/v1/endpoints/${inactive}`, { body: { is_active: false } })
  await startService(t, { databaseUrl, mode: 'worker', env: { WORKER_CONCURRENCY: String(SLOTS) } })
  const isHeld = async () => {
    const { length } = await sql`select from waybill.deliveries where held`
    return receiver.receipts.length > 0 && length + receiver.receipts.length === 4 * SLOTS
  }
  await waitFor(isHeld, { what: 'all that does not start to be held' })
  const used = async () => (await sql`select count::int from waybill.usage where metric = 'attempts'`)[0]?.count
  assert.equal(await used(), receiver.receipts.length)
  await tenant.call('PATCH', `/v1/endpoints/${inactive}`, { body: { is_active: true } })
  hanging.open()
  await settled(sql)
  assert.equal(receiver.receipts.length, 4 * SLOTS)
  assert.equal(await used(), 4 * SLOTS)
})
