import assert from 'node:assert/strict'
import { execFileSync, spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { closeSync, openSync } from 'node:fs'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { suite, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { cleanUp, type Scope } from './support/cleanup.ts'
import { createDatabase } from './support/database.ts'
import { settled } from './support/deliveries.ts'
import { makeDirectory, removeDirectory } from './support/directory.ts'
import { startReceiver } from './support/receiver.ts'
import { runProgram, startTenant, testEnvironment } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const LOG = JSON.stringify(new URL('../src/log.ts', import.meta.url).href)

/** A program that logs to a pipe, or to a file that is open here. It gets `log`, and `told(message)`, which waits for that from here. */
function startLogging(scope: Scope, program: string, { stdout = 'pipe' as 'pipe' | number, level = 'info' } = {}) {
  const script = `
    import { createLog } from ${LOG}
    const log = createLog('${level}')
    const told = (wanted) => new Promise((resolve) => process.on('message', (message) => message === wanted && resolve()))
    ${program}`
  const child = spawn(process.execPath, ['--input-type=module', '-e', script], {
    stdio: ['ignore', stdout, 'inherit', 'ipc'],
  })
  cleanUp(scope, () => child.kill('SIGKILL'))
  return { child, ended: once(child, 'close') }
}

suite('the log', () => {
  test('has where an error of the database came from, but no parameters of the statement, and no row', async (t) => {
    const { child, ended } = startLogging(
      t,
      `for (const where of ['PL/pgSQL function f() line 3', "unnamed portal parameter $2 = 'SECRET'", "portal with parameters: $1 = 'acme', $2 = '{\\"card\\":4111}'"])
        log.error({ err: Object.assign(new Error('canceled'), { where }) }, 'request.failed')
      for (const detail of ['Process 1 waits for ShareLock', 'Failing row contains (acme, SECRET)'])
        log.error({ err: Object.assign(new Error('refused'), { detail }) }, 'request.failed')`,
    )
    const lines: string[] = []
    createInterface(child.stdout!).on('line', (line) => lines.push(line))
    await ended
    assert.deepEqual(
      lines.map((line) => JSON.parse(line).err).map(({ where, detail }) => where ?? detail),
      ['PL/pgSQL function f() line 3', '***', '***', 'Process 1 waits for ShareLock', '***'],
    )
  })

  test('a program whose log nobody reads any more ends in time', { timeout: 30_000 }, async (t) => {
    const { child, ended } = startLogging(
      t,
      `process.send('started')
      await told('end')
      log.info('last words')
      process.exit(3)`,
    )
    await once(child, 'message')
    child.stdout?.destroy()
    await once(child.stdout!, 'close')
    child.send('end')
    assert.deepEqual(await ended, [3, null])
  })

  test('a program that ends has written all that somebody takes', { timeout: 30_000 }, async (t) => {
    const { child, ended } = startLogging(
      t,
      `for (let n = 1; n <= 4000; n++) log.info({ n, filler: 'x'.repeat(300) }, 'a line')
      process.exit(3)`,
    )
    const numbers: number[] = []
    createInterface(child.stdout!).on('line', (line) => numbers.push(JSON.parse(line).n))
    assert.deepEqual(await ended, [3, null])
    assert.deepEqual(
      numbers,
      Array.from({ length: 4000 }, (_, nth) => nth + 1),
    )
  })

  test('a program that ends with a fatal line has written that, and told how many were left out before', {
    timeout: 30_000,
  }, async (t) => {
    const lines = 100_000
    const { child, ended } = startLogging(
      t,
      `for (let n = 1; n <= ${lines}; n++) log.info({ n }, 'a line of a hundred bytes, or a little more, when all that comes with it is counted')
      process.send('ending')
      log.fatal('the end')
      process.exit(1)`,
    )
    await once(child, 'message')
    const read: { n?: number; msg: string; lines?: number }[] = []
    createInterface(child.stdout!).on('line', (line) => read.push(JSON.parse(line)))
    assert.deepEqual(await ended, [1, null])
    const dropped = read.reduce((sum, line) => sum + (line.lines ?? 0), 0)
    assert.ok(dropped > 0)
    assert.equal(read.filter(({ n }) => n !== undefined).length + dropped, lines)
    assert.equal(read.filter(({ msg }) => msg === 'the end').length, 1)
  })

  test('a program whose log is in a pipe that nobody reads goes on, and ends in time', {
    timeout: 30_000,
  }, async (t) => {
    const directory = await makeDirectory()
    cleanUp(t, () => removeDirectory(directory))
    const path = join(directory, 'pipe')
    execFileSync('mkfifo', [path])
    // Somebody has to have it open for reading, or it could not be opened for writing.
    const pipe = openSync(path, 'r+')
    cleanUp(t, () => closeSync(pipe))
    const stdout = openSync(path, 'w')
    cleanUp(t, () => closeSync(stdout))
    const { child, ended } = startLogging(
      t,
      `for (let n = 1; n <= 10_000; n++) {
        log.info({ n }, 'a line')
        if (n % 100 === 0) await new Promise(setImmediate)
      }
      process.send('still here')
      await told('end')
      log.info('last words')
      process.exit(3)`,
      { stdout },
    )
    assert.deepEqual(await Promise.race([once(child, 'message'), ended]), ['still here', undefined])
    child.send('end')
    assert.deepEqual(await ended, [3, null])
  })

  test('a program whose log is on a full disk goes on, and ends in time', { timeout: 30_000 }, async (t) => {
    const full = openSync('/dev/full', 'w')
    cleanUp(t, () => closeSync(full))
    const { child, ended } = startLogging(
      t,
      `for (const n of [1, 2, 3]) {
        log.info({ n }, 'a line')
        await new Promise((resolve) => setTimeout(resolve, 50))
      }
      process.send('still here')
      await told('end')
      process.exit(3)`,
      { stdout: full },
    )
    assert.deepEqual(await Promise.race([once(child, 'message'), ended]), ['still here', undefined])
    child.send('end')
    assert.deepEqual(await ended, [3, null])
  })

  for (const level of ['info', 'error'] as const)
    test(`lines that nobody takes wait in 8 MiB; then they are left out, and how many is told (LOG_LEVEL=${level})`, {
      timeout: 60_000,
    }, async (t) => {
      const lines = 200_000
      const { child, ended } = startLogging(
        t,
        `for (let n = 1; n <= ${lines}; n++) {
        log.${level}({ n }, 'a line of a hundred bytes, or a little more, when all that comes with it is counted')
        // Of the last ones a single one is written every now and then, which may still fit.
        const isLate = n > ${0.9 * lines}
        if (n % 1000 === 0 || (isLate && n % 1000 === 1)) await new Promise((resolve) => setTimeout(resolve, isLate ? 40 : 0))
      }
      process.send({ heapUsed: process.memoryUsage().heapUsed })
      await told('more')
      log.${level}({ n: ${lines} + 1 }, 'after it')
      await told('end')
      process.exit()`,
        { level },
      )
      const [{ heapUsed }] = (await once(child, 'message')) as [{ heapUsed: number }]
      assert.ok(heapUsed < 64 * 1024 * 1024, `${heapUsed} bytes`)

      const read: { n?: number; msg: string; lines?: number }[] = []
      const { promise: told, resolve: tell } = Promise.withResolvers<void>()
      const awaited = new Set(['log.dropped', 'after it'])
      createInterface({ input: child.stdout! }).on('line', (text) => {
        const line = JSON.parse(text)
        read.push(line)
        if (line.n === lines / 10) child.send('more')
        awaited.delete(line.msg)
        if (awaited.size === 0) tell()
      })
      await told
      child.send('end')
      await ended
      const numbers = read.flatMap(({ n }) => n ?? [])
      const dropped = read.reduce((sum, line) => sum + (line.lines ?? 0), 0)
      assert.deepEqual(
        numbers,
        [...numbers].sort((a, b) => a - b),
        'in order',
      )
      assert.equal(numbers.length + dropped, lines + 1)
      assert.ok(dropped > lines / 10 && dropped < lines, `${dropped} lines were left out`)
    })
})

test('a mistake of ours that nobody catches is the last line of the log, without what the error carries', async (t) => {
  const { url } = await createDatabase(t)
  const fail = `process.on('SIGUSR2', () => void Promise.reject(Object.assign(new Error('boom'), { client: { password: 'hunter' + 2 } })))`
  const program = runProgram(t, { env: testEnvironment(url), flags: ['--import', `data:text/javascript,${fail}`] })
  await program.logged('service.ready')
  program.signal('SIGUSR2')
  assert.deepEqual(await program.exited, { code: 1, signal: null })
  const { level, msg, err } = program.logs.at(-1)!
  assert.deepEqual([level, msg, (err as Error).message], ['fatal', 'service.failed', 'boom'])
  assert.ok(!(program.stdout() + program.stderr()).includes('hunter2'))
})

test('what no line should carry is masked in one that does', () => {
  const names = ['authorization', 'signing_secret', 'api_key', 'payload']
  const fields = JSON.stringify(Object.fromEntries(names.map((name) => [name, 'canary'])))
  const script = `import { createLog } from ${LOG}
    createLog('info').info(${fields}, 'a line')`
  const { stdout } = spawnSync(process.execPath, ['--input-type=module', '-e', script], { encoding: 'utf8' })
  const line = JSON.parse(stdout)
  for (const name of names) assert.equal(line[name], '***')
})

test('no line of the log holds a payload or a response', async (t) => {
  const receiver = await startReceiver(t)
  const { sql, service, tenant } = await startTenant(t, { env: { LOG_LEVEL: 'trace', RETRY_LIMIT: '0' } })
  await tenant.createEndpoint(receiver.url('/hook'))
  receiver.script('/hook', { status: 500, body: 'canary-response' })
  await tenant.publish('a.b', { secret: 'canary-payload' })
  await settled(sql)
  await service.logged('delivery.attempted')
  await service.logged('event.received')
  assert.doesNotMatch(service.stdout(), /canary-/)
})

test('for each publish that is accepted a line of the log has its ids, its size, and whether it repeats another', async (t) => {
  const { service, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  const publish = (id: string) =>
    tenant.call('POST', '/v1/events', {
      body: '{"event_type":"a.b","payload":{"a": "é"}}',
      headers: { 'idempotency-key': 'k', 'x-request-id': id },
    })
  const { event_id } = (await publish('first')).body
  await publish('second')
  const lines = () => service.logs.filter(({ msg }) => msg === 'event.received')
  await waitFor(() => lines().length === 2)
  for (const [index, request_id] of ['first', 'second'].entries()) {
    const { text, time, level, msg, ...told } = lines()[index]!
    const ids = { request_id, tenant_id: tenant.tenantId, event_id }
    assert.deepEqual(told, { ...ids, event_type: 'a.b', payload_bytes: 11, delivery_count: 1, repeated: index === 1 })
  }
})

test("the service goes on when nobody reads Node's warnings any more", { timeout: 60_000 }, async (t) => {
  const { url } = await createDatabase(t)
  const warn = `process.on('SIGUSR2', async () => {
    for (const n of [1, 2, 3]) {
      process.emitWarning('warning ' + n)
      await new Promise((resolve) => setTimeout(resolve, 100))
    }
    process.kill(process.pid, 'SIGTERM')
  })`
  const main = fileURLToPath(new URL('../src/main.ts', import.meta.url))
  const child = spawn(process.execPath, ['--import', `data:text/javascript,${encodeURIComponent(warn)}`, main], {
    env: { PATH: process.env.PATH, ...testEnvironment(url) },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  cleanUp(t, () => void child.kill('SIGKILL'))
  const ended = once(child, 'exit')
  child.stderr.destroy()
  for await (const line of createInterface({ input: child.stdout }))
    if (line.includes('service.ready')) child.kill('SIGUSR2')
  assert.deepEqual(await ended, [0, null])
})
