import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { createDatabase, insertEndpoint, waitingForLocks } from './support/database.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const KINDS = ['attempts', 'deliveries', 'events']

/** The suffix of the partitions of a day, so many days ahead by the database's clock. */
async function dayAhead(sql: Pool, days: number): Promise<string> {
  const [row] = await sql`select to_char((now() at time zone 'utc')::date + ${days}::int, 'YYYYMMDD') as day`
  return row?.day
}

/** The kinds that have a partition of `day`. */
async function kindsOf(sql: Pool, day: string): Promise<string[]> {
  const rows = await sql<{ kind: string }[]>`
    select split_part(relname, '_', 1) as kind from pg_class
    where relnamespace = 'waybill'::regnamespace and relispartition and relkind = 'r' and relname like ${`%${day}`} order by 1`
  return rows.map(({ kind }) => kind)
}

/** Drops what there is of `day`: the seventh day ahead is not there when midnight has passed since the database was made. */
async function dropDay(sql: Pool, day: string): Promise<void> {
  for (const kind of KINDS) await sql.text(`drop table if exists waybill.${kind}_${day}`)
}

test('who makes an index on a day does not hold up a release', async (t) => {
  const { sql } = await createDatabase(t)
  const endpoint = await insertEndpoint(sql)
  const [held] = await sql<[{ id: string }]>`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select 'acme', waybill.make_delivery_id(id), id, ${endpoint}, 'late', true, now() from waybill.make_id(now()) id
    returning delivery_id as id`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held) values ('acme', ${endpoint}, 1, 1)`
  const yesterday = await dayAhead(sql, -1)
  await sql.begin(async (indexing) => {
    await indexing.text(`lock table waybill.deliveries_${yesterday} in share mode`)
    const released = await sql.begin(async (releasing) => {
      await releasing`set local lock_timeout = '2s'`
      return await releasing`
        select released from waybill.release_held(array['acme'], array[${endpoint}::uuid], array[0], array[10], interval '10 seconds')`
    })
    assert.deepEqual([...released], [{ released: 1 }])
  })
  assert.deepEqual([...(await sql`select id from pgboss.job where name = 'deliveries'`)], [{ id: held.id }])
})

test('attempts are counted by the hours of UTC, whatever the database’s time zone', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  await sql.text(`alter database ${new URL(databaseUrl).pathname.slice(1)} set timezone = 'Asia/Kolkata'`)
  const receiver = await startReceiver(t)
  const tenant = await createTenant(await startService(t, { databaseUrl }))
  await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  const minute = await waitFor(async () => {
    const [row] =
      await sql`select extract(minute from hour at time zone 'utc')::text as minute from waybill.attempt_counts`
    return row?.minute
  })
  assert.equal(minute, '0')
})

test('a row in the default partition costs its day the partitions, and no other day', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const days = await Promise.all([5, 6, 7].map((ahead) => dayAhead(sql, ahead)))
  for (const day of days) await dropDay(sql, day)
  // As what is published while the database's clock is ahead.
  const [{ event_id }] = (await sql`
    insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
    values ('early', waybill.make_id(now() + interval '6 days'), 'early', '{}', 0) returning event_id`) as [
    { event_id: string },
  ]
  const service = await startService(t, { databaseUrl, mode: 'api' })
  assert.deepEqual(await Promise.all(days.map((day) => kindsOf(sql, day))), [KINDS, [], KINDS])
  const said = await service.logged('database.notice')
  assert.equal(said.level, 'warn')
  assert.match(String(said.notice), /no partitions for \d{4}-\d\d-\d\d: the default partition has rows of that day/)
  const { key } = await createTenant(service, { tenant_id: 'early' })
  assert.equal((await service.call('GET', `/v1/events/${event_id}`, { key })).status, 200)
})

test('a dump keeps neither a start nor its readers waiting; the partitions come later', {
  timeout: 60_000,
}, async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const days = await Promise.all([6, 7].map((ahead) => dayAhead(sql, ahead)))
  for (const day of days) await dropDay(sql, day)
  await sql.begin(async (dump) => {
    await dump`lock table waybill.deliveries, waybill.attempts, waybill.events in access share mode`
    const service = await startService(t, { databaseUrl })
    assert.match(String((await service.logged('database.notice')).notice), /no partitions from .* on yet/)
    let isOver = false
    const making = sql`select waybill.make_partitions(7)`.then(() => {
      isOver = true
    })
    while (!isOver)
      await sql.begin(async (reading) => {
        await reading`set local lock_timeout = '2s'`
        // The first table that it waits for.
        await reading`select count(*) from waybill.events`
      })
    await making
    assert.deepEqual(await Promise.all(days.map((day) => kindsOf(sql, day))), [[], []])
  })
  await sql`select waybill.make_partitions(7)`
  assert.deepEqual(await Promise.all(days.map((day) => kindsOf(sql, day))), [KINDS, KINDS])
})

for (const zone of ['Pacific/Kiritimati', 'Etc/GMT+12'])
  test(`days are those of UTC where the database keeps the time of ${zone}`, async (t) => {
    const { sql } = await createDatabase(t)
    await sql.begin(async (making) => {
      const remake = async (timeZone: string) => {
        const there = await making<{ name: string }[]>`
          select relname as name from pg_class where relnamespace = 'waybill'::regnamespace and relispartition and relkind = 'r' and relname ~ '\\d{8}$'`
        for (const { name } of there) await making.text(`drop table waybill.${name}`)
        await making`select set_config('timezone', ${timeZone}, true)`
        await making`select waybill.make_partitions(7)`
        const made = await making<{ name: string; bounds: string }[]>`
          select relname as name, pg_get_expr(relpartbound, oid) as bounds from pg_class
          where relnamespace = 'waybill'::regnamespace and relispartition and relkind = 'r' and relname ~ '\\d{8}$' order by 1`
        return made.map((row) => ({ ...row }))
      }
      const days = await remake('UTC')
      assert.equal(days.length, 9 * KINDS.length)
      assert.deepEqual(await remake(zone), days)
    })
  })

test('somebody else’s tables that have the names of a day’s partitions are not taken for these', async (t) => {
  const { sql } = await createDatabase(t)
  const day = await dayAhead(sql, 6)
  await dropDay(sql, day)
  for (const kind of KINDS) await sql.text(`create table public.${kind}_${day} ()`)
  await sql`select waybill.make_partitions(7)`
  assert.deepEqual(await kindsOf(sql, day), KINDS)
})

test('of two that make the same partitions at once one makes them, and neither fails', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const day = await dayAhead(sql, 6)
  await dropDay(sql, day)
  let second: Promise<unknown> | undefined
  await sql.begin(async (first) => {
    await first`select waybill.make_partitions(7)`
    second = Promise.allSettled([newSession()`select waybill.make_partitions(7)`])
    await waitFor(() => waitingForLocks(sql), { intervalMs: 5, what: 'the second to wait' })
  })
  const [ended] = (await second) as PromiseSettledResult<unknown>[]
  assert.equal(ended?.status, 'fulfilled')
  assert.deepEqual(await kindsOf(sql, day), KINDS)
})

test('who would wait for retention, while that waits for it, makes its partitions later', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const day = await dayAhead(sql, 6)
  await dropDay(sql, day)
  const retention = newSession()
  await retention`begin`
  await retention`lock table only waybill.events in share update exclusive mode`
  let alone: Promise<unknown> | undefined
  await sql.begin(async (making) => {
    // As of the first moment of making one, when it reads what the table is like.
    await making`lock table only waybill.events in access share mode`
    alone = Promise.allSettled([retention`lock table only waybill.events in access exclusive mode`])
    await waitFor(() => waitingForLocks(sql), { intervalMs: 5, what: 'retention to wait' })
    await making`select waybill.make_partitions(7)`
  })
  const [locked] = (await alone) as PromiseSettledResult<unknown>[]
  assert.equal(locked?.status, 'fulfilled')
  await retention`rollback`
  assert.deepEqual(await kindsOf(sql, day), [])
  await sql`select waybill.make_partitions(7)`
  assert.deepEqual(await kindsOf(sql, day), KINDS)
})
