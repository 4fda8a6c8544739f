import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { cp, readFile, symlink, writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { suite, type TestContext, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import type { Pool } from '../src/db/open.ts'
import { createLog } from '../src/log.ts'
import { migrate } from '../src/migrate.ts'
import { VERSION } from '../src/version.ts'
import { connect, createDatabase, lock, QUEUE } from './support/database.ts'
import { assertBooks, settled } from './support/deliveries.ts'
import { createDirectory } from './support/directory.ts'
import { startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, caller, runProgram, type Service, startService, testEnvironment } from './support/service.ts'
import { verifyStandard } from './support/verify.ts'
import { waitFor } from './support/wait.ts'

const ROOT = fileURLToPath(new URL('..', import.meta.url))
/** Where the receivers of test/first-version.sql listened. */
const OLD_RECEIVER = 'http://127.0.0.1:47921'

/** A database as the first version left it, but that its endpoints lead to a receiver that takes everything. */
async function restore(t: TestContext) {
  const { url: databaseUrl, sql } = await createDatabase(t, { template: null })
  const receiver = await startReceiver(t)
  const dump = await readFile(new URL('first-version.sql', import.meta.url), 'utf8')
  const loading = connect(databaseUrl)
  await loading.text(dump.replaceAll(OLD_RECEIVER, receiver.url('')))
  await loading.end()
  return { databaseUrl, sql, receiver }
}

async function keyOf(service: Service, tenantId: string): Promise<string> {
  const body = { tenant_id: tenantId, name: 'after the upgrade' }
  return (await service.call('POST', '/v1/admin/api-keys', { key: ADMIN_KEY, body })).body.api_key
}

suite('a database of the first version', { concurrency: 2 }, () => {
  test('is brought up to date by a start, which delivers what was waiting and serves every record', async (t) => {
    const { databaseUrl, sql, receiver } = await restore(t)
    const before =
      await sql`select event_type, status, held, attempt_count from waybill.deliveries order by delivery_id`
    const service = await startService(t, { databaseUrl })
    const { sql: fresh } = await createDatabase(t)
    assert.deepEqual(await schemaOf(sql), await schemaOf(fresh))

    const call = caller(service.url, await keyOf(service, 'acme'))
    const endpoints = (await call('GET', '/v1/endpoints?limit=100')).body.data
    const off = endpoints.find(({ url }: { url: string }) => url.endsWith('/off'))
    assert.equal(off.is_active, false)
    const waiting = () => sql`
      select from waybill.deliveries where status in ('pending', 'retrying') and not (held and endpoint_id = ${off.endpoint_id})`
    await waitFor(async () => (await waiting()).length === 0, { timeoutMs: 45_000, what: 'what waited to be sent' })
    assert.equal(receiver.at('/off').length, 0)
    await call('PATCH', `/v1/endpoints/${off.endpoint_id}`, { body: { is_active: true } })
    await settled(sql)
    const count = (path: string) => receiver.at(path).length
    assert.deepEqual(
      ['/fine', '/failing', '/ordered', '/off', '/lost', '/all', '/paced', '/gone', '/other'].map((path) => [
        path,
        count(path),
      ]),
      [
        ['/fine', 1],
        ['/failing', 1],
        ['/ordered', 3],
        ['/off', 2],
        ['/lost', 1],
        ['/all', 1],
        ['/paced', 2],
        ['/gone', 0],
        ['/other', 0],
      ],
    )
    await assertBooks(sql)

    const rows = (await call('GET', '/v1/deliveries?limit=100')).body.data
    assert.equal(rows.length, before.length - 1, 'all but the other tenant’s')
    for (const row of rows) {
      const { body: event } = await call('GET', `/v1/events/${row.event_id}`)
      assert.deepEqual([event.payload.type, event.payload.key], [row.event_type, event.idempotency_key])
      const { body: attempts } = await call('GET', `/v1/deliveries/${row.delivery_id}/attempts`)
      assert.equal(attempts.data.length, row.attempt_count)
      // The key of an event that the old program took still answers with it.
      const again = await call('POST', '/v1/events', {
        body: { event_type: row.event_type, payload: event.payload },
        headers: { 'idempotency-key': event.idempotency_key },
      })
      assert.deepEqual([again.status, again.body.event_id], [200, row.event_id])
    }
    const [lost] = rows.filter((row: { event_type: string }) => row.event_type === 'lost')
    const { body: ofLost } = await call('GET', `/v1/deliveries/${lost.delivery_id}/attempts`)
    assert.deepEqual(
      ofLost.data.map((row: { status_code: number; error: string }) => row.status_code ?? row.error),
      ['worker_lost', 200],
    )
    const dead = (await call('GET', '/v1/dlq')).body.data
    assert.deepEqual(dead.map((row: { dead_letter_reason: string }) => row.dead_letter_reason).sort(), [
      'endpoint_gone',
      'retries_exhausted',
    ])
    const exhausted = dead.find((row: { event_type: string }) => row.event_type === 'failing')
    await call('POST', `/v1/deliveries/${exhausted.delivery_id}/replay`)
    await receiver.until(2, { path: '/failing' })
    // The old secrets open: a rotated one signs beside the new one.
    const all = endpoints.find(({ url }: { url: string }) => url.endsWith('/all'))
    const { body: rotated } = await call('POST', `/v1/endpoints/${all.endpoint_id}/rotate-secret`)
    await call('POST', '/v1/events', { body: { event_type: 'all', payload: {} } })
    const receipt = (await receiver.until(2, { path: '/all' }))[1]!
    verifyStandard(receipt, rotated.signing_secret)
    assert.equal(String(receipt.headers['webhook-signature']).split(' ').length, 2)
  })

  test('serves the version before and this one side by side, and either alone', async (t) => {
    const old = await versionBefore(t)
    if (old === null) return t.skip("the version before is not in this copy's history")
    const { databaseUrl, sql, receiver } = await restore(t)
    const programs = await Promise.all([
      startService(t, { databaseUrl, mode: 'api' }),
      startService(t, { databaseUrl, mode: 'worker' }),
    ])
    const [newApi, newWorker] = programs
    // It starts after the migrations, as one that is restarted in the middle of an upgrade.
    const [oldApi, oldWorker] = await Promise.all([
      startService(t, { databaseUrl, mode: 'api', main: old }),
      startService(t, { databaseUrl, mode: 'worker', main: old }),
    ])
    const key = await keyOf(newApi!, 'acme')
    const published: string[] = []
    const publish = async (api: Service, count: number) => {
      for (let n = 0; n < count; n++) {
        const body = { event_type: 'all', payload: { n } }
        const answer = await api.call('POST', '/v1/events', {
          key,
          body,
          headers: { 'idempotency-key': `${published.length}-${api.port}-${n}` },
        })
        assert.equal(answer.status, 202)
        published.push(answer.body.event_id)
      }
    }
    const allArrive = async () => {
      const arrived = () => new Set(receiver.at('/all').map(({ headers }) => headers['webhook-id']))
      await waitFor(() => published.every((id) => arrived().has(id)), { timeoutMs: 30_000, what: 'all to arrive' })
    }
    const made = (service: Service) => service.logs.filter((line) => line.msg === 'delivery.attempted').length
    await waitFor(
      async () => {
        await Promise.all([publish(oldApi, 50), publish(newApi!, 50)])
        return made(oldWorker) > 0 && made(newWorker!) > 0
      },
      { timeoutMs: 30_000, what: 'both workers to deliver' },
    )
    await allArrive()
    await Promise.all([newApi!.stop(), newWorker!.stop()])
    await publish(oldApi, 50)
    await allArrive()
    await Promise.all([oldApi.stop(), oldWorker.stop()])
    const [api] = await Promise.all([
      startService(t, { databaseUrl, mode: 'api' }),
      startService(t, { databaseUrl, mode: 'worker' }),
    ])
    await publish(api!, 50)
    await allArrive()
    await waitFor(
      async () =>
        (await sql`select from waybill.deliveries where event_type = 'all' and status <> 'delivered'`).length === 0,
    )
    const ids = receiver.at('/all').map(({ headers }) => headers['service-delivery-id'])
    assert.equal(new Set(ids).size, ids.length, 'nothing is sent twice')
    await assertBooks(sql)
  })
})

suite('functions', { concurrency: true }, () => {
  /** Of one of the functions, and of one that calls the queue. */
  const bodiesOf = async (sql: Pool) =>
    (await sql`select prosrc from pg_proc where proname in ('made_at', 'enqueue_one') order by proname`).map(
      ({ prosrc }) => prosrc,
    )
  const OTHERS = ['select null', 'select null::timestamptz']
  /** A database whose functions are not this program's but of `version`; these two do nothing. */
  const withOthers = async (t: TestContext, version: number[]) => {
    const database = await createDatabase(t)
    await database.sql`create or replace function waybill.made_at(id uuid) returns timestamptz language sql immutable as 'select null::timestamptz'`
    await database.sql`
      create or replace function waybill.enqueue_one(tenant text, delivery uuid, place float8) returns void language sql as 'select null'`
    await database.sql`update waybill.functions set version = ${version}, checksum = 'another'`
    return database
  }

  test('of an earlier version, or of the same that has changed, are replaced by a start', async (t) => {
    const { sql: fresh } = await createDatabase(t)
    const [own] = await fresh`select version, checksum from waybill.functions`
    for (const version of [[0, 0, 9], own!.version]) {
      const { url, sql } = await withOthers(t, version)
      await migrate(url, createLog('silent'), QUEUE)
      assert.deepEqual(await bodiesOf(sql), await bodiesOf(fresh))
      assert.deepEqual([...(await sql`select version, checksum from waybill.functions`)], [own])
    }
  })

  test('of the version before are replaced by a start', async (t) => {
    const main = await versionBefore(t)
    if (main === null) return t.skip("the version before is not in this copy's history")
    const { url: databaseUrl, sql } = await createDatabase(t, { template: null })
    await (await startService(t, { databaseUrl, mode: 'api', main })).stop()
    await migrate(databaseUrl, createLog('silent'), QUEUE)
    const { sql: fresh } = await createDatabase(t)
    const all = async (database: Pool) =>
      (
        await database<{ name: string; text: string }[]>`
          select oid::regprocedure::text as name, pg_get_functiondef(oid) as text
          from pg_proc where pronamespace = 'waybill'::regnamespace order by 1`
      ).map(({ name, text }) => [name, text])
    const there = Object.fromEntries(await all(sql))
    for (const [name, text] of await all(fresh)) assert.equal(there[name!], text)
  })

  test('that differ from those released last have a version of their own', async (t) => {
    const [released] = await releases()
    if (released === undefined) return t.skip('there is no history')
    const theirs = JSON.parse(await git('show', `${released}:package.json`))
    if (theirs.version !== VERSION) return
    assert.equal(await git('diff', '--stat', released, '--', 'sql/functions', 'src/queue-functions.ts'), '')
    const own = JSON.parse(await readFile(new URL('../package.json', import.meta.url), 'utf8'))
    assert.equal(own.dependencies['pg-boss'], theirs.dependencies['pg-boss'], 'its statements are among them')
  })

  test('of a later version are left alone by a start', async (t) => {
    const { url, sql } = await withOthers(t, [999, 0, 0])
    await migrate(url, createLog('silent'), QUEUE)
    assert.deepEqual(await bodiesOf(sql), OTHERS)
  })

  test('that are others, or a file that is missing, end a start that may not migrate', async (t) => {
    const earlier = await withOthers(t, [0, 0, 9])
    const incomplete = await createDatabase(t)
    await incomplete.sql`delete from waybill.migrations where file = '0014_announcements.sql'`
    const changed = await createDatabase(t)
    await changed.sql`update waybill.functions set checksum = 'another'`
    for (const { url } of [earlier, changed, incomplete]) {
      const program = runProgram(t, { args: ['--no-migrate'], env: testEnvironment(url) })
      assert.equal((await program.exited).code, 1)
      assert.match(program.stdout(), /the database is not at this version yet: run `npm run migrate`/)
    }
    const later = await withOthers(t, [999, 0, 0])
    await startService(t, { databaseUrl: later.url, mode: 'api', args: ['--no-migrate'] })
  })
})

test('a migration may take as long as it needs', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const main = await laterVersion(
    t,
    "create table public.noted as select current_setting('statement_timeout') as patience;",
  )
  await startService(t, { databaseUrl, mode: 'api', main })
  assert.deepEqual([...(await sql`select patience from public.noted`)], [{ patience: '0' }])
})

suite('a table that a start has to change', { concurrency: true }, () => {
  test('is waited for while a dump reads it, and others use it meanwhile', async (t) => {
    const { url, sql } = await createDatabase(t)
    await sql`alter table waybill.deliveries drop column bundle`
    await sql`delete from waybill.migrations where file = '0025_bundles.sql'`
    const program = await sql.begin(async (dump) => {
      await dump`select from waybill.deliveries`
      const started = runProgram(t, { args: ['--mode', 'api'], env: testEnvironment(url) })
      await started.logged('migration.blocked')
      const isFree = () =>
        sql
          .begin((other) => other`lock table waybill.deliveries in row exclusive mode nowait`)
          .then(
            () => true,
            () => false,
          )
      await waitFor(isFree, { what: 'the start to let go of what it waits for' })
      return started
    })
    await program.logged('service.ready')
    await sql`select bundle from waybill.deliveries`
  })

  test('is waited for likewise if it is the queue', async (t) => {
    const { url, sql } = await createDatabase(t)
    const [queue] =
      await sql`select format('pgboss.%I', table_name) as jobs from pgboss.queue where name = 'deliveries'`
    // As before 0.1.1; a start drops it.
    await sql.text(`alter table ${queue!.jobs} add constraint own foreign key (name) references pgboss.queue (name)`)
    const program = await sql.begin(async (dump) => {
      await dump.text(`select from ${queue!.jobs}`)
      const started = runProgram(t, { args: ['--mode', 'api'], env: testEnvironment(url) })
      await started.logged('migration.blocked')
      return started
    })
    await program.logged('service.ready')
    assert.equal((await sql`select from pg_constraint where conname = 'own'`).length, 0)
  })

  test('keeps no other start waiting between two tries, if it is the queue', async (t) => {
    const { url, sql, newSession } = await createDatabase(t)
    const [queue] =
      await sql`select format('pgboss.%I', table_name) as jobs from pgboss.queue where name = 'deliveries'`
    await sql.text(`alter table ${queue!.jobs} add constraint own foreign key (name) references pgboss.queue (name)`)
    await sql.begin(async (dump) => {
      await dump.text(`select from ${queue!.jobs}`)
      const started = runProgram(t, { args: ['--mode', 'api'], env: testEnvironment(url) })
      await started.logged('migration.blocked')
      // As in src/migrate.ts: whoever migrates takes turns by it.
      const turn = newSession()
      const mayStart = async () => (await turn`select pg_try_advisory_lock(${0x5741_5942}) as taken`)[0]?.taken
      await waitFor(mayStart, { what: 'another to have its turn' })
      await started.kill()
    })
  })

  test('is not waited for by a start that has nothing to change in it, if it is the queue', async (t) => {
    const { url, sql } = await createDatabase(t)
    const [queue] =
      await sql`select format('pgboss.%I', table_name) as jobs from pgboss.queue where name = 'deliveries'`
    // As who writes to it, and who vacuums it, together.
    const unlock = await lock(sql, `${queue!.jobs} in share row exclusive mode`)
    const program = runProgram(t, { args: ['--mode', 'api'], env: testEnvironment(url) })
    await Promise.race([program.logged('service.ready'), program.logged('migration.blocked')])
    assert.equal(program.logs.filter(({ msg }) => msg === 'migration.blocked').length, 0)
    await unlock()
  })

  test('is not waited for while autovacuum is at it', async (t) => {
    const { url, sql } = await createDatabase(t)
    await sql`alter table waybill.deliveries drop column bundle`
    await sql`delete from waybill.migrations where file = '0025_bundles.sql'`
    await sql`
      insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at)
      select 'acme', waybill.make_id(now()), gen_random_uuid(), gen_random_uuid(), 'x', 'delivered', now() from generate_series(1, 10000)`
    await sql`update waybill.deliveries set attempt_count = 1`
    // A tenth of a second for each page.
    await sql.text(`do $$ begin
      execute (select format('alter table %s set (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1,
        autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 0)', tableoid::regclass) from waybill.deliveries limit 1);
    end $$`)
    const configure = async (statement: string) => {
      await sql.text(statement)
      await sql`select pg_reload_conf()`
    }
    const vacuuming = () => sql`
      select from pg_stat_progress_vacuum where datname = current_database() and relid = (select tableoid from waybill.deliveries limit 1)`
    try {
      await configure("alter system set autovacuum_naptime = '1s'")
      await waitFor(async () => (await vacuuming()).length > 0, { timeoutMs: 60_000, what: 'autovacuum to begin' })
      const { logs } = await startService(t, { databaseUrl: url, mode: 'api' })
      assert.equal(logs.filter(({ msg }) => msg === 'migration.blocked').length, 0)
    } finally {
      await configure('alter system reset autovacuum_naptime')
    }
  })

  test('is not waited for by a start that has nothing to change, as of the version before', async (t) => {
    const { url, sql } = await createDatabase(t)
    const [functions] = await sql`select checksum from waybill.functions`
    // What is missing is a later version's file: this program knows nothing of it.
    const later = await laterVersion(t, 'alter table waybill.deliveries add column later int;')
    await sql.begin(async (dump) => {
      await dump`select from waybill.deliveries`
      const start = (main?: string) =>
        runProgram(t, { args: ['--mode', 'api'], env: testEnvironment(url), ...(main && { main }) })
      const first = start(later)
      await first.logged('migration.blocked')
      const second = start(later)
      await second.logged('migration.waiting')
      await startService(t, { databaseUrl: url, mode: 'api' })
      assert.equal(second.logs.filter(({ msg }) => msg === 'migration.blocked').length, 0, 'one at a time tries')
      await Promise.all([first.kill(), second.kill()])
    })
    assert.deepEqual([...(await sql`select checksum from waybill.functions`)], [functions])
  })
})

/** The main file of a later version, whose start also applies `file`. */
async function laterVersion(t: TestContext, file: string): Promise<string> {
  const directory = await createDirectory(t)
  for (const name of ['src', 'sql', 'package.json'])
    await cp(join(ROOT, name), join(directory, name), { recursive: true })
  await symlink(join(ROOT, 'node_modules'), join(directory, 'node_modules'))
  await writeFile(join(directory, 'sql/9999_later.sql'), file)
  return join(directory, 'src/main.ts')
}

/** What migrations and functions make of the database, but for the days. */
async function schemaOf(sql: Pool) {
  const columns = await sql`
    select table_name, column_name, udt_name, is_nullable, column_default from information_schema.columns
    where table_schema = 'waybill' and table_name !~ '_[0-9]{8}$' order by table_name, ordinal_position`
  const indexes = await sql`
    select indexdef from pg_indexes where schemaname = 'waybill' and tablename !~ '_[0-9]{8}$' order by indexdef`
  const functions = await sql`
    select pg_get_functiondef(oid) as definition from pg_proc where pronamespace = 'waybill'::regnamespace order by definition`
  const files = await sql`select file from waybill.migrations order by file`
  return { columns: [...columns], indexes: [...indexes], functions: [...functions], files: [...files] }
}

const run = promisify(execFile)
const git = async (...args: string[]) => (await run('git', args, { cwd: ROOT })).stdout

/** The commits that gave the program its numbers, newest first; none without a history, and few in a shallow clone. */
const releases = async () =>
  (await git('log', '--format=%H', '-G"version": ', '--', 'package.json').catch(() => '')).split('\n').filter(Boolean)

/** The main file of the version before, taken from the history; null where it is not there. */
async function versionBefore(t: TestContext): Promise<string | null> {
  // As it was when it got its number: the last commit before this version has all of this one but the number.
  const [, before] = await releases()
  if (before === undefined) return null
  const directory = await createDirectory(t)
  const archive = join(directory, 'before.tar')
  await git('archive', '-o', archive, before, 'src', 'sql', 'package.json')
  await run('tar', ['-xf', archive, '-C', directory])
  await symlink(join(ROOT, 'node_modules'), join(directory, 'node_modules'))
  return join(directory, 'src/main.ts')
}
