import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase } from './support/database.ts'
import { createTenant, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

test('replays of a delivery that is locked keep one connection, and nobody who publishes, waiting', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const service = await startService(t, { databaseUrl, mode: 'api' })
  const tenant = await createTenant(service)
  await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const { delivery_ids } = await tenant.publish()
  const id = delivery_ids[0] as string
  const lock = await sql.reserve()
  t.after(() => lock.release())
  await lock`begin`
  await lock`select from waybill.deliveries where delivery_id = ${id} for update`

  const replays = Array.from({ length: 30 }, () => tenant.call('POST', `/v1/deliveries/${id}/replay`))
  const waiting = () =>
    sql`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%for update of d%'`
  await waitFor(async () => (await waiting()).length > 0, { what: 'a replay to wait' })
  for (let nth = 0; nth < 5; nth++) await tenant.publish()
  assert.ok((await waiting()).length <= 1)

  await lock`commit`
  // On a slow machine the lock was held for longer than they have.
  for (const { status } of await Promise.all(replays)) assert.ok(status === 202 || status === 500, `${status}`)
  assert.equal((await tenant.call('POST', `/v1/deliveries/${id}/replay`)).status, 202)
})
