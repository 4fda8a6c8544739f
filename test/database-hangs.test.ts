import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { existsSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { suite, type TestContext, test } from 'node:test'
import { promisify } from 'node:util'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase, lock } from './support/database.ts'
import { createDirectory } from './support/directory.ts'
import { startProxy } from './support/proxy.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { routesOf } from './support/routes.ts'
import { ADMIN_KEY, type Call, createTenant, type Program, runProgram, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const INTERNAL = { ok: false, error: 'internal error' }

/** A database, and a way to it that the test can take away. */
async function startCuttable(t: TestContext) {
  const { url } = await createDatabase(t)
  return await startProxy(t, url)
}

/** A whole service, whose connection for /health is open already, and a tenant with an event delivered. */
async function start(t: TestContext, databaseUrl: string) {
  const receiver = await startReceiver(t)
  const service = await startService(t, {
    databaseUrl,
    env: { RETRY_DELAY_SECONDS: '1', LOG_LEVEL: 'debug' },
  })
  const tenant = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
  const { event_id, delivery_ids } = await tenant.publish()
  await receiver.until(1)
  await waitFor(async () => (await service.call('GET', '/health')).status === 200)
  const own = { endpoint_id, event_id, delivery_id: delivery_ids[0]! }
  return { receiver, service, tenant, own }
}

/**
 * Fails unless every request until now was answered by its deadline (4 s; /health: 750 ms), with room for a busy machine.
 * Without one, it would wait 3.5 s for each of its queries. By the service's own clock: this process has so many requests to
 * make that it may see their answers late.
 */
function assertAnsweredInTime(program: Program): void {
  for (const { msg, path, method, duration_ms } of program.logs) {
    if (msg !== 'request.answered') continue
    assert.ok(Number(duration_ms) < (path === '/health' ? 2500 : 6000), `${method} ${path} took ${duration_ms} ms`)
  }
}

/** Asks for /health ten times a second until it is told to stop; then says how often it was answered with which status. */
function watchHealth(call: Call) {
  const seen: Record<number, number> = {}
  let stopped = false
  const watching = (async () => {
    while (!stopped) {
      const { status } = await call('GET', '/health')
      seen[status] = (seen[status] ?? 0) + 1
      await new Promise((resolve) => setTimeout(resolve, 100))
    }
  })()
  return async () => {
    stopped = true
    await watching
    return seen
  }
}

suite('a database that does not answer', { concurrency: 2 }, () => {
  test('every request is answered by its deadline, and all is well soon after new connections get through', async (t) => {
    const proxy = await startCuttable(t)
    const { receiver, service, tenant, own } = await start(t, proxy.url)
    const routes = routesOf(service, own, tenant.tenantId).filter(({ kind }) => kind !== 'open')
    proxy.freeze()
    const health = watchHealth(service.call)
    const publish = () => tenant.call('POST', '/v1/events', { body: { event_type: 'a.b', payload: {} } })
    // More than there are connections, and more than a batch.
    const flood = Array.from({ length: 200 }, publish)
    const answers = await Promise.all(
      routes.map(async ({ name, kind, ask }) => ({
        name,
        reply: await ask(kind === 'admin' ? ADMIN_KEY : tenant.key),
      })),
    )
    for (const { name, reply } of answers) assert.deepEqual([reply.status, reply.body], [500, INTERNAL], name)
    for (const reply of await Promise.all(flood)) assert.deepEqual([reply.status, reply.body], [500, INTERNAL])
    assert.equal((await publish()).status, 500)
    assert.deepEqual(Object.keys(await health()), ['503'])
    assertAnsweredInTime(service)

    const before = receiver.receipts.length
    proxy.thaw()
    const thawed = Date.now()
    await waitFor(async () => (await publish()).status === 202)
    await waitFor(async () => (await service.call('GET', '/health')).status === 200)
    const [next] = (await receiver.until(before + 1)).slice(before)
    // A query that was sent into the hole just before takes 3.5 s to be given up.
    assert.ok(next!.at - thawed < 12_000, `the next delivery came after ${next!.at - thawed} ms`)
    // The hole swallows what is sent into it: the connections in it, those that only listen too, must be given up.
    await waitFor(() => proxy.frozen() === 0, { timeoutMs: 45_000, what: 'dead connections to be given up' })
  })

  test('a lock that is held fails what needs it, by its deadline, and nothing else', async (t) => {
    const database = await createDatabase(t)
    const { receiver, service, tenant, own } = await start(t, database.url)
    const unlock = await lock(database.sql, 'waybill.events in access exclusive mode')
    // The database does answer.
    const health = watchHealth(service.call)
    const publish = (key: string) =>
      tenant.call('POST', '/v1/events', {
        body: { event_type: 'a.b', payload: {} },
        headers: { 'idempotency-key': key },
      })
    const [publishes, reads] = await Promise.all([
      Promise.all(Array.from({ length: 200 }, (_, n) => publish(`key-${n}`))),
      Promise.all(Array.from({ length: 20 }, () => tenant.call('GET', `/v1/events/${own.event_id}`))),
    ])
    for (const reply of publishes) assert.deepEqual([reply.status, reply.body], [500, INTERNAL])
    const overloaded = { ok: false, error: 'service overloaded' }
    for (const { status, body } of reads) assert.deepEqual(body, status === 500 ? INTERNAL : overloaded)
    assert.ok(reads.some(({ status }) => status === 500) && reads.some(({ status }) => status === 503))
    assert.equal((await tenant.call('GET', '/v1/endpoints')).status, 200)
    // Over a connection that has to wait for the lock as well it would be 503 all the time; once it may be, from a stall.
    const { 200: well = 0, 503: unwell = 0 } = await health()
    assert.ok(well > unwell, `health was 200 ${well} times and 503 ${unwell} times`)
    assertAnsweredInTime(service)
    await unlock()
    assert.equal((await publish('key-0')).status, 202, 'what was answered with 500 was not stored, or it would be 200')
    await receiver.until(2)
  })

  test('what cannot be recorded for a while, because of a lock, is recorded then, and not sent again', async (t) => {
    const { url, sql, newSession } = await createDatabase(t)
    const { receiver, service, tenant } = await start(t, url)
    const { reply, open } = gate()
    receiver.script('/hook', reply)
    for (let n = 0; n < 20; n++) await tenant.publish()
    await receiver.until(21)
    const session = newSession()
    await session`begin`
    // As `create index` does.
    await session`lock table waybill.attempts in share mode`
    open()
    await service.logged('record.waiting')
    const lockedAt = Date.now()
    // Claims that nobody touches for ten seconds are taken back, at the next look.
    await waitFor(() => Date.now() > lockedAt + 16_000, { timeoutMs: 30_000 })
    await session`commit`
    const delivered = async () => (await tenant.call('GET', '/v1/metrics/summary')).body.deliveries_by_status.delivered
    await waitFor(async () => (await delivered()) === 21, { timeoutMs: 30_000 })
    assert.equal(receiver.receipts.length, 21)
    assert.equal((await sql`select from waybill.attempts where error is not null`).length, 0)
  })

  test('a database that is read-only acknowledges nothing, and takes events again when it is not', async (t) => {
    const database = await createDatabase(t)
    const { receiver, service, tenant } = await start(t, database.url)
    const { sql } = database
    const name = new URL(database.url).pathname.slice(1)
    const setReadOnly = async (value: 'on' | 'off') => {
      // Our own connections may have become read-only, too.
      await sql.begin(async (tx) => {
        await tx`set transaction read write`
        await tx.text(`alter database ${name} set default_transaction_read_only = ${value}`)
      })
    }
    await setReadOnly('on')
    // What is opened from now on is read-only, and stays so.
    await sql`select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name like 'waybill%'`
    const publish = () => tenant.call('POST', '/v1/events', { body: { event_type: 'a.b', payload: {} } })
    for (let n = 0; n < 20; n++) {
      const { status, body } = await publish()
      assert.deepEqual([status, body], [500, INTERNAL])
    }
    const count = async () => (await sql`select count(*)::int as n from waybill.events`)[0]?.n
    assert.equal(await count(), 1)
    await setReadOnly('off')
    await waitFor(async () => (await publish()).status === 202)
    await receiver.until(2)
    assert.equal((await service.call('GET', '/health')).status, 200)
  })

  test('a Postgres whose processes stand still is survived, and what was answered with 500 can be repeated', async (t) => {
    const cwd = await createDirectory(t)
    const receiver = await startReceiver(t)
    const program = runProgram(t, {
      cwd,
      env: { HOST: '127.0.0.1', PORT: '0', EGRESS_ALLOW: '127.0.0.0/8', ADMIN_API_KEY: ADMIN_KEY, LOG_LEVEL: 'debug' },
    })
    const url = `http://127.0.0.1:${(await program.logged('service.ready', 60_000)).port}`
    const tenant = await createTenant({ url })
    await tenant.createEndpoint(receiver.url())
    await tenant.publish()
    await receiver.until(1)

    const postmaster = (await readFile(`${cwd}/.waybill/postgres/postmaster.pid`, 'utf8')).split('\n')[0]!
    const processes = [Number(postmaster)]
    const signalAll = (signal: NodeJS.Signals) => {
      for (const pid of processes) if (existsSync(`/proc/${pid}`)) process.kill(pid, signal)
    }
    cleanUp(t, async () => signalAll('SIGCONT'))
    // First, or it would start another one after they are counted.
    signalAll('SIGSTOP')
    const { stdout } = await promisify(execFile)('ps', ['-o', 'pid=', '--ppid', postmaster])
    processes.push(...stdout.trim().split(/\s+/).map(Number))
    signalAll('SIGSTOP')
    const keys = Array.from({ length: 20 }, (_, n) => `key-${n}`)
    const publish = (key: string) =>
      tenant.call('POST', '/v1/events', {
        body: { event_type: 'a.b', payload: {} },
        headers: { 'idempotency-key': key },
      })
    for (const reply of await Promise.all(keys.map(publish)))
      assert.deepEqual([reply.status, reply.body], [500, INTERNAL])
    assertAnsweredInTime(program)
    signalAll('SIGCONT')
    await waitFor(async () => (await tenant.call('GET', '/health')).status === 200)
    const events = new Set<string>()
    for (const key of keys) {
      const reply = await publish(key)
      // Some of them were on their way already, and were stored when Postgres went on.
      assert.ok(reply.status === 200 || reply.status === 202, reply.text)
      events.add(reply.body.event_id)
    }
    assert.equal(events.size, keys.length)
    const sent = (await receiver.until(1 + keys.length)).map(({ headers }) => headers['webhook-id'])
    assert.equal(new Set(sent).size, 1 + keys.length)
    assert.deepEqual(await program.stop(), { code: 0, signal: null })
  })

  test('what is in hand while the database is away for longer than a claim lasts stays in hand', async (t) => {
    const { url, sql } = await createDatabase(t)
    const proxy = await startProxy(t, url)
    const { receiver, service, tenant } = await start(t, proxy.url)
    const { reply, open } = gate()
    receiver.script('/hook', reply)
    const { delivery_ids } = await tenant.publish()
    await receiver.until(2)
    await proxy.cut()
    const isTouched = async (seconds: number) => {
      const [job] = await sql`
        select heartbeat_on > now() - ${seconds} * interval '1 second' as touched from pgboss.job where name = 'deliveries' and state = 'active'`
      return job?.touched === true
    }
    await waitFor(async () => !(await isTouched(12)), { timeoutMs: 60_000, what: 'the claim to be old' })
    await proxy.restore()
    await waitFor(() => isTouched(3), { timeoutMs: 60_000, what: 'the claim to be touched' })
    open()
    const look = async () => (await tenant.call('GET', `/v1/deliveries/${delivery_ids[0]}`)).body
    await waitFor(async () => (await look()).status === 'delivered', { timeoutMs: 60_000 })
    assert.equal((await look()).attempt_count, 1)
    assert.equal(receiver.receipts.length, 2)
    assert.ok(!service.logs.some(({ msg }) => msg === 'delivery.worker_lost'))
  })

  test('what became due while the database was stopped is sent soon after its return', async (t) => {
    const proxy = await startCuttable(t)
    const { receiver, service, tenant } = await start(t, proxy.url)
    receiver.script('/hook', { status: 503, headers: { 'retry-after': '10' } }, 200)
    const { delivery_ids } = await tenant.publish()
    const look = async () => (await tenant.call('GET', `/v1/deliveries/${delivery_ids[0]}`)).body
    await waitFor(async () => (await look()).status === 'retrying')
    const due = Date.parse((await look()).next_attempt_at)
    await proxy.cut()
    const failures = () => service.logs.filter((line) => line.msg === 'dispatch.failed').length
    const isOver = () => failures() >= 6 && Date.now() > due
    await waitFor(isOver, { timeoutMs: 60_000, what: 'the worker to have looked in vain for seconds' })
    await proxy.restore()
    await receiver.until(3, { timeoutMs: 60_000 })
    await waitFor(async () => (await look()).status === 'delivered')
  })
})
