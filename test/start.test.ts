import assert from 'node:assert/strict'
import { execFile, spawn } from 'node:child_process'
import { once } from 'node:events'
import { appendFileSync, existsSync, mkdirSync, readdirSync, readFileSync } from 'node:fs'
import { readFile, rename, rm, stat, writeFile } from 'node:fs/promises'
import { suite, type TestContext, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { PgBoss } from 'pg-boss'
import { isAlive, stopLeftover } from '../src/left-behind.ts'
import { createSecretBox } from '../src/secrets.ts'
import { cleanUp } from './support/cleanup.ts'
import { connect, createDatabase, PASSWORD } from './support/database.ts'
import { assertBooks, settled } from './support/deliveries.ts'
import { createDirectory } from './support/directory.ts'
import { startProxy } from './support/proxy.ts'
import { startReceiver } from './support/receiver.ts'
import {
  ADMIN_KEY,
  caller,
  createTenant,
  ENCRYPTION_KEY,
  runProgram,
  startService,
  startTenant,
  testEnvironment,
} from './support/service.ts'
import { verifyStandard } from './support/verify.ts'
import { waitFor } from './support/wait.ts'

const NOWHERE = 'postgres://waybill:hunter2@127.0.0.1:1/none'
const MIGRATE = fileURLToPath(new URL('../src/migrate-alone.ts', import.meta.url))

suite('starting', { concurrency: 3 }, () => {
  test('a bad configuration ends the start with 1 and one line per bad variable', async (t) => {
    const program = runProgram(t, {
      env: {
        DATABASE_URL: NOWHERE,
        PORT: 'abc',
        RETRY_LIMIT: '-1',
        EGRESS_ALLOW: 'example.com',
        ENCRYPTION_KEY: 'short',
      },
    })
    assert.deepEqual(await program.exited, { code: 1, signal: null })
    const lines = program.stderr().split('\n')
    const names = lines.map((line) => /^waybill: ([A-Z_]+): \S/.exec(line)?.[1])
    assert.deepEqual(names.sort(), ['ADMIN_API_KEY', 'EGRESS_ALLOW', 'ENCRYPTION_KEY', 'PORT', 'RETRY_LIMIT'])
    assert.doesNotMatch(program.stderr(), /hunter2| at /, 'no password, no stack trace')
    assert.equal(program.stdout(), '')
  })

  test('an unknown mode or flag ends the start with 1 and says so', async (t) => {
    for (const [args, said] of [
      [['--mode', 'both'], /--mode must be all, api or worker/],
      [['--verbose'], /--verbose/],
      [['serve'], /serve/],
    ] as const) {
      const program = runProgram(t, { args: [...args] })
      assert.equal((await program.exited).code, 1)
      assert.match(program.stderr(), said)
      assert.doesNotMatch(program.stderr(), /\n? +at /)
    }
  })

  test('a database whose commits may be forgotten is told of, setting by setting', async (t) => {
    const { url, sql } = await createDatabase(t)
    const settings = async () => {
      const service = await startService(t, { databaseUrl: url, mode: 'worker' })
      return service.logs.find(({ msg }) => msg === 'database.not_durable')?.settings
    }
    assert.deepEqual(await settings(), ['fsync', 'full_page_writes', 'synchronous_commit'], "the tests' own database")
    await sql.text(`alter database ${new URL(url).pathname.slice(1)} set synchronous_commit = on`)
    assert.deepEqual(await settings(), ['fsync', 'full_page_writes'])
  })

  test('--help explains the flags and --version tells the version, whatever the environment is', async (t) => {
    const help = runProgram(t, { args: ['--help'], env: { PORT: 'abc' } })
    assert.deepEqual(await help.exited, { code: 0, signal: null })
    for (const flag of ['--mode', '--no-migrate', '--help', '--version']) assert.ok(help.stdout().includes(flag))
    const version = runProgram(t, { args: ['--version'], env: { PORT: 'abc' } })
    assert.deepEqual(await version.exited, { code: 0, signal: null })
    const manifest = JSON.parse(await readFile(new URL('../package.json', import.meta.url), 'utf8'))
    assert.equal(version.stdout(), manifest.version)
  })

  test('several processes that start at once on an empty database all come up and work together', async (t) => {
    const { url: databaseUrl } = await createDatabase(t, { template: null })
    const receiver = await startReceiver(t)
    const [api, other, worker] = await Promise.all([
      startService(t, { databaseUrl, mode: 'api' }),
      startService(t, { databaseUrl, mode: 'all' }),
      startService(t, { databaseUrl, mode: 'worker' }),
      startService(t, { databaseUrl, mode: 'worker' }),
    ])
    const tenant = await createTenant(api)
    await tenant.createEndpoint(receiver.url())
    const published = await tenant.publish()
    await receiver.until(1)
    const seen = await other.call('GET', `/v1/events/${published.event_id}`, { key: tenant.key })
    assert.equal(seen.status, 200)
    for (const [service, mode] of [
      [api, 'api'],
      [other, 'all'],
      [worker, 'worker'],
    ] as const) {
      const { body } = await service.call('GET', '/health')
      assert.deepEqual([body.ok, body.status, body.database, body.mode], [true, 'ok', 'ok', mode])
    }
    const { status } = await fetch(`http://127.0.0.1:${worker.port}/openapi.json`)
    assert.equal(status, 404, 'a worker serves nothing but its health')
  })

  test('with --no-migrate an empty database is left empty, and the start fails', async (t) => {
    const { url, sql } = await createDatabase(t, { template: null })
    const program = runProgram(t, { args: ['--no-migrate'], env: testEnvironment(url) })
    assert.equal((await program.exited).code, 1)
    assert.match(program.stdout(), /the database is not at this version yet: run `npm run migrate`/)
    assert.deepEqual([...(await sql`select nspname from pg_namespace where nspname in ('waybill', 'pgboss')`)], [])
  })

  test('what migrates alone needs no keys, and whoever serves needs it no more', async (t) => {
    const { url: databaseUrl } = await createDatabase(t, { template: null })
    const env = { PATH: process.env.PATH, DATABASE_URL: databaseUrl }
    await promisify(execFile)(process.execPath, [MIGRATE], { env })
    await startService(t, { databaseUrl, args: ['--no-migrate'] })
  })

  test('what migrates alone waits for a database that is not there yet', async (t) => {
    const { url, sql } = await createDatabase(t, { template: null })
    const proxy = await startProxy(t, url)
    await proxy.cut()
    const program = runProgram(t, { main: MIGRATE, env: { DATABASE_URL: proxy.url } })
    await program.logged('database.waiting')
    await proxy.restore()
    assert.deepEqual(await program.exited, { code: 0, signal: null })
    assert.ok((await sql`select from waybill.migrations`).length > 0)
  })

  test('what migrates alone takes no flags, and does nothing when it is given one', async (t) => {
    const { url, sql } = await createDatabase(t, { template: null })
    const program = runProgram(t, { main: MIGRATE, args: ['--help'], env: { DATABASE_URL: url } })
    assert.equal((await program.exited).code, 1)
    assert.match(program.stderr(), /no flags are taken/)
    assert.deepEqual([...(await sql`select nspname from pg_namespace where nspname in ('waybill', 'pgboss')`)], [])
  })

  test('a database in which another application has a queue or jobs is refused, and its jobs are left alone', async (t) => {
    const { url, sql } = await createDatabase(t, { template: null })
    const other = new PgBoss({ connectionString: url, supervise: false, schedule: false })
    await other.start()
    await other.stop({ graceful: false })
    // So far it is what an interrupted first start leaves.
    const another = await createDatabase(t, { template: null })
    const installed = new PgBoss({ connectionString: another.url, supervise: false, schedule: false })
    await installed.start()
    for (const name of ['dead_letters', 'deliveries']) await installed.createQueue(name)
    await installed.stop({ graceful: false })
    await startService(t, { databaseUrl: another.url, mode: 'api' })

    const isRefused = async () => {
      const program = runProgram(t, { env: testEnvironment(url) })
      // One that starts is waited for as well, or the test would last for ever.
      await Promise.race([program.exited, program.logged('service.ready')])
      assert.match(program.stdout(), /pgboss of this database belongs to another application/)
      assert.equal((await program.exited).code, 1)
    }
    await other.start()
    await other.createQueue('mail')
    await other.stop({ graceful: false })
    await isRefused()
    await other.start()
    await other.deleteQueue('mail')
    await other.createQueue('deliveries')
    await other.send('deliveries', { not: 'ours' })
    await other.stop({ graceful: false })
    await isRefused()
    const [jobs] = await sql`select count(*)::int from pgboss.job where name = 'deliveries'`
    assert.deepEqual({ ...jobs }, { count: 1 })
  })

  test('a database that cannot store every character is refused', async (t) => {
    const { url, sql } = await createDatabase(t, { template: null })
    const name = `${new URL(url).pathname.slice(1)}_ascii`
    await sql.text(`create database ${name} encoding sql_ascii locale 'C' template template0`)
    cleanUp(t, () => sql.text(`drop database ${name} with (force)`))
    const program = runProgram(t, { env: testEnvironment(url.replace(/[^/]*$/, name)) })
    assert.equal((await program.exited).code, 1)
    assert.match(
      program.stdout(),
      /a database with encoding UTF8 is needed, to store any payload: this one has SQL_ASCII/,
    )
  })

  test('a pooler that swallows the settings of connections ends the start, whether or not it migrates', async (t) => {
    const { url } = await createDatabase(t)
    const pooler = await startProxy(t, url, { pools: true })
    for (const args of [[], ['--no-migrate']]) {
      const program = runProgram(t, { args, env: testEnvironment(pooler.url) })
      // One that starts is waited for as well, or the test would last for ever.
      await Promise.race([program.exited, program.logged('service.ready')])
      assert.match(program.stdout(), /connect to it directly, not through a pooler/)
      assert.equal((await program.exited).code, 1)
    }
  })

  test('a database of which all tables are published delivers as before', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    await sql`create publication everything for all tables`
    const receiver = await startReceiver(t)
    const service = await startService(t, { databaseUrl })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url())
    for (let nth = 0; nth < 3; nth++) await tenant.publish()
    await receiver.until(3)
    await settled(sql)
    await assertBooks(sql)
  })

  test('the log tells the configuration and the exemptions, and no secret', async (t) => {
    const { url: databaseUrl } = await createDatabase(t)
    const service = await startService(t, { databaseUrl, env: { LOG_LEVEL: 'trace' } })
    const { config } = (await service.logged('service.starting')) as unknown as { config: Record<string, unknown> }
    assert.equal(config.ADMIN_API_KEY, '***')
    assert.equal(config.ENCRYPTION_KEY, '***')
    assert.equal(config.RETRY_LIMIT, 14)
    const warning = service.logs.find((line) => line.level === 'warn')
    assert.deepEqual([warning?.msg, warning?.EGRESS_ALLOW], ['egress.exempted', ['127.0.0.0/8', '::1/128']])
    const strict = await startService(t, { databaseUrl, mode: 'api', env: { EGRESS_ALLOW: '' } })
    assert.ok(!strict.logs.some(({ msg }) => msg === 'egress.exempted'))
    const output = service.stdout() + service.stderr()
    for (const secret of [ADMIN_KEY, ENCRYPTION_KEY, PASSWORD]) assert.ok(!output.includes(secret))
    assert.deepEqual(await service.stop(), { code: 0, signal: null })
  })

  test('a service that starts before its database waits for it, and says so without the password', async (t) => {
    const { url } = await createDatabase(t)
    const proxy = await startProxy(t, url)
    await proxy.cut()
    const program = runProgram(t, { env: testEnvironment(proxy.url) })
    const { err } = await program.logged('database.waiting')
    assert.equal((err as { code: string }).code, 'ECONNREFUSED')
    await proxy.restore()
    await program.logged('service.ready')
    assert.ok(!(program.stdout() + program.stderr()).includes(PASSWORD))
  })

  test('a service that starts while another migrates waits for it, and says so', async (t) => {
    const { url } = await createDatabase(t)
    const other = connect(url)
    t.after(() => other.end())
    // As in src/migrate.ts: versions take turns by it, so it stays the same for ever.
    await other`select pg_advisory_lock(${0x5741_5942})`
    const program = runProgram(t, { env: testEnvironment(url) })
    await program.logged('migration.waiting')
    assert.ok(!program.logs.some(({ msg }) => msg === 'service.ready'))
    await other.end()
    await program.logged('service.ready')
  })

  test('a database that refuses the service ends the start with 1 and a reason, without the password', async (t) => {
    const { url } = await createDatabase(t)
    const wrong = new URL(url)
    wrong.pathname = '/no-such-database'
    const program = runProgram(t, { env: testEnvironment(wrong.href) })
    assert.equal((await program.exited).code, 1)
    assert.match(program.stdout() + program.stderr(), /no-such-database\\*" does not exist/)
    assert.ok(!(program.stdout() + program.stderr()).includes(PASSWORD))
  })

  test('an address that is none of this machine’s ends the start with 1 and the settings to look at', async (t) => {
    const { url } = await createDatabase(t)
    const program = runProgram(t, { env: { ...testEnvironment(url), HOST: '192.0.2.1' } })
    assert.equal((await program.exited).code, 1)
    assert.match(program.stdout(), /"HOST and PORT: listen EADDRNOTAVAIL/)
  })

  test('a taken port ends the start with 1 and a reason, before anything is claimed', async (t) => {
    const { databaseUrl, sql, service: first, tenant } = await startTenant(t, { mode: 'api' })
    await tenant.createEndpoint('http://127.0.0.1:9/never')
    await tenant.publish()
    const second = runProgram(t, { env: { ...testEnvironment(databaseUrl), PORT: String(first.port) } })
    assert.equal((await second.exited).code, 1)
    assert.match(second.stdout(), /EADDRINUSE/)
    assert.deepEqual([...(await sql`select from pgboss.job where started_on is not null`)], [])
  })

  test('without the key that opens the stored secrets the start is refused; with both keys it is not', async (t) => {
    const { url: databaseUrl } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const first = await startService(t, { databaseUrl })
    await (await createTenant(first)).createEndpoint(receiver.url())
    await first.stop()

    const otherKey = Buffer.alloc(32, 9).toString('base64')
    const refused = runProgram(t, { env: { ...testEnvironment(databaseUrl), ENCRYPTION_KEY: otherKey } })
    assert.equal((await refused.exited).code, 1)
    assert.match(refused.stdout() + refused.stderr(), /ENCRYPTION_KEY lacks the key/)

    const both = await startService(t, { databaseUrl, env: { ENCRYPTION_KEY: `${otherKey},${ENCRYPTION_KEY}` } })
    const tenant = await createTenant(both)
    await tenant.createEndpoint(receiver.url())
    await tenant.publish()
    await receiver.until(1)
  })

  test('a worker that was started before the key was changed leaves what it cannot sign to others, and spends no attempt', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const newKey = Buffer.alloc(32, 9).toString('base64')
    const old = await startService(t, { databaseUrl, mode: 'worker' })
    const env = { ENCRYPTION_KEY: `${newKey},${ENCRYPTION_KEY}` }
    const tenant = await createTenant(await startService(t, { databaseUrl, mode: 'api', env }))
    await tenant.createEndpoint(receiver.url())
    await Promise.all(Array.from({ length: 20 }, () => tenant.publish()))
    await waitFor(async () => (await sql`select from waybill.deliveries where held`).length > 0, { what: 'a hold' })
    const putOff = () => old.logs.filter(({ msg }) => msg === 'delivery.put_off')
    const others = () => putOff().reduce((sum, line) => sum + Number(line.others_since_last), 0)
    await waitFor(() => others() > 5, { what: 'a line that tells of many' })
    const seconds = putOff().map(({ time }) => Math.floor(Date.parse(String(time)) / 1000))
    assert.equal(new Set(seconds).size, seconds.length, 'none is told in the second of another')
    await startService(t, { databaseUrl, mode: 'worker', env })
    // Until then the old one takes half of them again each second.
    await receiver.until(20, { timeoutMs: 90_000 })
    await settled(sql)
    await assertBooks(sql)
    const deliveries = await sql`select status, attempt_count, count(*)::int from waybill.deliveries group by 1, 2`
    assert.deepEqual([...deliveries], [{ status: 'delivered', attempt_count: 1, count: 20 }])
  })

  test('a key that only a rotated secret needs is needed until that has expired', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const receiver = await startReceiver(t)
    const newKey = Buffer.alloc(32, 9).toString('base64')
    const first = await startService(t, { databaseUrl })
    const { endpoint_id } = await (await createTenant(first)).createEndpoint(receiver.url())
    await first.stop()
    const both = await startService(t, { databaseUrl, env: { ENCRYPTION_KEY: `${newKey},${ENCRYPTION_KEY}` } })
    const [{ tenant_id } = {}] = await sql`select tenant_id from waybill.endpoints where endpoint_id = ${endpoint_id}`
    const { body } = await both.call('POST', '/v1/admin/api-keys', { key: ADMIN_KEY, body: { tenant_id, name: 'k' } })
    const rotate = `/v1/endpoints/${endpoint_id}/rotate-secret`
    assert.equal((await caller(both.url, body.api_key)('POST', rotate)).status, 200)
    await both.stop()

    const refused = runProgram(t, { env: { ...testEnvironment(databaseUrl), ENCRYPTION_KEY: newKey } })
    assert.equal((await refused.exited).code, 1)
    assert.match(refused.stdout() + refused.stderr(), /ENCRYPTION_KEY lacks the key/)
    await sql`update waybill.endpoints set previous_secret_expires_at = now()`
    await startService(t, { databaseUrl, env: { ENCRYPTION_KEY: newKey } })
  })

  test('retries are as the worker is told, whoever has migrated the database, and an attempt may take its time', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const receiver = await startReceiver(t)
    receiver.script('/hook', 500)
    const api = await startService(t, { databaseUrl, mode: 'api', env: { RETRY_LIMIT: '9' } })
    const env = { RETRY_LIMIT: '0', ATTEMPT_TIMEOUT_SECONDS: '300' }
    await startService(t, { databaseUrl, mode: 'worker', args: ['--no-migrate'], env })
    await startService(t, { databaseUrl, mode: 'api', env: { RETRY_LIMIT: '9' } })
    const tenant = await createTenant(api)
    await tenant.createEndpoint(receiver.url('/hook'))
    const { delivery_ids } = await tenant.publish()
    const status = async () => (await tenant.call('GET', `/v1/deliveries/${delivery_ids[0]}`)).body.status
    await waitFor(async () => (await status()) === 'dead_lettered', { what: 'the delivery to be given up on' })
    assert.equal(receiver.receipts.length, 1)
    const [queue] = await sql`select expire_seconds from pgboss.queue where name = 'deliveries'`
    assert.ok(queue?.expire_seconds > 400, 'no attempt outlives its claim')
  })

  test('what a database or role is set to changes neither what statements mean nor how long they may wait', async (t) => {
    const { url: databaseUrl, sql, openPool } = await createDatabase(t)
    const name = new URL(databaseUrl).pathname.slice(1)
    await sql.text(`alter database ${name} set bytea_output = 'escape'`)
    await sql.text(`alter database ${name} set datestyle = 'SQL, DMY'`)
    await sql.text(`alter database ${name} set default_transaction_isolation = 'serializable'`)
    await sql.text(`alter database ${name} set standard_conforming_strings = off`)
    await sql.text(`alter database ${name} set array_nulls = off`)
    await sql.text(`alter database ${name} set lock_timeout = '1ms'`)
    await sql.text(`alter database ${name} set statement_timeout = '1ms'`)
    await sql.text(`alter database ${name} set idle_session_timeout = '100ms'`)
    const receiver = await startReceiver(t)
    const service = await startService(t, { databaseUrl })
    const tenant = await createTenant(service)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'))
    const { created_at } = (await tenant.call('GET', `/v1/endpoints/${endpoint_id}`)).body
    assert.ok(Math.abs(Date.parse(created_at) - Date.now()) < 60_000, created_at)
    await tenant.publish()
    await receiver.until(1)
    await settled(sql)
    const pool = openPool()
    const [settings] = await pool`
      select current_setting('transaction_isolation') as isolation, current_setting('array_nulls') as nulls,
        current_setting('lock_timeout') as waits, current_setting('idle_session_timeout') as idles`
    assert.deepEqual({ ...settings }, { isolation: 'read committed', nulls: 'on', waits: '0', idles: '0' })
  })

  test('nor what names in statements mean, how numbers arrive, or how functions judge themselves', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t, { template: null })
    const name = new URL(databaseUrl).pathname.slice(1)
    await sql.text(`create schema oracle; create domain oracle.date as timestamp(0)`)
    await sql.text(`alter database ${name} set search_path = oracle, public, pg_catalog`)
    await sql.text(`alter database ${name} set extra_float_digits = -15`)
    await sql.text(`alter database ${name} set plpgsql.extra_errors = 'all'`)
    const receiver = await startReceiver(t)
    const service = await startService(t, { databaseUrl })
    const tenant = await createTenant(service)
    const { signing_secret } = await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.createEndpoint(receiver.url('/other'))
    await tenant.publish()
    await receiver.until(2)
    verifyStandard(receiver.at('/hook')[0]!, signing_secret)
  })

  test('casts that a database has been given do not keep deliveries from being held', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t, { template: null })
    await sql.text(
      `create cast (int as text) with inout as implicit; create cast (uuid as text) with inout as implicit`,
    )
    const receiver = await startReceiver(t)
    receiver.script('/hook', () => new Promise((resolve) => setTimeout(resolve, 20, 200)))
    const service = await startService(t, { databaseUrl, env: { ENDPOINT_CONCURRENCY: '1' } })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url('/hook'))
    await Promise.all(Array.from({ length: 100 }, () => tenant.publish()))
    await settled(sql)
    assert.equal(receiver.receipts.length, 100)
    assert.deepEqual(
      service.logs.filter(({ msg }) => msg === 'hold.waiting'),
      [],
    )
  })

  test('a role whose transactions may not last long is served all the same, from the first migration on', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t, { template: null })
    const [server] = await sql`select current_setting('transaction_timeout', true) is not null as can`
    if (!server?.can) return t.skip('before Postgres 17 there is no such limit')
    await sql.text(`alter database ${new URL(databaseUrl).pathname.slice(1)} set transaction_timeout = '100ms'`)
    const receiver = await startReceiver(t)
    const service = await startService(t, { databaseUrl })
    const tenant = await createTenant(service)
    await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.publish()
    await receiver.until(1)
  })

  /** An empty database in which a role of its name may make schemas, and only that. */
  async function createWithRole(t: TestContext) {
    const { url, sql } = await createDatabase(t, { template: null })
    const name = new URL(url).pathname.slice(1)
    await sql.text(`create role ${name} login password '${PASSWORD}'`)
    cleanUp(t, async () => {
      await sql.text(`drop owned by ${name} cascade`)
      await sql.text(`drop role ${name}`)
    })
    const limited = new URL(url)
    limited.username = name
    await sql.text(`grant create on database ${name} to ${name}`)
    return { sql, name, limited }
  }

  test('a process that works is healthy though the server has no connection left', async (t) => {
    const { sql, name, limited } = await createWithRole(t)
    const service = await startService(t, { databaseUrl: limited.href, mode: 'api' })
    const tenant = await createTenant(service)
    await sql.text(`alter role ${name} connection limit 0`)
    assert.equal((await service.call('GET', '/health')).status, 200)
    await tenant.publish()
    await service.stop()
  })

  test('a role that may make no schemas any more can start where there are some', async (t) => {
    const { sql, name, limited } = await createWithRole(t)
    const first = await startService(t, { databaseUrl: limited.href })
    await first.stop()
    await sql.text(`revoke create on database ${name} from ${name}`)
    const second = await startService(t, { databaseUrl: limited.href })
    // What a killed one leaves running in the database could deadlock with dropping what the role owns.
    await second.stop()
  })

  test('tables of another role, which retention could not drop, are told of at a start', async (t) => {
    const { sql, limited } = await createWithRole(t)
    const first = await startService(t, { databaseUrl: limited.href, mode: 'api' })
    assert.deepEqual(
      first.logs.filter(({ msg }) => msg === 'database.not_owned'),
      [],
    )
    await first.stop()
    for (const kind of ['events', 'deliveries'])
      await sql.text(
        `alter table waybill.${kind}_default owner to current_user; grant select on waybill.${kind}_default to public`,
      )
    const second = await startService(t, { databaseUrl: limited.href, mode: 'api' })
    const { owner, tables } = await second.logged('database.not_owned')
    assert.deepEqual({ owner, tables }, { owner: 'waybill', tables: 2 })
    await second.stop()
  })

  test('a password that an interrupted first start may have left behind opens nothing', async (t) => {
    const cwd = await createDirectory(t)
    const file = `${cwd}/.waybill/keys.json`
    const before = { adminApiKey: ADMIN_KEY, encryptionKey: ENCRYPTION_KEY, databasePassword: 'left behind' }
    mkdirSync(`${cwd}/.waybill`)
    await writeFile(file, JSON.stringify(before))
    const program = runProgram(t, { cwd, env: { HOST: '127.0.0.1', PORT: '0' } })
    await program.logged('service.ready', 60_000)
    const { databasePassword, ...others } = JSON.parse(await readFile(file, 'utf8'))
    assert.notEqual(databasePassword, before.databasePassword)
    assert.deepEqual(others, { adminApiKey: ADMIN_KEY, encryptionKey: ENCRYPTION_KEY })
    await program.stop()
  })

  test('without DATABASE_URL the service keeps a Postgres of its own, which survives kill -9 and a restart', async (t) => {
    const cwd = await createDirectory(t)
    const env = { HOST: '127.0.0.1', PORT: '0', EGRESS_ALLOW: '127.0.0.0/8' }
    // As root's may be: then what root writes is not for the user that Postgres runs as.
    const umask = process.umask(0o077)
    const first = runProgram(t, { cwd, env })
    process.umask(umask)
    const firstPort = (await first.logged('service.ready', 60_000)).port
    const adminKey = /Admin key: (\S+)/.exec(first.stderr())?.[1]
    assert.ok(adminKey, 'the generated admin key is printed')
    assert.equal((await stat(`${cwd}/.waybill/keys.json`)).mode & 0o777, 0o600, 'nobody else may read the keys')
    const admin = caller(`http://127.0.0.1:${firstPort}`, adminKey)
    const body = { tenant_id: 'acme', tenant_slug: 'acme' }
    assert.equal((await admin('POST', '/v1/admin/tenants', { body })).body.created, true)
    const { api_key } = (await admin('POST', '/v1/admin/api-keys', { body: { tenant_id: 'acme', name: 'k' } })).body

    const second = runProgram(t, { cwd, env })
    assert.equal((await second.exited).code, 1)
    assert.match(second.stdout() + second.stderr(), new RegExp(`in use by process ${first.pid}`))

    await first.kill()
    // Another process has its pid since.
    const owner = `${cwd}/.waybill/owner.pid`
    await writeFile(owner, (await readFile(owner, 'utf8')).replace(/^\d+/, String(process.pid)))
    const restarted = runProgram(t, { cwd, env })
    const port = (await restarted.logged('service.ready', 60_000)).port
    const call = caller(`http://127.0.0.1:${port}`, api_key)
    assert.equal((await call('GET', '/v1/endpoints')).status, 200)
    const again = await call('POST', '/v1/admin/tenants', { key: adminKey, body })
    assert.equal(again.body.created, false)
    assert.deepEqual(await restarted.stop(), { code: 0, signal: null })
    await waitFor(
      () =>
        readFile(`${cwd}/.waybill/postgres/postmaster.pid`).then(
          () => false,
          () => true,
        ),
      {
        what: 'Postgres to end with the service',
      },
    )

    const nowhere = runProgram(t, { cwd, env: { ...env, HOST: '192.0.2.1' } })
    assert.equal((await nowhere.exited).code, 1)
    assert.ok(!existsSync(`${cwd}/.waybill/postgres/postmaster.pid`), 'a start that fails leaves no Postgres behind')

    const failing = async () => {
      const program = runProgram(t, { cwd, env })
      assert.deepEqual(await program.exited, { code: 1, signal: null })
      return program.stdout() + program.stderr()
    }
    await rename(`${cwd}/.waybill/postgres/global`, `${cwd}/.waybill/elsewhere`)
    const began = Date.now()
    assert.match(await failing(), /embedded Postgres did not start/)
    assert.ok(Date.now() - began < 15_000, 'it does not wait for what has ended')
    for (const damaged of ['', '{"adminApiKey":"k"}']) {
      await writeFile(`${cwd}/.waybill/keys.json`, damaged)
      assert.match(await failing(), /keys.json is damaged or gone/)
    }
    await rm(`${cwd}/.waybill/keys.json`)
    assert.match(await failing(), /keys.json is damaged or gone/)
  })

  test('a process that has the pid of a Postgres which a killed run has left is not ended', async (t) => {
    const cwd = await createDirectory(t)
    const other = spawn('sleep', ['60'])
    cleanUp(t, () => void other.kill())
    await once(other, 'spawn')
    await writeFile(`${cwd}/postmaster.pid`, `${other.pid}\n${cwd}\n`)
    await stopLeftover(cwd)
    assert.equal(await isAlive(other.pid!), true)
  })

  test('a Postgres of its own is for this machine alone, and the operator’s own keys hold there, too', async (t) => {
    const cwd = await createDirectory(t)
    const own = 'own-admin-key-0123'
    const env = { HOST: '127.0.0.1', PORT: '0', ENCRYPTION_KEY, ADMIN_API_KEY: own }
    const program = runProgram(t, { cwd, env })
    const url = `http://127.0.0.1:${(await program.logged('service.ready', 60_000)).port}`
    assert.doesNotMatch(program.stderr(), /Admin key/)
    const port = (await readFile(`${cwd}/.waybill/postgres/postmaster.pid`, 'utf8')).split('\n')[3]
    const { databasePassword } = JSON.parse(await readFile(`${cwd}/.waybill/keys.json`, 'utf8'))
    const sql = connect(`postgres://waybill:${databasePassword}@127.0.0.1:${port}/waybill`)
    cleanUp(t, () => sql.end())
    const [where] = await sql`
      select current_setting('listen_addresses') as addresses, current_setting('unix_socket_directories') as directories`
    assert.deepEqual({ ...where }, { addresses: '127.0.0.1', directories: '' })
    const admin = caller(url, own)
    await admin('POST', '/v1/admin/tenants', { body: { tenant_id: 'acme', tenant_slug: 'acme' } })
    const { api_key: key } = (await admin('POST', '/v1/admin/api-keys', { body: { tenant_id: 'acme', name: 'k' } }))
      .body
    const body = { url: 'https://example.com/', subscribed_events: ['*'] }
    const { endpoint_id, signing_secret } = (await admin('POST', '/v1/endpoints', { key, body })).body
    const [row] = await sql`select signing_secret as sealed from waybill.endpoints`
    const box = createSecretBox([Buffer.from(ENCRYPTION_KEY, 'base64')])
    assert.equal(box.open(row!.sealed, `acme/${endpoint_id}`), signing_secret)
  })

  test('a first start without DATABASE_URL that is interrupted, wherever, does not stop the next one', async (t) => {
    const cwd = await createDirectory(t)
    const folder = `${cwd}/.waybill`
    const start = () => runProgram(t, { cwd, env: { HOST: '127.0.0.1', PORT: '0' } })
    const making = () => existsSync(folder) && readdirSync(folder).some((name) => name.startsWith('postgres.'))
    const isUp = () => existsSync(`${folder}/postgres/postmaster.pid`)

    const killed = start()
    await waitFor(making, { what: 'the data directory to be made' })
    await killed.kill()

    // As what makes the directory goes on without the program for a while.
    const orphaned = `${folder}/postgres.0`
    mkdirSync(orphaned, { recursive: true })
    const until = Date.now() + 3000
    const writing = setInterval(() => {
      try {
        for (let n = 0; n < 50 && Date.now() < until; n++) appendFileSync(`${orphaned}/${Math.random()}`, '')
      } catch {
        clearInterval(writing)
      }
    }, 2)
    const stopped = start()
    await waitFor(isUp, { timeoutMs: 60_000, what: 'Postgres to start' })
    clearInterval(writing)
    assert.deepEqual(await stopped.stop(), { code: 0, signal: null })
    await waitFor(() => !isUp(), { what: 'Postgres to end with the service' })

    const killedLater = start()
    await waitFor(isUp, { timeoutMs: 60_000, what: 'Postgres to start' })
    await killedLater.kill()

    // As its parent does not ask for it, it seems to be there although it has ended.
    const parent = spawn('sh', ['-c', 'sleep 1 & echo $!; exec sleep 60'])
    cleanUp(t, () => void parent.kill())
    const pid = String((await once(parent.stdout, 'data'))[0]).trim()
    if (existsSync(`/proc/${pid}`)) {
      const fields = () => readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1]?.split(' ')
      await waitFor(() => fields()?.[0] === 'Z')
      await writeFile(`${folder}/owner.pid`, `${pid} ${fields()?.[19]}`)
    }
    const whole = start()
    await whole.logged('service.ready', 60_000)
    assert.deepEqual(readdirSync(folder).sort(), ['keys.json', 'owner.pid', 'postgres'])
    assert.deepEqual(await whole.stop(), { code: 0, signal: null })
  })
})
