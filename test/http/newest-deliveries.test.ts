import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Db } from '../../src/db/open.ts'
import { fragment } from '../../src/db/statement.ts'
import { readNewest, TooMuch } from '../../src/http/newest-deliveries.ts'
import { createDatabase, insertEndpoint, lock } from '../support/database.ts'
import { keepDays } from '../support/days.ts'

const ACME = [fragment`tenant_id = 'acme'`]

/** Deliveries of so many days from today, two each; the last eighty days have partitions, and those a week ahead. */
async function startWith(t: TestContext, days: number[]) {
  const { sql, openPool } = await createDatabase(t)
  await keepDays(sql, { oldest: 80 })
  const endpoint = await insertEndpoint(sql)
  await sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, ${endpoint}, case nth when 1 then 'odd' else 'even' end, now()
    from unnest(${days}::int[]) day, generate_series(1, 2) nth,
      waybill.make_id(date_trunc('day', now(), 'utc') + day * interval '1 day' + nth * interval '1 hour') id`
  const rows = await sql<{ id: string }[]>`select delivery_id as id from waybill.deliveries order by 1 desc`
  return { sql, openPool, ids: rows.map(({ id }) => id) }
}

const read = async (sql: Db, asked: Partial<Parameters<typeof readNewest>[1]>) =>
  (await readNewest(sql, { where: ACME, offset: 0, limit: 1000, patienceMs: 1000, ...asked })).map(
    (row) => row.delivery_id,
  )

test('the newest deliveries are read in one order over all days, whatever bounds, offset and limit are asked for', async (t) => {
  const { sql, ids } = await startWith(t, [8, 9, 7, 3, 0, -1, -7, -8, -14, -15, -40, -67, -68, -79, -80, -81, -200])
  assert.equal(ids.length, 34)
  assert.deepEqual(await read(sql, {}), ids)
  for (let at = 0; at < ids.length; at += 3)
    for (const [offset, limit] of [
      [0, 1],
      [0, 5],
      [1, 4],
      [7, 12],
      [40, 1],
    ] as const) {
      const said = `from and below ${at}, offset ${offset}, limit ${limit}`
      const older = ids.slice(at + 1)
      assert.deepEqual(await read(sql, { below: ids[at], offset, limit }), older.slice(offset, offset + limit), said)
      const newer = ids.slice(0, at + 1)
      assert.deepEqual(await read(sql, { from: ids[at], offset, limit }), newer.slice(offset, offset + limit), said)
      const between = ids.slice(at + 1, at + 11)
      const bounds = { from: between.at(-1), below: ids[at] }
      assert.deepEqual(await read(sql, { ...bounds, offset, limit }), between.slice(offset, offset + limit), said)
    }
  const where = [...ACME, fragment`event_type = 'odd'`]
  const odd = await sql<
    { id: string }[]
  >`select delivery_id as id from waybill.deliveries where event_type = 'odd' order by 1 desc`
  assert.deepEqual(await read(sql, { where, offset: 2, limit: 9 }), odd.map(({ id }) => id).slice(2, 11))
})

/** How many days a read opens. */
const daysOpened = (sql: Awaited<ReturnType<typeof startWith>>['sql'], run: (sql: Db) => Promise<unknown>) =>
  sql.begin(async (sql) => {
    await run(sql)
    const [row] = await sql<[{ days: number }]>`
      select count(*)::int as days from pg_locks l join pg_class c on c.oid = l.relation
      where l.pid = pg_backend_pid() and relkind = 'r' and relname ~ '^deliveries_\\d+$'`
    return row.days
  })

test('a list opens the latest days, and older ones when those have not all that was asked for', async (t) => {
  const { sql, ids } = await startWith(t, [0, -1, -2, -70])
  assert.equal(await daysOpened(sql, (sql) => read(sql, { limit: 6 })), 15)
  assert.equal(await daysOpened(sql, (sql) => read(sql, { offset: 2, limit: 4 })), 15)
  assert.equal(await daysOpened(sql, (sql) => read(sql, { below: ids[5], limit: 1 })), 16 + 60)
  assert.equal(await daysOpened(sql, (sql) => read(sql, { limit: 7 })), 15 + 60 + 13)
  assert.equal(await daysOpened(sql, (sql) => read(sql, { from: ids[5] })), 10)
})

test('a list that cannot be read in time is too much', async (t) => {
  const { sql, openPool, ids } = await startWith(t, [0, -70])
  const release = await lock(sql, 'waybill.deliveries_default')
  const impatient = openPool({ patienceMs: 300 })
  assert.equal(
    await read(impatient, { limit: 2, below: 'ffffffff-ffff-ffff-ffff-ffffffffffff' }).catch(
      (error: unknown) => error instanceof TooMuch,
    ),
    true,
  )
  await release()
  // The first statement takes too long for another.
  const slow = async (asked: Parameters<typeof read>[1]) => {
    const looks = [0, 0]
    const clock = t.mock.method(performance, 'now', () => looks.pop() ?? 1001)
    return await read(sql, asked).finally(() => clock.mock.restore())
  }
  await assert.rejects(slow({ limit: 4 }), TooMuch)
  await assert.rejects(slow({ offset: 1, limit: 1 }), TooMuch)
  assert.equal((await slow({ limit: 2 })).length, 2)
  assert.equal((await slow({ limit: 4, from: ids[1] })).length, 2, 'there is no more')
  assert.equal((await slow({ limit: 4, patienceMs: Infinity })).length, 4)
})
