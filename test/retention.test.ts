import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase } from './support/database.ts'
import { ADMIN_KEY, createTenant, startService } from './support/service.ts'

const OLD = 200
const AT_ONCE = 8

test('an old delivery that is replayed while retention runs is kept with its event, or gone with it', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const service = await startService(t, {
    databaseUrl,
    mode: 'api',
    env: { RATE_LIMIT_DELIVERIES_REPLAY: '0', RETENTION_DAYS: '2' },
  })
  const tenant = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const made = await sql<{ event_id: string; delivery_id: string }[]>`
    with ids as materialized (
      select waybill.make_id(now() - interval '40 days' + n * interval '1 second') as event_id from generate_series(1, ${OLD}) n
    ), e as (insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) select ${tenant.tenantId}, event_id, 'old', '{}', 1 from ids)
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at, completed_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(event_id), event_id, ${endpoint_id}, 'old', 'delivered', now(), now() from ids
    returning event_id, delivery_id`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, delivered) values (${tenant.tenantId}, ${endpoint_id}, ${OLD})
    on conflict (tenant_id, endpoint_id) do update set delivered = ${OLD}`

  const replay = ({ delivery_id }: { delivery_id: string }) =>
    tenant.call('POST', `/v1/deliveries/${delivery_id}/replay`)
  const run = () => service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
  // Some before it has begun, most while it is under way; no more at once than there are connections for.
  const replays: Awaited<ReturnType<typeof replay>>[] = await Promise.all(made.slice(0, AT_ONCE).map(replay))
  const running = run()
  for (let from = AT_ONCE; from < OLD; from += AT_ONCE)
    replays.push(...(await Promise.all(made.slice(from, from + AT_ONCE).map(replay))))
  assert.equal((await running).status, 200)

  const [events, deliveries] = await Promise.all([
    sql`select event_id as id from waybill.events`,
    sql`select delivery_id as id from waybill.deliveries where status = 'pending'`,
  ]).then((found) => found.map((rows) => new Set(rows.map(({ id }) => id))))
  for (const [nth, { event_id, delivery_id }] of made.entries()) {
    const { status } = replays[nth]!
    const isKept = { 202: true, 404: false }[status]
    const errors = () => service.logs.flatMap(({ level, text }) => (level === 'error' ? [text] : [])).join('\n')
    assert.notEqual(isKept, undefined, `a replay was answered ${status}: ${errors()}`)
    assert.deepEqual([events!.has(event_id), deliveries!.has(delivery_id)], [isKept, isKept])
  }
  const [stats] = await sql`select pending::int, delivered::int from waybill.endpoint_stats`
  assert.deepEqual({ ...stats }, { pending: replays.filter(({ status }) => status === 202).length, delivered: 0 })
})

test('a day that a run had put aside when it died is deleted by the next one, with its counts', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const service = await startService(t, { databaseUrl, mode: 'api' })
  const tenant = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const tables = ['events', 'deliveries', 'attempts'].map((kind) => [kind, `${kind}_20260102`] as const)
  for (const [kind, table] of tables)
    await sql.unsafe(`create table waybill.${table} (like waybill.${kind} including all)`)
  await sql`
    with e as (
      insert into waybill.events_20260102 select ${tenant.tenantId}, waybill.make_id('2026-01-02 12:00Z'::timestamptz), 'old', '{}', null, 1 returning event_id
    )
    insert into waybill.deliveries_20260102 (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at, completed_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(event_id), event_id, ${endpoint_id}, 'old', 'delivered', now(), now() from e`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, delivered) values (${tenant.tenantId}, ${endpoint_id}, 3)
    on conflict (tenant_id, endpoint_id) do update set delivered = 3`

  const { body } = await service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
  assert.deepEqual([body.events, body.deliveries, body.attempts], [1, 1, 0])
  const [left] =
    await sql`select count(to_regclass('waybill.' || name))::int as tables, (select delivered::int from waybill.endpoint_stats)
    from unnest(${tables.map(([, table]) => table)}::text[]) as t (name)`
  assert.deepEqual({ ...left }, { tables: 0, delivered: 2 })
})
