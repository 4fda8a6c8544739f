import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { constants, PerformanceObserver } from 'node:perf_hooks'
import { test } from 'node:test'
import { promisify } from 'node:util'
import { openDb } from '../src/db.ts'
import { createLog } from '../src/log.ts'
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
  await sql.unsafe(`alter database "${new URL(url).pathname.slice(1)}" set jit = on`)
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

test('a transaction that begins at the end of a full line is one, and ends', async (t) => {
  const { url, sql } = await createDatabase(t)
  await sql`create table numbers (n int)`
  // A connection's line takes a hundred.
  for (let before = 95; before <= 101; before++) {
    const pool = openDb(url, { log: createLog('silent'), name: 'test', max: 1 })
    const sleep = async (seconds: number) => await pool`select pg_sleep(${seconds})`
    // Once before, or it is described first, and nothing is sent behind it.
    await sleep(0)
    const line = [sleep(0.1), ...Array.from({ length: before }, () => sleep(0))]
    // By then they are in line.
    await new Promise(setImmediate)
    const transaction = pool.begin((sql) => sql`insert into numbers values (${before})`)
    await Promise.all([...line, transaction])
    await pool`insert into numbers values (${-before})`
    assert.equal((await sql`select from numbers where abs(n) = ${before}`).length, 2, `behind ${before}`)
    await pool.end()
  }
})

test('a driver that was loaded before it could be mended fails the start', async () => {
  const mended = new URL('../src/driver.ts', import.meta.url).href
  const load = (...modules: string[]) => {
    const script = modules.map((name) => `await import('${name}')`).join('\n')
    return promisify(execFile)(process.execPath, ['--input-type=module', '-e', script])
  }
  await load(mended, 'postgres')
  await assert.rejects(load('postgres', mended), /loaded before it could be corrected/)
})
