import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { type TestContext, test } from 'node:test'
import { DatabaseError } from 'pg'
import { createDeadLetterTaker } from '../src/flow/dead-letter.ts'
import { createLog } from '../src/log.ts'
import { createDatabase, insertEndpoint, startBoss } from './support/database.ts'
import { startFailing } from './support/queue.ts'
import { startReceiver } from './support/receiver.ts'
import { startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** A worker, and a tenant that has a dead letter with each event, and an endpoint that is told of it. */
async function start(t: TestContext) {
  const receiver = await startReceiver(t)
  const env = { RETRY_LIMIT: '0' }
  const { databaseUrl, sql, newSession, tenant } = await startTenant(t, { mode: 'api', env })
  receiver.script('/bad', 500)
  await tenant.createEndpoint(receiver.url('/bad'), { subscribed_events: ['a'] })
  await tenant.createEndpoint(receiver.url('/told'), { subscribed_events: ['delivery.dead_lettered'] })
  const worker = await startService(t, { databaseUrl, mode: 'worker', env })
  /** Fails well before what was fetched from the dead letter queue, and not done, would come again. */
  const toldOf = async (deliveryId: string) => {
    const [told] = await receiver.until(1, { path: '/told', timeoutMs: 30_000 })
    assert.equal(JSON.parse(String(told!.body)).data.delivery_id, deliveryId)
  }
  return { sql, newSession, tenant, worker, toldOf }
}

test('a dead letter that the database had no time for is told of soon after', async (t) => {
  const { newSession, tenant, worker, toldOf } = await start(t)
  const [id] = await newSession().begin(async (sql) => {
    await sql`lock table waybill.announcements in access exclusive mode`
    const { delivery_ids } = await tenant.publish('a')
    await worker.logged('dead-letters.failed')
    return delivery_ids
  })
  await toldOf(id!)
  assert.equal((await worker.logged('delivery.dead_lettered')).delivery_id, id)
})

test('a dead letter that the database refuses does not hold up those that follow', async (t) => {
  const { sql, tenant, worker, toldOf } = await start(t)
  await sql`
    insert into pgboss.job (name, data) values ('dead_letters', ${JSON.stringify({ tenant_id: tenant.tenantId, delivery_id: 'none' })})`
  await worker.logged('dead-letters.failed')
  const [id] = (await tenant.publish('a')).delivery_ids
  await toldOf(id!)
})

test('a job without data in the dead letter queue is taken and does not hold up those that follow', async (t) => {
  const { sql, tenant, toldOf } = await start(t)
  await sql`insert into pgboss.job (name) values ('dead_letters')`
  await waitFor(
    async () => (await sql`select from pgboss.job where name = 'dead_letters' and state <> 'completed'`).length === 0,
  )
  const [id] = (await tenant.publish('a')).delivery_ids
  await toldOf(id!)
})

test('dead letters that were taken together with one that the database refuses come again a minute later', async (t) => {
  const { url, sql, openPool } = await createDatabase(t)
  const [pool, boss] = [openPool(), await startBoss(t, url)]
  const take = createDeadLetterTaker(pool, boss, createLog('silent'))
  for (const delivery_id of [randomUUID(), 'none']) await boss.send('dead_letters', { tenant_id: 'acme', delivery_id })
  await assert.rejects(take(), /invalid input syntax/)
  assert.equal(await take(), 0)
  await sql`delete from pgboss.job where data ->> 'delivery_id' = 'none'`
  await sql`update pgboss.job set started_on = started_on - interval '1 minute'`
  await boss.supervise('dead_letters')
  await waitFor(async () => (await take()) === 1, { what: 'the other one to come again' })
})

test('a dead letter is announced unless it is an announcement itself, or the month had no attempt left for it', async (t) => {
  const { url, sql, openPool } = await createDatabase(t)
  const boss = await startBoss(t, url)
  const { ids } = await startFailing(sql, Array<boolean>(5).fill(true))
  const types = ['endpoint.disabled', 'endpoint.recovered', 'delivery.dead_lettered', 'a', 'b']
  await insertEndpoint(sql, { types: ['delivery.dead_lettered'] })
  for (const [nth, delivery_id] of ids.entries()) {
    const reason = types[nth] === 'b' ? 'monthly_attempt_limit' : 'retries_exhausted'
    await sql`
      update waybill.deliveries set event_type = ${types[nth]!}, held = false, status = 'dead_lettered', dead_letter_reason = ${reason}::waybill.dead_letter_reason,
        completed_at = now() where delivery_id = ${delivery_id}`
    await boss.send('dead_letters', { tenant_id: 'acme', delivery_id })
  }
  assert.equal(await createDeadLetterTaker(openPool(), boss, createLog('silent'))(), 5)
  const told = await sql`select payload::jsonb ->> 'delivery_id' as id from waybill.announcements`
  assert.deepEqual([...told], [{ id: ids[3] }])
})

test('of dead letters that the database has no time for half as many are taken next', async (t) => {
  const { url, openPool } = await createDatabase(t)
  const boss = await startBoss(t, url)
  const asked: number[] = []
  const tooSlow = Object.assign(new DatabaseError('canceled', 8, 'error'), { code: '57014' })
  const hurried = new Proxy(boss, {
    get(boss, name) {
      if (name !== 'fetch') return Reflect.get(boss, name)
      return (queue: string, options: { batchSize: number }) => {
        asked.push(options.batchSize)
        if (asked.length < 3) throw tooSlow
        return boss.fetch(queue, options)
      }
    },
  })
  const take = createDeadLetterTaker(openPool(), hurried, createLog('silent'))
  for (let failure = 1; failure < 3; failure++) await assert.rejects(take, tooSlow)
  for (let success = 1; success < 3; success++) assert.equal(await take(), 0)
  assert.deepEqual(asked, [100, 50, 25, 50])
})
