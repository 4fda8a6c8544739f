import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { startTenant } from './support/service.ts'

/** Five deliveries of one type today, 2000 of another yesterday, and three of the first before all days, in the default partition. */
async function threeDays(t: TestContext) {
  const {
    sql,
    service,
    tenant: { tenantId, call, createEndpoint },
  } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await createEndpoint('http://127.0.0.1:9/')
  const insert = (days: number, count: number, type: string) => sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at)
    select ${tenantId}, waybill.make_delivery_id(id), id, ${endpoint_id}, ${type}, 'delivered', now()
    from (select waybill.make_id(date_trunc('day', now(), 'utc') + ${days} * interval '1 day' + n * interval '1 ms') as id
          from generate_series(1, ${count}) n) made`
  await insert(0, 5, 'wanted')
  await insert(-1, 2000, 'other')
  await insert(-9, 3, 'wanted')
  await sql.text('analyze waybill.deliveries')
  return { sql, service, call, insert }
}

/** Asks for a page that today's deliveries fill, and looks what was read for it of yesterday. */
async function readOfYesterday({ sql, service, call }: Awaited<ReturnType<typeof threeDays>>): Promise<number> {
  const { body } = await call('GET', '/v1/deliveries?event_type=wanted&limit=4')
  assert.equal(body.data.length, 4)
  // What a connection has read is in the statistics when it has ended.
  await service.stop()
  const [yesterday] = await sql`
    select (idx_tup_fetch + seq_tup_read)::int as read from pg_stat_user_tables
    where relname = 'deliveries_' || to_char((now() at time zone 'utc')::date - 1, 'YYYYMMDD')`
  return yesterday?.read
}

test('a list reads no day older than what it shows', async (t) => {
  assert.equal(await readOfYesterday(await threeDays(t)), 0)
})

/** A day of its own, with one delivery, between which and yesterday there is none. */
async function keepOldDay(sql: Pool) {
  const [old] = await sql`
    select to_char(day, 'YYYYMMDD') as day, waybill.first_id(day at time zone 'utc') as first,
      waybill.first_id((day + interval '1 day') at time zone 'utc') as end
    from (select (now() at time zone 'utc')::date - 5 + time '0:00' as day) d`
  await sql.text(
    `create table waybill.deliveries_${old?.day} partition of waybill.deliveries for values from ('${old?.first}') to ('${old?.end}')`,
  )
  await sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at)
    select tenant_id, waybill.make_delivery_id(id), id, endpoint_id, 'wanted', 'delivered', now()
    from waybill.endpoints, waybill.make_id(now() - interval '5 days') id`
}

test('so it does when retention has kept an old day and none of those between', async (t) => {
  const days = await threeDays(t)
  await keepOldDay(days.sql)
  assert.equal(await readOfYesterday(days), 0)
})

test('a list goes on from the days to the default partition, and begins there if there are no days for the newest', async (t) => {
  const { sql, call, insert } = await threeDays(t)
  await keepOldDay(sql)
  await insert(9, 2, 'wanted')
  const rows = await sql`select delivery_id from waybill.deliveries where event_type = 'wanted' order by 1 desc`
  const all = rows.map((row) => row.delivery_id)
  const ids = (body: { data: { delivery_id: string }[] }) => body.data.map((row) => row.delivery_id)
  const whole = await call('GET', '/v1/deliveries?event_type=wanted&limit=20')
  assert.deepEqual(ids(whole.body), all)
  const first = await call('GET', '/v1/deliveries?event_type=wanted&limit=3')
  const second = await call('GET', `/v1/deliveries?event_type=wanted&limit=9&cursor=${first.body.next_cursor}`)
  assert.deepEqual([...ids(first.body), ...ids(second.body)], all)
  const skipped = await call('GET', '/v1/deliveries?event_type=wanted&limit=9&offset=4')
  assert.deepEqual(ids(skipped.body), all.slice(4))
})

test('a list goes on from its cursor within the times that were asked for', async (t) => {
  const { sql, call, insert } = await threeDays(t)
  await insert(9, 2, 'wanted')
  const rows = await sql`select delivery_id from waybill.deliveries where event_type = 'wanted' order by 1 desc`
  const until = new Date(Date.now() + 86_400_000).toISOString()
  const asked = `/v1/deliveries?event_type=wanted&limit=3&until=${until}`
  const first = await call('GET', asked)
  const second = await call('GET', `${asked}&cursor=${first.body.next_cursor}`)
  const ids = [...first.body.data, ...second.body.data].map((row) => row.delivery_id)
  assert.deepEqual(
    ids,
    rows.slice(2, 8).map((row) => row.delivery_id),
  )
})

test('a list of what an endpoint or a tenant has none of reads no deliveries', async (t) => {
  const { sql, service, call } = await threeDays(t)
  const { body: other } = await call('POST', '/v1/endpoints', {
    body: { url: 'http://127.0.0.1:9/', subscribed_events: ['*'] },
  })
  for (const filter of [`endpoint_id=${other.endpoint_id}`, 'status=retrying'])
    assert.deepEqual((await call('GET', `/v1/deliveries?${filter}`)).body.data, [])
  await service.stop()
  const [all] = await sql`
    select sum(idx_tup_fetch + seq_tup_read)::int as read from pg_stat_user_tables where relname ~ '^deliveries_'`
  assert.equal(all?.read, 0)
})
