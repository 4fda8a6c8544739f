import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { publishMany } from './support/deliveries.ts'
import { fillEmptiedQueue } from './support/queue.ts'
import { startReceiver } from './support/receiver.ts'
import { startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** Jobs that wait for tomorrow: a statement that goes through the queue reads all of them. */
const OTHERS = 5000
const EACH = 1000

test('a burst that fails, is answered late or finds its endpoint gone reads few other jobs, by statistics of a queue that was all but empty', async (t) => {
  const receiver = await startReceiver(t)
  receiver.script('/failing', 500)
  receiver.script('/gone', 410)
  receiver.script('/late', async () => {
    await sleep(100)
    return 200
  })
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await fillEmptiedQueue(sql, OTHERS)
  await sql`
    update pgboss.job set state = 'retry', start_after = now() + interval '1 day', priority = waybill.retry_priority(now() + interval '1 day')
    where name = 'deliveries'`
  for (const type of ['failing', 'gone', 'late']) {
    await tenant.createEndpoint(receiver.url(`/${type}`), { subscribed_events: [type] })
    await publishMany(sql, tenant.tenantId, EACH, type)
  }
  const read = async () => {
    const [row] = await sql<[{ read: number }]>`
      select sum(seq_tup_read + idx_tup_fetch)::int as read from pg_stat_user_tables where schemaname = 'pgboss' and n_live_tup > 100`
    return row.read
  }
  const before = await read()
  const worker = await startService(t, { databaseUrl, mode: 'worker' })
  await waitFor(
    async () => (await sql`select from waybill.deliveries where status = 'pending' and not held limit 1`).length === 0,
    { timeoutMs: 30_000, what: 'all to be attempted or held' },
  )
  // What its connections have read is in the statistics once they have ended.
  await worker.stop()
  const each = ((await read()) - before) / (3 * EACH)
  t.diagnostic(`${each.toFixed(1)} jobs were read for each delivery`)
  assert.ok(receiver.at('/failing').length > 0 && receiver.at('/gone').length > 0)
  assert.equal(receiver.at('/late').length, EACH)
  assert.ok(each < 40)
})
