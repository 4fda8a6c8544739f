import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Db } from '../../src/db/open.ts'
import { foldCounts } from '../../src/upkeep/fold-counts.ts'
import { createDatabase, waitingForLocks } from '../support/database.ts'
import { settled } from '../support/deliveries.ts'
import { startReceiver } from '../support/receiver.ts'
import { createTenant, startTenant, type Tenant } from '../support/service.ts'
import { passHour, waitFor } from '../support/wait.ts'

test("counts older than health's 24 hours are summed up by tenant and day, and nobody is told anything else", async (t) => {
  await passHour()
  const receiver = await startReceiver(t)
  receiver.script('/hook', 500, 200)
  const { sql, openPool, service, tenant } = await startTenant(t, { env: { RETRY_DELAY_SECONDS: '1' } })
  const other = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  await settled(sql)
  // Four endpoints of either tenant for three days: a success, a failure, no response and a broken 2xx in each hour. More tenants
  // than one statement looks at, of which the last has some, too.
  await sql`
    insert into waybill.tenants (tenant_id, tenant_slug) select 'zz_' || lpad(n::text, 3, '0'), 'zz-' || n from generate_series(1, 120) n`
  await sql`
    insert into waybill.attempt_counts (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
    select tenant, md5(tenant || e)::uuid, date_trunc('hour', now(), 'utc') - h * interval '1 hour', code, e + h, e, 10 * h
    from unnest(array[${tenant.tenantId}, ${other.tenantId}, 'zz_120']) tenant, generate_series(1, 4) e, generate_series(0, 72) h,
      unnest(array[200, 503, 0, -202]) code`

  const told = async (one: Tenant) => (await one.call('GET', '/v1/metrics/summary')).body
  const health = async () => (await tenant.call('GET', `/v1/endpoints/${endpoint_id}/health`)).body
  const recent = () =>
    sql`select * from waybill.attempt_counts where hour > date_trunc('hour', now(), 'utc') - interval '24 hours' order by 1, 2, 3, 4`
  const older = () => sql`
    select tenant_id, date_trunc('day', hour, 'utc') as day, status_code, sum(attempts) as attempts, sum(retries) as retries, sum(duration_ms) as ms
    from waybill.attempt_counts where hour <= date_trunc('hour', now(), 'utc') - interval '24 hours' group by 1, 2, 3 order by 1, 2, 3`
  const all = async () => [await told(tenant), await told(other), await health(), await older(), await recent()]

  const before = await all()
  assert.equal(before[0].attempts_by_status_code[503], 4 * 73 * 36 + 73 * 10)
  const pool = openPool({ max: 2 })
  await Promise.all([foldCounts(pool), foldCounts(pool)])
  assert.deepEqual(await all(), before)
  const folded = await sql`
    select distinct endpoint_id from waybill.attempt_counts where hour <= date_trunc('hour', now(), 'utc') - interval '24 hours'`
  assert.deepEqual(folded, [{ endpoint_id: '00000000-0000-0000-0000-000000000000' }])
  const rows = async () => (await sql`select from waybill.attempt_counts`).length
  const left = await rows()
  const days = new Set((before[3] as { day: Date }[]).map(({ day }) => day.getTime())).size
  assert.equal(left, (before[4] as unknown[]).length + 3 * 4 * days)

  // An hour later one more is due, and added to what its day has.
  await sql`
    update waybill.attempt_counts set hour = hour - interval '1 hour'
    where endpoint_id <> '00000000-0000-0000-0000-000000000000' and hour = date_trunc('hour', now(), 'utc') - interval '23 hours'`
  const later = await all()
  await foldCounts(pool)
  assert.deepEqual(await all(), later)
  assert.ok((await rows()) < left)
})

test('a run that is the victim of a deadlock with another goes on', async (t) => {
  const { sql, newSession, openPool } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) select n, n from unnest(array['a', 'b']) n`
  await sql`
    insert into waybill.attempt_counts (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
    select tenant_id, md5('e')::uuid, '2020-02-02', 200, 1, 0, 1 from waybill.tenants`
  const take = (session: Db, tenantId: string) =>
    session`select from waybill.attempt_counts where tenant_id = ${tenantId} for update`
  let folding: Promise<void> | undefined
  await newSession().begin(async (other) => {
    await other`set local deadlock_timeout = '1h'`
    await take(other, 'b')
    folding = foldCounts(openPool())
    await waitFor(async () => (await waitingForLocks(sql)) === 1, { what: 'it to wait for the other' })
    await take(other, 'a')
  })
  await folding
  const left = await sql`select tenant_id, endpoint_id from waybill.attempt_counts order by 1`
  assert.deepEqual(
    [...left],
    ['a', 'b'].map((tenant_id) => ({ tenant_id, endpoint_id: '00000000-0000-0000-0000-000000000000' })),
  )
})

test('the counts of many tenants are looked up, and not read as a whole for each hundred', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) select n, n from generate_series(1, 3000) n`
  await sql`
    insert into waybill.attempt_counts (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
    select tenant_id, md5(tenant_id)::uuid, date_trunc('hour', now(), 'utc') - h * interval '1 hour', 200, 1, 0, 1
    from waybill.tenants, generate_series(1, 40) h`
  await sql`vacuum analyze`
  const session = newSession()
  await foldCounts(session)
  await session`select pg_stat_force_next_flush()`
  const [{ scans }] = await sql<[{ scans: number }]>`
    select seq_scan::int as scans from pg_stat_user_tables where relname = 'attempt_counts'`
  assert.equal(scans, 0)
})
