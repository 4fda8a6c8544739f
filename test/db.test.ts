import assert from 'node:assert/strict'
import { constants, PerformanceObserver } from 'node:perf_hooks'
import { test } from 'node:test'
import fc from 'fast-check'
import { openDb } from '../src/db.ts'
import { createLog } from '../src/log.ts'
import { assignments, fragment, identifier, join, textList } from '../src/sql.ts'
import { createDatabase } from './support/database.ts'

test('a connection that may wait for ever is kept, with its locks, through an hour without use', async (t) => {
  const { url } = await createDatabase(t)
  t.mock.timers.enable({ apis: ['setTimeout'] })
  // The driver connects by timers, too.
  const clock = setInterval(() => t.mock.timers.tick(1), 1)
  const log = createLog('silent')
  const pids = async (patienceMs: number) => {
    const pool = openDb(url, { log, name: 'test', max: 1, patienceMs })
    const pid = async () => (await pool`select pg_backend_pid() as pid`)[0]?.pid
    const before = await pid()
    t.mock.timers.tick(3_700_000)
    const after = await pid()
    await pool.end()
    return [before, after]
  }
  const [kept, keptLater] = await pids(0)
  const [other, otherLater] = await pids(3000)
  clearInterval(clock)
  // Before the database's own connections are closed: their timers are real.
  t.mock.timers.reset()
  assert.equal(keptLater, kept)
  assert.notEqual(otherLater, other, 'any other is closed')
})

test('what went into a query is let go with it, and not only by a full collection', async (t) => {
  const { url } = await createDatabase(t)
  const pool = openDb(url, { log: createLog('silent'), name: 'test', max: 1 })
  t.after(() => pool.end())
  const isFull = (entry: unknown) =>
    (entry as { detail: { kind: number } }).detail.kind === constants.NODE_PERFORMANCE_GC_MAJOR
  let full = 0
  const observer = new PerformanceObserver((list) => {
    full += list.getEntries().filter(isFull).length
  })
  observer.observe({ entryTypes: ['gc'] })
  // Two hundred megabytes, of which never more than one query's are needed; kept, they take a dozen collections.
  for (let nth = 0; nth < 8000; nth++) {
    const texts = Array.from({ length: 250 }, (_, i) => `${nth} ${i}`.padEnd(80))
    await pool`select cardinality(${texts}::text[])`
  }
  observer.disconnect()
  assert.ok(full <= 6, `${full} full collections`)
})

test('plans are neither compiled nor kept by every statement, whatever the database says', async (t) => {
  const { url, sql } = await createDatabase(t)
  await sql.text(`alter database "${new URL(url).pathname.slice(1)}" set jit = on`)
  const pool = openDb(url, { log: createLog('silent'), name: 'test', max: 1 })
  const [settings] = await pool`select current_setting('jit') as jit, current_setting('plan_cache_mode') as plans`
  await pool.end()
  assert.deepEqual({ ...settings }, { jit: 'off', plans: 'force_custom_plan' })
})

test('of the connections that are free the one that was used last is next', async (t) => {
  const { url } = await createDatabase(t)
  const pool = openDb(url, { log: createLog('silent'), name: 'test', max: 4 })
  t.after(() => pool.end())
  const pid = async () => (await pool`select pg_backend_pid() as pid, pg_sleep(0.1)`)[0]?.pid
  const opened = await Promise.all([pid(), pid(), pid()])
  assert.equal(new Set(opened).size, 3)
  const used = [await pid(), await pid(), await pid()]
  assert.deepEqual(used, [used[0], used[0], used[0]])
})

test('lists arrive as they are, whatever stands in them', async (t) => {
  const { sql } = await createDatabase(t)
  const texts = fc.array(fc.option(fc.string({ unit: 'binary' }).map((text) => text.replaceAll('\0', '"\\{},NULL '))))
  await fc.assert(
    fc.asyncProperty(texts, async (list) => {
      const [row] = await sql`select ${list}::text[] as escaped, ${textList(list)}::text[] as as_kept`
      assert.deepEqual(row, { escaped: list, as_kept: list })
    }),
  )
  const other = {
    flags: [true, false, null],
    moments: [new Date(0), null],
    bytes: [Buffer.from([0, 255]), null],
    none: [],
  }
  const [row] = await sql`
    select ${other.flags}::boolean[] as flags, ${other.moments}::timestamptz[] as moments, ${other.bytes}::bytea[] as bytes, ${other.none}::uuid[] as none`
  assert.deepEqual(row, other)
})

test('a parameter that is undefined is refused, and what is put together keeps its order', async (t) => {
  const { sql } = await createDatabase(t)
  await assert.rejects(sql`select ${undefined as unknown as null}`, TypeError)
  const conditions = join([fragment`n > ${1}`, fragment`n < ${5}`], ' and ')
  const rows = await sql<{ n: number }[]>`
    select n from generate_series(${0}::int, ${9}::int) as ${identifier('odd "name"')} (n) where ${conditions} and n <> ${3}`
  assert.deepEqual(
    rows.map(({ n }) => n),
    [2, 4],
  )
  await sql`create table things (id int, "a ""name""" text, kept text)`
  await sql`insert into things values (1, 'before', 'kept')`
  const [changed] = await sql`
    update things set ${assignments({ 'a "name"': 'after', kept: undefined })} where id = ${1} returning *`
  assert.deepEqual(changed, { id: 1, 'a "name"': 'after', kept: 'kept' })
})
