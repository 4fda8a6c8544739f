import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setImmediate as turn } from 'node:timers/promises'
import { DatabaseError } from 'pg'
import { startAnnouncing } from '../../src/flow/announce.ts'
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
