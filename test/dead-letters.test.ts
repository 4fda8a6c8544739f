import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import { startReceiver } from './support/receiver.ts'
import { startService, startTenant } from './support/service.ts'

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
})

test('a dead letter that the database refuses does not hold up those that follow', async (t) => {
  const { sql, tenant, worker, toldOf } = await start(t)
  await sql`
    insert into pgboss.job (name, data) values ('dead_letters', ${JSON.stringify({ tenant_id: tenant.tenantId, delivery_id: 'none' })})`
  await worker.logged('dead-letters.failed')
  const [id] = (await tenant.publish('a')).delivery_ids
  await toldOf(id!)
})
