import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setImmediate as turn } from 'node:timers/promises'
import { DatabaseError } from 'pg'
import type { Db } from '../../src/db/open.ts'
import { announce, startAnnouncing } from '../../src/flow/announce.ts'
import { createLog } from '../../src/log.ts'
import { createDatabase, insertEndpoint } from '../support/database.ts'

test('of announcements that take too long half as many are told at once, until that is quick again', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const tooSlow = Object.assign(new DatabaseError('canceled', 8, 'error'), { code: '57014' })
  const asked: number[] = []
  const tell = async (_: unknown, most: number) => {
    asked.push(most)
    if (asked.length < 3) throw tooSlow
    return [{ told: asked.length < 5 ? most : 0 }]
  }
  const loop = startAnnouncing(tell as never, createLog('silent'))
  t.after(loop.stop)
  for (let failure = 1; failure < 3; failure++) {
    await turn()
    t.mock.timers.tick(500)
  }
  await turn()
  assert.deepEqual(asked, [100, 50, 25, 50, 100])
})

test('what a tenant is told goes to its own endpoints alone, whoever else asks to be told', async (t) => {
  const { sql } = await createDatabase(t)
  for (const tenant of ['acme', 'zeta']) await insertEndpoint(sql, { tenant, types: ['endpoint.disabled'] })
  await sql`select waybill.announce('acme', gen_random_uuid(), 'endpoint.disabled', '{}'), waybill.publish_announcements(100)`
  const told = await sql`
    select p.tenant_id from waybill.deliveries d left join waybill.endpoints p using (tenant_id, endpoint_id)`
  assert.deepEqual([...told], [{ tenant_id: 'acme' }])
})

test('no more announcements are told of at once than were asked for, and the oldest first', async (t) => {
  const { sql } = await createDatabase(t)
  await insertEndpoint(sql, { types: ['endpoint.disabled'] })
  await insertEndpoint(sql, { tenant: 'zeta', types: ['endpoint.disabled'] })
  for (const tenant of ['zeta', 'acme', 'acme'])
    await sql`select waybill.announce(${tenant}, gen_random_uuid(), 'endpoint.disabled', '{}')`
  // It lies behind those that came after it.
  await sql`update waybill.announcements set payload = payload where tenant_id = 'zeta'`
  assert.deepEqual([...(await sql`select waybill.publish_announcements(1)::int as told`)], [{ told: 1 }])
  assert.deepEqual([...(await sql`select tenant_id from waybill.events`)], [{ tenant_id: 'zeta' }])
})

/** Adds so many endpoints to `acme`, all for these types, the last ones by their ids. */
const addMany = (sql: Db, count: number, types: string[]) => sql`
  insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
  select 'acme', ('ffffffff-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'http://x', ${types}, '' from generate_series(1, ${count}::int) n`

test('who has asked to be told is found without reading the tenant’s other endpoints', async (t) => {
  const { newSession } = await createDatabase(t)
  const sql = newSession()
  await insertEndpoint(sql, { types: ['a'] })
  await sql.text('analyze waybill.endpoints')
  await addMany(sql, 5000, ['a', '*'])
  const read = async () => {
    await sql`select pg_stat_force_next_flush()`
    const [row] = await sql<[{ read: number }]>`
      select sum(idx_tup_fetch + seq_tup_read)::int as read from pg_stat_user_tables where schemaname = 'waybill' and relname = 'endpoints'`
    return row.read
  }
  const tell = (id: string) =>
    announce(
      sql,
      'delivery.dead_lettered',
      Array.from({ length: 100 }, () => ({ tenant_id: 'acme', endpoint_id: id })),
    )
  const told = async () => (await sql<[{ n: number }]>`select count(*)::int as n from waybill.announcements`)[0].n
  for (const wanted of [0, 100]) {
    const before = await read()
    await tell('ffffffff-0000-7000-8000-000000000001')
    assert.equal(await told(), wanted)
    await sql`select waybill.publish_announcements(100)`
    const rows = (await read()) - before
    assert.ok(rows <= 1000, `${rows} were read`)
    await sql`
      update waybill.endpoints set subscribed_events = '{delivery.dead_lettered}' where endpoint_id = 'ffffffff-0000-7000-8000-000000005000'`
  }
})

test('an announcement goes to ten thousand endpoints at most', async (t) => {
  const { newSession } = await createDatabase(t)
  const sql = newSession()
  const about = await insertEndpoint(sql, { types: ['endpoint.disabled'] })
  await addMany(sql, 10_001, ['endpoint.disabled'])
  await announce(sql, 'endpoint.disabled', [{ tenant_id: 'acme', endpoint_id: about }])
  await sql`select waybill.publish_announcements(100)`
  const [made] = await sql`
    select max(delivery_count)::int as counted, count(*)::int as made, count(*) filter (where endpoint_id = ${about})::int as about
    from waybill.events join waybill.deliveries using (tenant_id, event_id)`
  assert.deepEqual({ ...made }, { counted: 10_000, made: 10_000, about: 0 })
})
