import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { type TestContext, test } from 'node:test'
import { createCatchUp } from '../src/flow/catch-up.ts'
import { createLog } from '../src/log.ts'
import { startSweep } from '../src/upkeep/sweep.ts'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase, lock } from './support/database.ts'
import { gate, type Reply, startReceiver } from './support/receiver.ts'
import { startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** A delivery whose first attempt is under way, and answered with `reply` once `open` is called; later ones get 200. */
async function startAttempt(t: TestContext, reply: Reply, env: Record<string, string> = {}) {
  const receiver = await startReceiver(t)
  const answer = gate(reply)
  receiver.script('/hook', answer.reply, 200)
  const { databaseUrl, sql, openPool, tenant } = await startTenant(t, { mode: 'api' })
  const startWorker = () =>
    startService(t, { databaseUrl, mode: 'worker', env: { RETRY_DELAY_SECONDS: '3600', ...env } })
  const worker = await startWorker()
  await tenant.createEndpoint(receiver.url('/hook'))
  const [id] = (await tenant.publish()).delivery_ids
  await receiver.until(1)
  const delivery = async () => (await tenant.call('GET', `/v1/deliveries/${id}`)).body
  const requests = async () => [...(await sql`select * from waybill.replay_requests`)]
  return {
    receiver,
    sql,
    tenant,
    worker,
    startWorker,
    open: answer.open,
    delivery,
    requests,
    replay: async () => assert.equal((await tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202),
    until: (status: string) =>
      waitFor(async () => (await delivery()).status === status, { what: `the delivery to be ${status}` }),
    /** Sweeps until no request is left. */
    async sweep() {
      const sweep = startSweep({ pool: openPool(), log: createLog('silent'), longestWaitSeconds: 0 })
      cleanUp(t, sweep.stop)
      const isDone = async () => {
        sweep.wake()
        return (await requests()).length === 0
      }
      await waitFor(isDone, { what: 'the requests to be dealt with' })
    },
  }
}

test('what is replayed while it is attempted is tried again at once if that attempt fails', async (t) => {
  const { receiver, open, replay, until, delivery, requests } = await startAttempt(t, 500)
  await Promise.all(Array.from({ length: 20 }, replay))
  open()
  await receiver.until(2)
  await until('delivered')
  assert.equal((await delivery()).attempt_count, 2)
  assert.deepEqual(await requests(), [])
})

test('what is replayed during its last attempt has all of its retries again', async (t) => {
  const { receiver, sql, open, replay, until } = await startAttempt(t, 500, { RETRY_LIMIT: '0' })
  await replay()
  open()
  await receiver.until(2)
  await until('delivered')
  const [counted] =
    await sql`select pending::int, retrying::int, delivered::int, dead_lettered::int from waybill.endpoint_stats`
  assert.deepEqual({ ...counted }, { pending: 0, retrying: 0, delivered: 1, dead_lettered: 0 })
})

test('what is replayed during an attempt that finds its endpoint gone waits until that is active again', async (t) => {
  const { receiver, tenant, open, replay, until, requests } = await startAttempt(t, 410)
  await replay()
  open()
  await waitFor(async () => (await requests()).length === 0, { what: 'the replay to be carried out' })
  await until('pending')
  const [{ endpoint_id, is_active }] = (await tenant.call('GET', '/v1/endpoints')).body.data
  assert.equal(is_active, false)
  await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { is_active: true } })
  await until('delivered')
  assert.equal(receiver.receipts.length, 2)
})

test('what is replayed while an attempt is made that succeeds is not sent again', async (t) => {
  const { sql, sweep, open, replay, until, requests } = await startAttempt(t, 200)
  await replay()
  open()
  await until('delivered')
  assert.equal((await requests()).length, 1)
  await sweep()
  await until('delivered')
  assert.deepEqual([...(await sql`select from pgboss.job where name = 'deliveries'`)], [])
})

test('a replay that was asked for before the attempt that failed began is not carried out after it', async (t) => {
  const { sql, sweep, open, replay, until, delivery } = await startAttempt(t, 500)
  await replay()
  await sql`update waybill.replay_requests set asked_at = asked_at - interval '1 minute'`
  open()
  await until('retrying')
  await sweep()
  assert.ok(Date.parse((await delivery()).next_attempt_at) > Date.now() + 60_000)
})

test('a replay that was asked for during an attempt is carried out although its worker is killed before it can do so', async (t) => {
  const { receiver, sql, worker, startWorker, sweep, open, replay, until } = await startAttempt(t, 500)
  await replay()
  const [request] = await sql`delete from waybill.replay_requests returning tenant_id, delivery_id, asked_at`
  open()
  await until('retrying')
  await worker.kill()
  const { tenant_id, delivery_id, asked_at } = request!
  await sql`insert into waybill.replay_requests values (${tenant_id}, ${delivery_id}, ${asked_at})`
  await sweep()
  await startWorker()
  await receiver.until(2)
  await until('delivered')
})

test('what is replayed during its last attempt, whose worker is killed, is sent again', async (t) => {
  const { receiver, sql, worker, startWorker, sweep, replay, until } = await startAttempt(t, 200, { RETRY_LIMIT: '0' })
  await replay()
  await worker.kill()
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds'`
  await startWorker()
  await until('dead_lettered')
  await sweep()
  await receiver.until(2)
  await until('delivered')
})

test('what is replayed while it is a probe is the next probe at once if that fails', async (t) => {
  const env = {
    BREAKER_FAILURES: '1',
    BREAKER_SECONDS: '0',
    BREAKER_PROBE_SECONDS: '3600',
    BREAKER_PROBE_MAX_SECONDS: '3600',
  }
  const { receiver, sql, open, replay, until } = await startAttempt(t, 500, env)
  const probe = gate(500)
  receiver.script('/hook', probe.reply, 200)
  open()
  await until('retrying')
  await replay()
  await receiver.until(2)
  await replay()
  probe.open()
  await receiver.until(3)
  await until('delivered')
  assert.equal((await sql`select from waybill.attempts`).length, 3)
})

test('of failed attempts that wait to be caught up with, no more than five hundred are kept', {
  timeout: 15_000,
}, async (t) => {
  const { newSession, openPool } = await createDatabase(t)
  const unlock = await lock(newSession(), 'waybill.replay_requests in access exclusive mode')
  const catchUp = createCatchUp(openPool(), createLog('silent'))
  let caughtUp = 0
  const fail = () =>
    catchUp({ tenantId: 'acme', endpointId: randomUUID(), url: 'http://x', deliveryId: randomUUID() }).then(() => {
      caughtUp++
    })
  const kept = Array.from({ length: 500 }, fail)
  await fail()
  assert.equal(caughtUp, 1)
  await unlock()
  await Promise.all(kept)
  assert.equal(caughtUp, 501)
  await fail()
})
