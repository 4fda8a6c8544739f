import assert from 'node:assert/strict'
import { test } from 'node:test'
import { PATIENCE_MS } from '../src/db/open.ts'
import { createLog } from '../src/log.ts'
import { createBoss } from '../src/queue.ts'
import { createDatabase, insertEndpoint, type TestDatabase, waitingFor } from './support/database.ts'
import { ADMIN_KEY, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const SCHEDULED = ['attempt_counts', 'partitions', 'queue_clock', 'retention']

/** Has the worker do the scheduled work now. */
async function makeDue(url: string, names: string[]): Promise<void> {
  const boss = createBoss(url, createLog('silent'))
  await boss.start()
  for (const name of names) await boss.send(name)
  await boss.stop({ graceful: false })
}

/** Runs `work` while a run of retention waits for a lock. */
async function duringRetention({ url, sql }: TestDatabase, work: () => Promise<void>): Promise<void> {
  await sql.begin(async (locking) => {
    await locking`lock table waybill.idempotency_keys in access exclusive mode`
    await makeDue(url, ['retention'])
    await waitFor(async () => (await waitingFor(sql, 'waybill.idempotency_keys')) > 0, {
      timeoutMs: 30_000,
      what: 'retention to be under way',
    })
    await work()
  })
}

test('scheduled work that fails says so in the log, and is tried again', async (t) => {
  const { url, sql } = await createDatabase(t)
  const worker = await startService(t, { databaseUrl: url, mode: 'worker' })
  await sql`alter function waybill.make_partitions rename to gone_1`
  await sql`alter function waybill.rebase_queue rename to gone_2`
  await sql`alter table waybill.idempotency_keys rename to gone_3`
  await sql`alter table waybill.attempt_counts rename to gone_4`
  await makeDue(url, SCHEDULED)
  for (const name of SCHEDULED) {
    const line = await worker.logged(`${name}.failed`)
    assert.equal(line.level, 'error')
    assert.match((line.err as { message: string }).message, /does not exist/)
  }
  const states = () => sql`select name from pgboss.job where name = any(${SCHEDULED}) and state = 'retry' order by name`
  await waitFor(
    async () =>
      assert.deepEqual(
        (await states()).map(({ name }) => name),
        SCHEDULED,
      ) ?? true,
  )
  await sql`update pgboss.job set start_after = now() where name = any(${SCHEDULED}) and state = 'retry'`
  for (const name of SCHEDULED) {
    const failed = () => worker.logs.filter(({ msg }) => msg === `${name}.failed`)
    await waitFor(() => failed().length >= 2, { timeoutMs: 30_000, what: `${name} to be tried again` })
  }
})

test('a worker that stops in the middle of scheduled work has nothing to complain of', async (t) => {
  const database = await createDatabase(t)
  const worker = await startService(t, { databaseUrl: database.url, mode: 'worker' })
  await duringRetention(database, async () => {
    assert.deepEqual(await worker.stop(), { code: 0, signal: null })
  })
  assert.deepEqual(
    worker.logs.filter(({ level }) => level === 'error'),
    [],
  )
})

test('retention that takes hours is not begun once more meanwhile, but where its worker is lost', async (t) => {
  const database = await createDatabase(t)
  const { url, sql } = database
  const boss = createBoss(url, createLog('silent'))
  t.after(() => boss.stop({ graceful: false }))
  await startService(t, { databaseUrl: url, mode: 'worker' })
  const superviseAndLook = async () => {
    await sql`update pgboss.queue set monitor_claim_on = null, monitor_on = null`
    await boss.supervise('retention')
    return (await sql<{ state: string }[]>`select state from pgboss.job where name = 'retention'`)[0]?.state
  }
  await duringRetention(database, async () => {
    await boss.start()
    await sql`update pgboss.job set started_on = now() - interval '20 hours' where name = 'retention'`
    assert.equal(await superviseAndLook(), 'active')
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 minutes' where name = 'retention'`
    assert.equal(await superviseAndLook(), 'retry')
  })
})

test('a statement of retention may take an hour, on its schedule and on demand', async (t) => {
  const { url, sql } = await createDatabase(t)
  await sql.text(`
    create table public.noted (patience text);
    create function public.note() returns trigger language plpgsql as $$ begin
      insert into public.noted values (current_setting('statement_timeout'));
      return null;
    end $$;
    create trigger note after delete on waybill.idempotency_keys execute function public.note()`)
  // Else there is one more at 03:17 UTC.
  const service = await startService(t, { databaseUrl: url, env: { RETENTION_CRON: '0 0 29 2 *' } })
  await makeDue(url, ['retention'])
  const noted = async () => (await sql`select patience from public.noted`).map(({ patience }) => patience)
  await waitFor(async () => (await noted()).length === 1, { timeoutMs: 30_000, what: 'the scheduled run' })
  const { status } = await service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
  assert.equal(status, 200)
  assert.deepEqual(await noted(), ['1h', '1h'])
})

test('retention on its schedule keeps as many days as it is told to', async (t) => {
  const env = { RETENTION_DAYS: '2', RETENTION_CRON: '0 0 29 2 *' }
  const { databaseUrl: url, sql, service, tenant } = await startTenant(t, { env })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  await sql`
    insert into waybill.attempt_counts (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
    select ${tenant.tenantId}, ${endpoint_id}, date_trunc('day', now(), 'utc') - n * interval '1 day', 200, 1, 0, 1
    from generate_series(1, 3) n`
  const left = async () => (await sql`select from waybill.attempt_counts`).length
  await service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: false } })
  assert.equal(await left(), 3, 'one that only counts deletes nothing')
  await makeDue(url, ['retention'])
  await waitFor(async () => (await left()) < 3, { timeoutMs: 30_000, what: 'the scheduled run' })
  assert.equal(await left(), 2)
  await waitFor(() => service.logs.some(({ msg, applied }) => msg === 'retention.run' && applied))
})

test('what is placed by the queue clock as it was before it was set back is brought to it by the same run', async (t) => {
  const { url, sql } = await createDatabase(t)
  await startService(t, { databaseUrl: url, mode: 'worker' })
  await sql`update waybill.queue_clock set tag = 2e8`
  await makeDue(url, ['queue_clock'])
  const clock = async () => (await sql<{ tag: number }[]>`select tag from waybill.queue_clock`)[0]!.tag
  await waitFor(async () => (await clock()) < 1000, { timeoutMs: 30_000, what: 'it to be set back' })
  // Whoever had read it before may commit as late as this.
  const over = Date.now() + PATIENCE_MS
  await waitFor(() => Date.now() > over)
  await insertEndpoint(sql)
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, tag) select tenant_id, endpoint_id, 2e8 from waybill.endpoints`
  const isGathered = async () => (await sql`select from waybill.endpoint_stats where tag < 1000`).length === 1
  await waitFor(isGathered, { timeoutMs: 30_000, what: 'the endpoint to have a place again' })
})

test('scheduled work that an earlier version has set up is done as it is to be now', async (t) => {
  const { url, sql } = await createDatabase(t)
  const read = async () => [
    ...(await sql`
      select name, retry_limit, retry_delay, expire_seconds, heartbeat_seconds from pgboss.queue where name = any(${SCHEDULED}) order by name`),
  ]
  const start = () => startService(t, { databaseUrl: url, mode: 'worker' })
  await (await start()).stop()
  const made = await read()
  assert.equal(made.length, SCHEDULED.length)
  await sql`
    update pgboss.queue set retry_limit = 2, retry_delay = 0, expire_seconds = 900, heartbeat_seconds = null where name = any(${SCHEDULED})`
  await start()
  assert.deepEqual(await read(), made)
})

test('what is far ahead of the queue clock is brought to it on schedule', async (t) => {
  const { databaseUrl: url, sql, tenant } = await startTenant(t)
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  await tenant.publish()
  await sql`update waybill.endpoint_stats set tag = 150000000`
  await makeDue(url, ['queue_clock'])
  await waitFor(async () => (await sql`select from waybill.endpoint_stats where tag < 1000`).length === 1, {
    timeoutMs: 30_000,
    what: 'the endpoint to have a place again',
  })
})
