import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { createDatabase } from './support/database.ts'
import { assertBooks, settled } from './support/deliveries.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { createTenant, startService } from './support/service.ts'
import { verifyStandard } from './support/verify.ts'

/** The rows of every table, by table, as one moment saw them: what `pg_dump --data-only` writes. */
async function dump(sql: Pool): Promise<Map<string, string>> {
  return await sql.begin(async (tx) => {
    await tx`set transaction isolation level repeatable read`
    const tables = await tx<{ name: string }[]>`
      select format('%I.%I', n.nspname, c.relname) as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
      where n.nspname in ('waybill', 'pgboss') and c.relkind = 'r' order by 1`
    const rows = new Map<string, string>()
    for (const { name } of tables) {
      const [table] = await tx.text(`select coalesce(json_agg(t), '[]')::text as rows from ${name} t`)
      rows.set(name, table?.rows)
    }
    return rows
  })
}

/** Puts the rows of a dump in place of those of a database with the same schema. */
async function restore(sql: Pool, rows: Map<string, string>): Promise<void> {
  await sql.begin(async (tx) => {
    await tx`set local session_replication_role = replica`
    for (const name of rows.keys()) await tx.text(`truncate ${name} cascade`)
    for (const [name, text] of rows)
      await tx.text(
        `insert into ${name} overriding system value select * from json_populate_recordset(null::${name}, $1::text::json)`,
        [text],
      )
  })
}

test('after a restore of a dump that was made under load the service goes on, and repeats only what the dump does not know of', async (t) => {
  const original = await createDatabase(t)
  const receiver = await startReceiver(t)
  const first = await startService(t, { databaseUrl: original.url })
  const tenant = await createTenant(first)
  const { signing_secret } = await tenant.createEndpoint(receiver.url('/hook'))
  const events: string[] = []
  let keys = 0
  let publishing = true
  const publishers = Array.from({ length: 8 }, async () => {
    while (publishing) events.push((await tenant.publish('load.test', { n: keys }, `key-${keys++}`)).event_id)
  })
  await receiver.until(300, { timeoutMs: 30_000 })
  // However slowly events come, some are being sent at the moment of the dump.
  const { reply, open: goOn } = gate()
  receiver.script('/hook', reply)
  await receiver.until(receiver.receipts.length + 1)
  const backup = await dump(original.sql)
  goOn()
  const sentAtDump = receiver.receipts.length
  await receiver.until(sentAtDump + 100)
  publishing = false
  await Promise.all(publishers)
  await settled(original.sql)
  await first.stop()

  const copy = await createDatabase(t)
  await restore(copy.sql, backup)
  type Row = { delivery_id: string; event_id: string; status: string }
  const known = await copy.sql<Row[]>`select delivery_id, event_id, status from waybill.deliveries`
  const open = known.filter(({ status }) => status !== 'delivered').map(({ delivery_id }) => delivery_id)
  const inFlight = await copy.sql`select from pgboss.job where name = 'deliveries' and state = 'active'`
  assert.ok(open.length > 0 && inFlight.length > 0, 'it was a dump under load')

  const before = receiver.receipts.length
  const second = await startService(t, { databaseUrl: copy.url })
  await settled(copy.sql)
  const again = receiver.receipts.slice(before).map(({ headers }) => String(headers['service-delivery-id']))
  assert.deepEqual([...again].sort(), [...open].sort(), 'each of them once, under its old id')
  const sentBefore = new Set(receiver.receipts.slice(0, before).map(({ headers }) => headers['service-delivery-id']))
  assert.ok(
    again.every((id) => sentBefore.has(id)),
    'so that receivers know it',
  )
  for (const receipt of receiver.receipts.slice(before)) verifyStandard(receipt, signing_secret)

  // What it knows is served and its keys hold; it goes on taking events.
  const call: typeof tenant.call = (method, path, options) => second.call(method, path, { key: tenant.key, ...options })
  const { event_id } = known[0]!
  assert.equal((await call('GET', `/v1/events/${event_id}`)).status, 200)
  const lost = events.find((id) => !known.some((row) => row.event_id === id))!
  assert.equal((await call('GET', `/v1/events/${lost}`)).status, 404, 'what came after the dump is gone')
  const published = await call('POST', '/v1/events', { body: { event_type: 'load.test', payload: {} } })
  assert.equal(published.status, 202)
  await receiver.until(before + open.length + 1)
  await settled(copy.sql)
  await assertBooks(copy.sql)
})
