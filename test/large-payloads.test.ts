import assert from 'node:assert/strict'
import { createHmac } from 'node:crypto'
import { suite, type TestContext, test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { SHUTTING_DOWN } from '../src/flow/attempts.ts'
import { type Claim, Outdated } from '../src/flow/claim.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { createPayloads, PayloadLate } from '../src/flow/payload.ts'
import { createLog } from '../src/log.ts'
import { lock, waitingForLocks } from './support/database.ts'
import { assertBooks, NO_LIMITS, settled } from './support/deliveries.ts'
import { startProxy } from './support/proxy.ts'
import { gate, type Receipt, startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant, type Tenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** What a worker has room for is 64 MiB, and a tenant gets half of it. */
const LARGE = 8_000_000
const AT_ONCE = 4
/** Their receivers are busy for longer than tests usually let them. */
const PATIENT = { ATTEMPT_TIMEOUT_SECONDS: '30' }

/** A tenant with an endpoint, and `count` large payloads that wait for a worker. */
async function publishLarge(t: TestContext, count: number, bytes = LARGE, subscribed_events = ['*']) {
  const receiver = await startReceiver(t)
  const { databaseUrl, sql, service: api, tenant } = await startTenant(t, { mode: 'api' })
  const { signing_secret } = await tenant.createEndpoint(receiver.url('/large'), { subscribed_events })
  // Compressing them takes longer than all the rest.
  await sql`alter table waybill.events alter payload set storage external`
  for (let n = 0; n < count; n++) await publishPadded(sql, tenant, n, bytes)
  return { databaseUrl, sql, receiver, api, tenant, signing_secret }
}

/** Accepts an event as its publishing would; its payload is made in the database. */
const publishPadded = (sql: Pool, { tenantId }: Tenant, n: number, bytes: number, type = 'large') => sql`
  select from waybill.publish(array[${tenantId}]::text[], array[${type}]::text[], array['{"n":' || ${n}::int || ',"x":"' || repeat('x', ${bytes}) || '"}'],
    array[null]::text[], ${JSON.stringify(NO_LIMITS)})`

/** Fails unless it arrived as it was published, and is signed; answers with its number. */
function checkPadded({ body, headers }: Receipt, bytes: number, secret: string): number {
  const tail = Buffer.from(`,"x":"${'x'.repeat(bytes)}"}}`)
  const head = body.subarray(0, -tail.length)
  assert.ok(body.subarray(-tail.length).equals(tail), 'the payload is whole')
  const signed = createHmac('sha256', Buffer.from(secret.slice('whsec_'.length), 'base64'))
    .update(`${headers['webhook-id']}.${headers['webhook-timestamp']}.`)
    .update(body)
  const signatures = String(headers['webhook-signature']).split(' ')
  assert.ok(signatures.includes(`v1,${signed.digest('base64')}`), 'it is signed with the secret')
  return Number(/"data":{"n":(\d+)$/.exec(head.toString())?.[1])
}

const COUNT_HELD = `
  create table times_held (delivery_id uuid);
  create function note_held() returns trigger language plpgsql as 'begin insert into times_held values (new.delivery_id); return null; end';
  create trigger note_held after update of held on waybill.deliveries for each row when (new.held) execute function note_held()`

/** What is read with a payload. */
const ROW = { payload: '{}', url: '', is_active: true, ordered: false, paced: false, signing_secret: '' }

/** Has a claim that leaves room for no other in hand, and fails unless the next is given up with this error, once `end` is called. */
async function whileOneWaits(
  claim: Claim,
  withPayload: ReturnType<typeof createPayloads>,
  error: assert.AssertPredicate,
  end: () => void,
): Promise<void> {
  const [inside, over] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()]
  const sending = withPayload(claim, () => {
    inside.resolve()
    return over.promise
  })
  await inside.promise
  const waiting = assert.rejects(
    withPayload(claim, async () => {}),
    error,
  )
  end()
  await waiting
  over.resolve()
  await sending
}

const jobs = (sql: Pool, state: string) =>
  sql`select retry_count from pgboss.job where name = 'deliveries' and state = ${state}`

const finished = async (sql: Pool) => {
  await settled(sql)
  await assertBooks(sql)
  assert.deepEqual([...(await sql`select distinct attempt_count from waybill.deliveries`)], [{ attempt_count: 1 }])
}

suite('large payloads', { concurrency: 3 }, () => {
  test('that take longer to read than a statement may keep nobody else waiting, and arrive whole', async (t) => {
    const [count, bytes] = [10, LARGE / 2]
    const { databaseUrl, sql, receiver, api, signing_secret } = await publishLarge(t, count, bytes)
    const other = await createTenant(api)
    await other.createEndpoint(receiver.url('/small'))
    for (let n = 0; n < 5; n++) await other.publish()
    // All of them at once would take 5 seconds, one takes half a second.
    const proxy = await startProxy(t, databaseUrl, { bytesPerMs: 8000 })
    await startService(t, { databaseUrl: proxy.url, mode: 'worker' })
    await receiver.until(5, { path: '/small' })
    const receipts = await receiver.until(count, { path: '/large', timeoutMs: 30_000 })
    const numbers = receipts.map((receipt) => checkPadded(receipt, bytes, signing_secret))
    assert.equal(new Set(numbers).size, count)
    await finished(sql)
  })

  test('take so much memory at once and no more, and those that wait for it are handed back by a shutdown', async (t) => {
    const count = 7
    const { databaseUrl, sql, receiver, api, tenant } = await publishLarge(t, count)
    // Now, for those that wait are not kept waiting for long.
    const other = await createTenant(api)
    await other.createEndpoint(receiver.url('/other'))
    const held = gate()
    receiver.script('/large', held.reply)
    const worker = await startService(t, { databaseUrl, mode: 'worker', env: PATIENT })
    await receiver.until(AT_ONCE)
    await waitFor(async () => (await jobs(sql, 'active')).length === count, { what: 'the others to be claimed' })
    await publishPadded(sql, other, 0, LARGE)
    await receiver.until(1, { path: '/other' })
    assert.equal(receiver.at('/large').length, AT_ONCE)

    worker.signal('SIGTERM')
    // On a slow machine one has waited for too long already, and was put off.
    const putAway = () => sql`
      select from waybill.deliveries d left join pgboss.job j on j.name = 'deliveries' and j.id = delivery_id
      where tenant_id = ${tenant.tenantId} and status = 'pending' and (held or j.state = 'created' and j.retry_count = 0)`
    await waitFor(async () => (await putAway()).length === count - AT_ONCE, {
      what: 'those that wait to be handed back',
    })
    held.open()
    assert.deepEqual(await worker.exited, { code: 0, signal: null })
    assert.equal(receiver.at('/large').length, AT_ONCE)
    await startService(t, { databaseUrl, mode: 'worker' })
    await finished(sql)
    assert.equal(receiver.at('/large').length, count)
  })

  test('that wait for room are not sent to an endpoint that is inactive by then', async (t) => {
    const count = AT_ONCE + 2
    const { databaseUrl, sql, receiver, tenant } = await publishLarge(t, count)
    const held = gate()
    receiver.script('/large', held.reply)
    await startService(t, { databaseUrl, mode: 'worker', env: PATIENT })
    await receiver.until(AT_ONCE)
    await waitFor(async () => (await jobs(sql, 'active')).length === count, { what: 'the others to be claimed' })
    const [endpoint] = (await tenant.call('GET', '/v1/endpoints')).body.data
    await tenant.call('PATCH', `/v1/endpoints/${endpoint.endpoint_id}`, { body: { is_active: false } })
    held.open()
    const waiting = () => sql`select from waybill.deliveries where held and attempt_count = 0`
    await waitFor(async () => (await waiting()).length === 2, { what: 'the others to be held' })
    assert.equal(receiver.at('/large').length, AT_ONCE)
  })

  test('that wait for room go out one by one to an endpoint that is ordered by then', async (t) => {
    const count = AT_ONCE + 2
    const { databaseUrl, sql, receiver, tenant } = await publishLarge(t, count)
    const [first, then] = [gate(), gate()]
    receiver.script('/large', first.reply)
    await startService(t, { databaseUrl, mode: 'worker', env: PATIENT })
    await receiver.until(AT_ONCE)
    await waitFor(async () => (await jobs(sql, 'active')).length === count, { what: 'the others to be claimed' })
    const [endpoint] = (await tenant.call('GET', '/v1/endpoints')).body.data
    await tenant.call('PATCH', `/v1/endpoints/${endpoint.endpoint_id}`, { body: { ordered: true } })
    receiver.script('/large', then.reply)
    first.open()
    await receiver.until(AT_ONCE + 1)
    await waitFor(async () => (await jobs(sql, 'active')).length === 1, { what: 'the last one to wait for that' })
    assert.equal(receiver.at('/large').length, AT_ONCE + 1)
    then.open()
    await finished(sql)
    assert.equal(receiver.at('/large').length, count)
  })

  for (const [what, before, then] of [
    ['keep to a pace that their endpoint has by then', {}, { max_per_second: 4 }],
    ['and miss their time slots get others', { max_per_second: 4 }, { description: 'the same' }],
  ] as const)
    test(`that wait for room ${what}`, async (t) => {
      const { databaseUrl, sql, receiver, tenant } = await publishLarge(t, AT_ONCE, LARGE, ['large'])
      const held = gate()
      receiver.script('/large', held.reply)
      await startService(t, { databaseUrl, mode: 'worker', env: PATIENT })
      await receiver.until(AT_ONCE)
      const paced = await tenant.createEndpoint(receiver.url('/paced'), { subscribed_events: ['paced'], ...before })
      for (let n = 0; n < 6; n++) await publishPadded(sql, tenant, n, LARGE / 4, 'paced')
      await waitFor(async () => (await jobs(sql, 'active')).length === AT_ONCE + 6, { what: 'them to be claimed' })
      await tenant.call('PATCH', `/v1/endpoints/${paced.endpoint_id}`, { body: then })
      const missed = () =>
        sql`select from waybill.endpoint_stats where endpoint_id = ${paced.endpoint_id} and next_slot < now() - interval '2 seconds'`
      if ('max_per_second' in before)
        await waitFor(async () => (await missed()).length === 1, { what: 'their moments to pass' })
      assert.equal(receiver.at('/paced').length, 0)
      await sql.text(COUNT_HELD)
      held.open()
      await receiver.until(6, { path: '/paced' })
      // 1.25 s, unless the first one arrives late, behind the large ones.
      const [first, , , , , sixth] = receiver.at('/paced').map(({ at }) => at)
      assert.ok(sixth! - first! > 400, `six within ${sixth! - first!} ms`)
      await finished(sql)
      assert.deepEqual([...(await sql`select from times_held`)], [], 'they take slots while they have room')
    })

  test('that wait for room are sent to the URL, and signed with the secret, that their endpoint has by then', async (t) => {
    const count = AT_ONCE + 2
    const { databaseUrl, sql, receiver, tenant, signing_secret } = await publishLarge(t, count)
    const held = gate()
    receiver.script('/large', held.reply)
    await startService(t, { databaseUrl, mode: 'worker', env: PATIENT })
    await receiver.until(AT_ONCE)
    await waitFor(async () => (await jobs(sql, 'active')).length === count, { what: 'the others to be claimed' })
    const [{ endpoint_id }] = (await tenant.call('GET', '/v1/endpoints')).body.data
    await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { url: receiver.url('/new') } })
    const { body: rotated } = await tenant.call('POST', `/v1/endpoints/${endpoint_id}/rotate-secret`)
    await sql`update waybill.endpoints set previous_secret_expires_at = now()`
    held.open()
    await finished(sql)
    const numbers = [
      ...receiver.at('/large').map((receipt) => checkPadded(receipt, LARGE, signing_secret)),
      ...receiver.at('/new').map((receipt) => checkPadded(receipt, LARGE, rotated.signing_secret)),
    ]
    assert.equal(receiver.at('/new').length, count - AT_ONCE)
    assert.equal(new Set(numbers).size, count)
    for (const { headers } of receiver.at('/new'))
      assert.equal(String(headers['webhook-signature']).split(' ').length, 1, 'the old secret has expired')
    const [shown] = await sql`select count(*)::int from waybill.attempts where url = ${receiver.url('/new')}`
    assert.equal(shown!.count, count - AT_ONCE, 'each attempt shows the URL that it was made to')
  })

  test('that cannot be read for a while cost no attempt and no retry', async (t) => {
    const count = 6
    const { databaseUrl, sql, receiver } = await publishLarge(t, count)
    const first = gate()
    receiver.script('/large', first.reply)
    const worker = await startService(t, { databaseUrl, mode: 'worker', env: PATIENT })
    await receiver.until(AT_ONCE)
    await waitFor(async () => (await jobs(sql, 'active')).length === count, { what: 'the others to be claimed' })
    await sql.begin(async (locker) => {
      await locker`lock table waybill.events in access exclusive mode`
      first.open()
      await worker.logged('payload.waiting')
      await worker.logged('delivery.put_off')
    })
    await finished(sql)
    assert.equal(receiver.at('/large').length, count)
  })

  test('are signed with the secret before the last one, too, until that expires', async (t) => {
    const { sql, tenant } = await publishLarge(t, 1, 100_000)
    const [claim] = (await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 1 })).send
    const [{ endpoint_id }] = (await tenant.call('GET', '/v1/endpoints')).body.data
    await tenant.call('POST', `/v1/endpoints/${endpoint_id}/rotate-secret`)
    const { signal } = new AbortController()
    const withPayload = createPayloads({ pool: sql, closing: signal, log: createLog('silent') })
    const secrets = () => withPayload(claim!, async (upToDate) => upToDate.secrets)
    const [newest, ...others] = await secrets()
    assert.deepEqual(others, claim!.secrets)
    await sql`update waybill.endpoints set previous_secret_expires_at = now()`
    assert.deepEqual(await secrets(), [newest])
  })

  test('that are being read when a shutdown ends all waiting are not waited for', async (t) => {
    const { sql } = await publishLarge(t, 1, 100_000)
    const [claim] = (await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 1 })).send
    const closing = new AbortController()
    const withPayload = createPayloads({ pool: sql, closing: closing.signal, log: createLog('silent') })
    const unlock = await lock(sql, 'waybill.events')
    let reason: unknown
    withPayload(claim!, async () => {}).catch((error: unknown) => {
      reason = error
    })
    await waitFor(() => waitingForLocks(sql), { what: 'it to be read' })
    closing.abort(SHUTTING_DOWN)
    await waitFor(() => reason === SHUTTING_DOWN, { what: 'it to be given up' })
    assert.equal(await waitingForLocks(sql), 1)
    await unlock()
  })

  test('are read four at a time, so that recording finds connections', async () => {
    let asked = 0
    const answer = Promise.withResolvers<void>()
    const pool = async () => {
      asked++
      await answer.promise
      return [ROW]
    }
    const { signal } = new AbortController()
    const withPayload = createPayloads({ pool: pool as never, closing: signal, log: createLog('silent') })
    const all = Array.from({ length: 8 }, (_, nth) =>
      withPayload({ tenantId: `tenant ${nth}`, payload: null, payloadBytes: 100_000 } as Claim, async () => {}),
    )
    await waitFor(() => asked >= 4, { what: 'them to be read' })
    assert.equal(asked, 4)
    answer.resolve()
    await Promise.all(all)
    assert.equal(asked, 8)
  })

  test('that wait for room when a shutdown ends all waiting are given up at once', async (t) => {
    const { sql } = await publishLarge(t, 1, 100_000)
    const [claim] = (await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 1 })).send
    const closing = new AbortController()
    const withPayload = createPayloads({ pool: sql, closing: closing.signal, log: createLog('silent') })
    await whileOneWaits({ ...claim!, payloadBytes: 1e9 }, withPayload, SHUTTING_DOWN, () =>
      closing.abort(SHUTTING_DOWN),
    )
  })
})

// Not beside the others: these change the clock.

test('large payloads keep no room for long where their endpoint has no time slot soon, nor go out late for one', async (t) => {
  const { sql } = await publishLarge(t, 1, 100_000)
  const [claim] = (await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 1 })).send
  const now = performance.now.bind(performance)
  let ahead = 0
  t.mock.method(performance, 'now', () => now() + ahead)
  /** Whether it is sent, if the process stands still for so long while it waits for its time slot, which is so far away. */
  const isSent = async (away: string, stands: number) => {
    await sql`update waybill.endpoint_stats set next_slot = now() + ${away}::interval`
    const pool = (async (...question: Parameters<Pool>) => {
      const rows = await sql(...question)
      setImmediate(() => {
        ahead += stands
      })
      return rows
    }) as unknown as Pool
    const { signal } = new AbortController()
    return await createPayloads({ pool, closing: signal, log: createLog('silent') })(claim!, async () => true).catch(
      (error: unknown) => {
        if (error instanceof Outdated) return false
        throw error
      },
    )
  }
  await sql`update waybill.endpoints set max_per_second = 1`
  assert.equal(await isSent('0.1 s', 0), true)
  assert.equal(await isSent('5 s', 0), false)
  assert.equal(await isSent('0.1 s', 60_000), false)
})

test('large payloads that find no room for ten seconds are put off', { timeout: 20_000 }, async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const pool = async () => [ROW]
  const { signal } = new AbortController()
  const withPayload = createPayloads({ pool: pool as never, closing: signal, log: createLog('silent') })
  const alone = { tenantId: 'acme', payload: null, payloadBytes: 1e9 } as Claim
  await whileOneWaits(alone, withPayload, PayloadLate, () => t.mock.timers.tick(10_000))
})
