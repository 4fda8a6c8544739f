import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { connect } from 'node:net'
import { suite, type TestContext, test } from 'node:test'
import type { Log } from '../src/log.ts'
import { createClosers } from '../src/shutdown.ts'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase, lock, waitingFor } from './support/database.ts'
import { startProxy } from './support/proxy.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, createTenant, startService, startTenant, testEnvironment } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const GRACE_SECONDS = 60
const HOST = 'host: waybill\r\n'

/** Clients that never end what they began, each on a connection of its own. */
const STUCK: Record<string, (key: string) => string> = {
  'that has sent nothing': () => '',
  'with half a head': () => 'POST /v1/events HTT',
  'with half a body': (key) =>
    `POST /v1/events HTTP/1.1\r\n${HOST}authorization: Bearer ${key}\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{`,
  'with half a head after an answer': () => `GET /health HTTP/1.1\r\n${HOST}\r\nPOST /v1/ev`,
}

async function open(t: TestContext, port: number, bytes: string): Promise<void> {
  const socket = connect(port, '127.0.0.1')
  cleanUp(t, () => socket.destroy())
  await once(socket, 'connect')
  socket.on('error', () => {}).pause()
  if (bytes) socket.write(bytes)
}

suite('SIGTERM', { concurrency: 2 }, () => {
  for (const mode of ['all', 'api', 'worker'] as const) {
    test(`ends mode ${mode} with 0, well within the grace, whatever connections are stuck`, async (t) => {
      const { url: databaseUrl } = await createDatabase(t)
      const env = { SHUTDOWN_GRACE_SECONDS: String(GRACE_SECONDS) }
      const service = await startService(t, { databaseUrl, mode, env })
      const api = mode === 'worker' ? await startService(t, { databaseUrl, mode: 'api' }) : service
      const { key } = await createTenant(api)
      for (const bytes of Object.values(STUCK)) await open(t, service.port, bytes(key))
      // Answered behind them: what they sent has been read.
      await service.call('GET', '/health')
      const began = Date.now()
      assert.deepEqual(await service.stop(), { code: 0, signal: null })
      const tookMs = Date.now() - began
      assert.ok(tookMs < 30_000, `it took ${tookMs} ms`)
    })
  }

  test('ends with 0 after the grace, although an answer takes longer', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const service = await startService(t, { databaseUrl, mode: 'api', env: { SHUTDOWN_GRACE_SECONDS: '1' } })
    const unlock = await lock(sql, 'waybill.idempotency_keys in share mode')
    const run = service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
    const isCut = assert.rejects(run)
    const isWaiting = async () => (await waitingFor(sql, 'waybill.idempotency_keys')) > 0
    await waitFor(isWaiting, { what: 'the run to wait for the lock' })
    const exit = await service.stop()
    await unlock()
    await isCut
    assert.deepEqual(exit, { code: 0, signal: null })
    const isCutOff = service.logs.every(({ msg, part }) => msg !== 'shutdown.not_awaited' || part !== 'http')
    assert.ok(isCutOff)
  })

  for (const [how, away] of [
    ['cut', 'refuses connections'],
    ['freeze', 'does not answer'],
  ] as const) {
    // By itself: 10 seconds after the grace it would be ended by force, with 1.
    test(`ends with 0 soon after the grace while the database ${away}, and what was not recorded is sent again`, async (t) => {
      const { url: databaseUrl } = await createDatabase(t)
      const proxy = await startProxy(t, databaseUrl)
      const receiver = await startReceiver(t)
      const service = await startService(t, { databaseUrl: proxy.url, env: { SHUTDOWN_GRACE_SECONDS: '3' } })
      const tenant = await createTenant(service)
      await tenant.createEndpoint(receiver.url('/hook'))
      const { reply, open } = gate(200)
      receiver.script('/hook', reply)
      const { delivery_ids } = await tenant.publish()
      await receiver.until(1)
      await proxy[how]()
      open()
      await service.logged('record.waiting')
      const began = Date.now()
      assert.deepEqual(await service.stop(), { code: 0, signal: null })
      const tookMs = Date.now() - began
      assert.ok(tookMs >= 3000, `it took ${tookMs} ms`)
      assert.equal((await service.logged('worker.gave_up')).deliveries, 1)

      const next = await startService(t, { databaseUrl })
      const [first, second] = await receiver.until(2, { timeoutMs: 30_000 })
      assert.deepEqual(second!.body, first!.body)
      const path = `/v1/deliveries/${delivery_ids[0]}`
      const read = () => next.call('GET', path, { key: tenant.key })
      await waitFor(async () => (await read()).body.status === 'delivered', { what: 'the delivery to be recorded' })
    })
  }

  test('a second time ends with 1, without the grace, also while the database does not answer', async (t) => {
    const { url: databaseUrl } = await createDatabase(t)
    const proxy = await startProxy(t, databaseUrl)
    const receiver = await startReceiver(t)
    const service = await startService(t, { databaseUrl: proxy.url })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url('/hook'))
    receiver.script('/hook', gate(200).reply)
    await tenant.publish()
    await receiver.until(1)
    proxy.freeze()
    service.signal('SIGTERM')
    await service.logged('service.stopping')
    const began = Date.now()
    assert.deepEqual(await service.stop(), { code: 1, signal: null })
    const tookMs = Date.now() - began
    assert.ok(tookMs < 10_000, `it took ${tookMs} ms`)
  })

  test('reaches the program through npm start', async (t) => {
    const { url: databaseUrl } = await createDatabase(t)
    const npm = spawn('npm', ['start', '--', '--mode', 'api'], {
      env: { PATH: process.env.PATH, HOME: process.env.HOME, ...testEnvironment(databaseUrl) },
      stdio: ['ignore', 'pipe', 'inherit'],
    })
    cleanUp(t, () => npm.kill('SIGKILL'))
    let output = ''
    npm.stdout.setEncoding('utf8').on('data', (chunk: string) => {
      output += chunk
    })
    await waitFor(() => output.includes('service.ready'), { timeoutMs: 60_000, what: 'the service to be ready' })
    const exited = once(npm, 'close')
    npm.kill('SIGTERM')
    assert.deepEqual(await exited, [0, null])
    assert.match(output, /service.stopping/)
  })

  for (const times of [1, 2])
    test(`counts once each time that npm and the program both get it, as in a terminal: ${times} in all`, async (t) => {
      const receiver = await startReceiver(t)
      const gated = gate(200)
      receiver.script('/hook', gated.reply)
      const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
      await tenant.createEndpoint(receiver.url('/hook'))
      const npm = spawn('npm', ['start', '--', '--mode', 'worker'], {
        env: { PATH: process.env.PATH, HOME: process.env.HOME, ...testEnvironment(databaseUrl) },
        stdio: ['ignore', 'pipe', 'inherit'],
        detached: true,
      })
      const { pid } = npm as { pid: number }
      cleanUp(t, () => npm.exitCode ?? process.kill(-pid, 'SIGKILL'))
      let output = ''
      npm.stdout.setEncoding('utf8').on('data', (chunk: string) => {
        output += chunk
      })
      await tenant.publish()
      await receiver.until(1)
      const exited = once(npm, 'close')
      process.kill(-pid, 'SIGINT')
      await waitFor(() => output.includes('service.stopping'), { what: 'the program to stop' })
      if (times === 1) gated.open()
      else {
        // What follows within half a second is taken for an echo.
        const over = Date.now() + 600
        await waitFor(() => Date.now() > over)
        process.kill(-pid, 'SIGINT')
      }
      assert.deepEqual(await exited, [times - 1, null])
      assert.match(output, /service.stopped/)
      const jobs = await sql`select state::text from pgboss.job where name = 'deliveries'`
      assert.deepEqual([...jobs], times === 1 ? [] : [{ state: 'created' }], 'finished, or handed back')
    })

  test('ends claiming at once, although a request is still arriving', async (t) => {
    const { url: databaseUrl } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const [api, service] = await Promise.all([
      startService(t, { databaseUrl, mode: 'api' }),
      startService(t, { databaseUrl, mode: 'all' }),
    ])
    const tenant = await createTenant(api)
    await tenant.createEndpoint(receiver.url())
    await tenant.publish()
    await receiver.until(1)
    await open(t, service.port, STUCK['with half a body']!(tenant.key))
    await service.call('GET', '/health')
    service.signal('SIGTERM')
    await service.logged('service.stopping')
    const late = await tenant.publish()
    assert.deepEqual(await service.exited, { code: 0, signal: null })
    const { body } = await tenant.call('GET', `/v1/deliveries/${late.delivery_ids[0]}`)
    assert.equal(body.status, 'pending')
    assert.equal(receiver.receipts.length, 1)
  })

  test('waits for what the database does not let a worker put away yet', async (t) => {
    const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
    const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
    await tenant.publish()
    await tenant.call('PATCH', `/v1/endpoints/${endpoint_id}`, { body: { is_active: false } })
    await sql.text(`
      create sequence public.tries;
      create function refuse() returns trigger language plpgsql as $$ begin
        perform nextval('public.tries');
        raise 'it cannot be held';
      end $$;
      create trigger refuse before update on waybill.deliveries for each row execute function refuse()`)
    const worker = await startService(t, { databaseUrl, mode: 'worker' })
    await worker.logged('hold.waiting')
    const stopping = worker.stop()
    await worker.logged('service.stopping')
    const tries = async () => (await sql`select last_value::int as n from public.tries`)[0]!.n
    const before = await tries()
    await waitFor(async () => (await tries()) > before + 1, { what: 'it to be tried again' })
    await waitFor(() => sql.text('drop trigger if exists refuse on waybill.deliveries').then(() => true))
    assert.deepEqual(await stopping, { code: 0, signal: null })
    assert.equal((await sql`select from waybill.deliveries where held`).length, 1)
  })
})

test('what fails or hangs as it is closed is told by its name, and keeps nothing else from being closed', async () => {
  const closers = createClosers()
  const [told, closed] = [[] as unknown[], [] as string[]]
  const log = { warn: ({ part }: { part: string }, msg: string) => told.push([part, msg]) } as unknown as Log
  closers.add('at once', () => void closed.push('at once'), { atOnce: true })
  closers.add('first', () => void closed.push('first'))
  closers.add('hanging', () => new Promise(() => {}))
  closers.add('failing', () => Promise.reject(new Error('no')))
  await closers.closeAll(log, 0)
  assert.deepEqual(told, [
    ['failing', 'shutdown.failed'],
    ['hanging', 'shutdown.not_awaited'],
  ])
  assert.deepEqual(closed, ['at once', 'first'])
})

test('a terminal that is closed ends the service in order, although its shell says so once more', async (t) => {
  const receiver = await startReceiver(t)
  const { reply, open } = gate(200)
  receiver.script('/hook', reply)
  const { service, tenant } = await startTenant(t)
  await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  await receiver.until(1)
  service.signal('SIGHUP')
  await service.logged('service.stopping')
  service.signal('SIGHUP')
  open()
  assert.deepEqual(await service.exited, { code: 0, signal: null })
  assert.equal(service.logs.at(-1)?.msg, 'service.stopped')
})
