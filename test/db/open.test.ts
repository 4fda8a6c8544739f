import assert from 'node:assert/strict'
import { constants, PerformanceObserver } from 'node:perf_hooks'
import { test } from 'node:test'
import { openDb } from '../../src/db/open.ts'
import { createLog } from '../../src/log.ts'
import { createDatabase } from '../support/database.ts'

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

test('a connection to a host that is lost ends within seconds', async (t) => {
  const { openPool } = await createDatabase(t)
  const [probes] = await openPool()`
    select current_setting('tcp_keepalives_idle') as idle, current_setting('tcp_keepalives_interval') as interval,
      current_setting('tcp_keepalives_count') as count, current_setting('tcp_user_timeout') as unsent_ms`
  assert.deepEqual({ ...probes }, { idle: '5', interval: '2', count: '5', unsent_ms: '15000' })
})

test('a warning that comes with each connection is told once', async (t) => {
  const { url } = await createDatabase(t)
  const log = createLog('silent')
  const warn = t.mock.method(log, 'warn')
  for (const warning of ['a version mismatch', 'a version mismatch', 'something else']) {
    const pool = openDb(url, { log, name: 'test', max: 1 })
    await pool.text(`do $$ begin raise warning '${warning}'; end $$`)
    await pool.end()
  }
  assert.deepEqual(
    warn.mock.calls.map(({ arguments: told }) => told),
    ['a version mismatch', 'something else'].map((notice) => [{ notice }, 'database.notice']),
  )
})

test('what went into a query is let go with it, and not only by a full collection', async (t) => {
  const { openPool } = await createDatabase(t)
  const pool = openPool()
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

test('plans are neither compiled nor made for several processes nor kept by every statement, whatever the database says', async (t) => {
  const { url, sql } = await createDatabase(t)
  await sql.text(`alter database "${new URL(url).pathname.slice(1)}" set jit = on`)
  const pool = openDb(url, { log: createLog('silent'), name: 'test', max: 1 })
  const [settings] = await pool`
    select current_setting('jit') as jit, current_setting('plan_cache_mode') as plans,
      current_setting('max_parallel_workers_per_gather') as helpers`
  await pool.end()
  assert.deepEqual({ ...settings }, { jit: 'off', plans: 'force_custom_plan', helpers: '0' })
})

test('what claims commit need not be on disk when they are answered, and what others commit must', async (t) => {
  const { url, sql } = await createDatabase(t)
  await sql.text(`alter database "${new URL(url).pathname.slice(1)}" set synchronous_commit = on`)
  const commits = async (claims: boolean) => {
    const pool = openDb(url, { log: createLog('silent'), name: 'test', max: 1, claims })
    const [row] = await pool`show synchronous_commit`
    await pool.end()
    return row?.synchronous_commit
  }
  assert.deepEqual([await commits(true), await commits(false)], ['off', 'on'])
})

test('of the connections that are free the one that was used last is next', async (t) => {
  const { openPool } = await createDatabase(t)
  const pool = openPool({ max: 4 })
  const pid = async () => (await pool`select pg_backend_pid() as pid, pg_sleep(0.1)`)[0]?.pid
  const opened = await Promise.all([pid(), pid(), pid()])
  assert.equal(new Set(opened).size, 3)
  const used = [await pid(), await pid(), await pid()]
  assert.deepEqual(used, [used[0], used[0], used[0]])
})
