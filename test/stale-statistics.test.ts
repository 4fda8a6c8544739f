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
  const { databaseUrl, sql, newSession, tenant, service } = await startTenant(t, { mode: 'api' })
  const session = newSession()
  await fillEmptiedQueue(session, OTHERS)
  await session`
    update pgboss.job set state = 'retry', start_after = now() + interval '1 day', priority = waybill.retry_priority(now() + interval '1 day')
    where name = 'deliveries'`
  const burst = async (path: string, type: string, count: number) => {
    await tenant.createEndpoint(receiver.url(path), { subscribed_events: [type] })
    await publishMany(session, tenant.tenantId, count, type)
  }
  await burst('/failing', 'failing', EACH)
  await burst('/late', 'late', EACH)
  // Each gets only a few before it is known to be gone.
  for (let nth = 0; nth < 20; nth++) await burst('/gone', `gone.${nth}`, EACH / 20)
  // What a connection has read is in the statistics when it has ended.
  await Promise.all([service.stop(), session.end()])
  const read = async () => {
    const [row] = await sql<[{ read: number; jobs: number }]>`
      select (seq_tup_read + idx_tup_fetch)::int as read, n_live_tup::int as jobs from pg_stat_user_tables
      where schemaname = 'pgboss' and relname = (select table_name from pgboss.queue where name = 'deliveries')`
    return row
  }
  await waitFor(async () => (await read()).jobs >= OTHERS, { what: 'the statistics to tell of all jobs' })
  const before = await read()

  const worker = await startService(t, { databaseUrl, mode: 'worker' })
  await waitFor(
    async () => (await sql`select from waybill.deliveries where status = 'pending' and not held limit 1`).length === 0,
    { timeoutMs: 30_000, what: 'all to be attempted or held' },
  )
  await worker.stop()
  await waitFor(
    async () =>
      (await sql`select from pg_stat_activity where datname = current_database() and application_name like 'waybill%'`)
        .length === 0,
    { what: 'the worker’s connections to end' },
  )
  const each = ((await read()).read - before.read) / (3 * EACH)
  t.diagnostic(`${each.toFixed(1)} jobs were read for each delivery`)
  assert.ok(
    receiver.at('/late').length >= EACH && receiver.at('/failing').length > 0 && receiver.at('/gone').length >= 20,
  )
  // About 5, of which the looks at all that come now and then are 2 each. One statement for each batch would be 9 more.
  assert.ok(each > 0 && each < 12)
})
