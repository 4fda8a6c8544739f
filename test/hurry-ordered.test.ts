import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase, insertEndpoint } from './support/database.ts'

test('hurrying an ordered endpoint reads no deliveries but its own', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const endpoint = await insertEndpoint(sql, { ordered: true })
  const insert = (days: number, count: number, status: string) => sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, ${endpoint}, 'thing', ${status}::waybill.delivery_status, now()
    from (select waybill.make_id(date_trunc('day', now(), 'utc') + ${days} * interval '1 day' + n * interval '1 ms') as id
          from generate_series(1, ${count}) n) made`
  await insert(-1, 2000, 'delivered')
  await insert(0, 1000, 'retrying')
  await sql`
    select waybill.enqueue(json_agg(json_build_object('id', delivery_id, 'priority', 0, 'data', json_build_object('tenant_id', 'acme')))::text)
    from waybill.deliveries where status = 'retrying'`
  await sql`update pgboss.job set state = 'retry', start_after = now() + interval '1 hour' where name = 'deliveries'`
  await sql.text('analyze waybill.deliveries')
  await sql.text('analyze pgboss.job')
  const session = newSession()
  await session`select waybill.hurry_ordered('acme', ${endpoint})`
  await session`select pg_stat_force_next_flush()`
  const [due] = await sql`select count(*)::int as n from pgboss.job where name = 'deliveries' and start_after <= now()`
  assert.equal(due?.n, 1000)
  const [yesterday] = await sql`
    select seq_tup_read::int as read from pg_stat_user_tables
    where relname = 'deliveries_' || to_char((now() at time zone 'utc')::date - 1, 'YYYYMMDD')`
  assert.equal(yesterday?.read, 0)
})
