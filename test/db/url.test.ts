import assert from 'node:assert/strict'
import { chown, rm, stat, writeFile } from 'node:fs/promises'
import { userInfo } from 'node:os'
import { join } from 'node:path'
import { suite, type TestContext, test } from 'node:test'
import { untilReachable } from '../../src/db/until-reachable.ts'
import { readDatabaseUrl } from '../../src/db/url.ts'
import { createLog } from '../../src/log.ts'
import { AUTHORITY, KEY, TRUSTED } from '../support/certificates.ts'
import { cleanUp } from '../support/cleanup.ts'
import { createDatabase } from '../support/database.ts'
import { settled } from '../support/deliveries.ts'
import { createDirectory } from '../support/directory.ts'
import { startReceiver } from '../support/receiver.ts'
import { createTenant, runProgram, startService, testEnvironment } from '../support/service.ts'

const readings: [url: string, read: object][] = [
  [
    'postgres://u:p%40%2F@db.example:6432/events',
    { host: 'db.example', port: 6432, database: 'events', user: 'u', password: 'p@/', ssl: false, options: '' },
  ],
  ['postgresql://u@[::1]/d', { host: '::1', port: 5432, database: 'd', user: 'u', ssl: false, options: '' }],
  [
    'postgres:///d?host=/run/postgresql&user=u',
    { host: '/run/postgresql', port: 5432, database: 'd', user: 'u', ssl: false, options: '' },
  ],
  [
    'postgres://u@%2Frun%2Fpostgresql/d',
    { host: '/run/postgresql', port: 5432, database: 'd', user: 'u', ssl: false, options: '' },
  ],
  ['postgres://u@h/d?sslmode=disable', { host: 'h', port: 5432, database: 'd', user: 'u', ssl: false, options: '' }],
  [
    'postgres://u@h/d?sslmode=require&channel_binding=require&uselibpqcompat=true',
    { host: 'h', port: 5432, database: 'd', user: 'u', ssl: { rejectUnauthorized: false }, options: '' },
  ],
  ['postgres://u@h/d?sslmode=verify-full', { host: 'h', port: 5432, database: 'd', user: 'u', ssl: {}, options: '' }],
  [
    'postgres://u@h/a%2Fb%23c%3Fd%40e%26f%2Bg%20%25',
    { host: 'h', port: 5432, database: 'a/b#c?d@e&f+g %', user: 'u', ssl: false, options: '' },
  ],
  ['postgres://u@h?dbname=a%2Fb', { host: 'h', port: 5432, database: 'a/b', user: 'u', ssl: false, options: '' }],
  [
    'postgres:///d?host=/run/postgresql&user=u&sslmode=require',
    { host: '/run/postgresql', port: 5432, database: 'd', user: 'u', ssl: false, options: '' },
  ],
  ['postgres://u@h/d?sslrootcert=system', { host: 'h', port: 5432, database: 'd', user: 'u', ssl: {}, options: '' }],
  [
    'postgres://u@h/d?options=-c%20geqo%3Doff',
    { host: 'h', port: 5432, database: 'd', user: 'u', ssl: false, options: '-c geqo=off' },
  ],
  [
    'postgres:///a+b?host=/run&user=u+v&password=p+w%20x',
    { host: '/run', port: 5432, database: 'a+b', user: 'u+v', password: 'p+w x', ssl: false, options: '' },
  ],
]

/** A database whose server also speaks TLS, with a certificate for 127.0.0.1; `ca` is the file that vouches for it. */
async function createTlsDatabase(t: TestContext) {
  const database = await createDatabase(t)
  const { sql } = database
  const [{ directory } = { directory: '' }] = await sql<
    { directory: string }[]
  >`select current_setting('data_directory') as directory`
  const { uid, gid } = await stat(directory)
  for (const [name, text] of [
    ['server.crt', TRUSTED],
    ['server.key', KEY],
  ] as const) {
    await writeFile(join(directory, name), text, { mode: 0o600 })
    await chown(join(directory, name), uid, gid)
  }
  await sql`alter system set ssl = on`
  await sql`select pg_reload_conf()`
  const ca = join(await createDirectory(t), 'ca.crt')
  await writeFile(ca, AUTHORITY)
  return { ...database, ca }
}

suite('DATABASE_URL', { concurrency: 2 }, () => {
  for (const [url, read] of readings)
    test(`${url} is read as libpq reads it`, () => {
      assert.deepEqual(readDatabaseUrl(url, {}), read)
    })

  test('what it leaves open is taken from the environment, as libpq does', () => {
    const env = { PGHOST: 'db.example', PGPORT: '6432', PGUSER: 'u', PGSSLMODE: 'require', PGOPTIONS: '-c geqo=off' }
    const found = { database: 'd', user: 'u', ssl: { rejectUnauthorized: false }, options: '-c geqo=off' }
    assert.deepEqual(readDatabaseUrl('postgres:///d', env), { ...found, host: 'db.example', port: 6432 })
    assert.deepEqual(readDatabaseUrl('postgres://h:1/d', env), { ...found, host: 'h', port: 1 })
    for (const query of ['sslmode=disable', 'sslmode=disable&sslrootcert=system', 'ssl=false', 'ssl=0'])
      assert.deepEqual(readDatabaseUrl(`postgres://h:1/d?${query}`, env), {
        host: 'h',
        port: 1,
        ...found,
        ssl: false,
      })
    assert.equal(readDatabaseUrl('postgres:///d', {}).user, userInfo().username)
    assert.equal(readDatabaseUrl('postgres:///d?options=-c%20jit%3Don', env).options, '-c jit=on')
    assert.throws(() => readDatabaseUrl('postgres://h/d', { PGSSLMODE: 'prefer' }), /PGSSLMODE/)
  })

  test('its options hold beside those that a start adds', async (t) => {
    const { url } = await createDatabase(t)
    const reached = await untilReachable(`${url}?options=-c%20geqo%3Doff`, createLog('silent'))
    assert.match(readDatabaseUrl(reached, {}).options, /^-c geqo=off/)
  })

  test('a plus in its query is one also once a start has added its options', async (t) => {
    const { url, sql } = await createDatabase(t)
    const { host, pathname } = new URL(url)
    const role = `plus+${pathname.slice(1)}`
    await sql.text(`create role "${role}" login password 'p+w'`)
    cleanUp(t, () => sql.text(`drop role "${role}"`))
    const reached = await untilReachable(`postgres://${host}${pathname}?user=${role}&password=p+w`, createLog('silent'))
    const { user, password } = readDatabaseUrl(reached, {})
    assert.deepEqual({ user, password }, { user: role, password: 'p+w' })
  })

  test('certificates that are replaced are read anew, those that are gone stay as they were', async (t) => {
    const ca = join(await createDirectory(t), 'ca.crt')
    await writeFile(ca, AUTHORITY)
    const { ssl } = readDatabaseUrl(`postgres://u@h/d?sslmode=verify-full&sslrootcert=${ca}`, {})
    assert.deepEqual({ ...(ssl as object) }, { ca: AUTHORITY })
    const asked = readDatabaseUrl('postgres://u@h/d', { PGSSLMODE: 'verify-full', PGSSLROOTCERT: ca })
    assert.deepEqual({ ...(asked.ssl as object) }, { ca: AUTHORITY })
    await writeFile(ca, TRUSTED)
    assert.deepEqual({ ...(ssl as object) }, { ca: TRUSTED })
    await rm(ca)
    assert.deepEqual({ ...(ssl as object) }, { ca: TRUSTED })
  })

  test('a key that is none is refused in one sentence', async (t) => {
    const key = join(await createDirectory(t), 'client.key')
    await writeFile(key, 'nonsense')
    const said = /^Error: sslrootcert, sslcert or sslkey cannot be read: /
    assert.throws(() => readDatabaseUrl(`postgres://h/d?sslmode=require&sslkey=${key}`, {}), said)
    assert.throws(() => readDatabaseUrl('postgres://h/d?sslmode=require', { PGSSLKEY: key }), said)
  })

  for (const [query, said] of [
    ['sslmode=prefer', 'sslmode (or PGSSLMODE) must be one of disable, require, verify-ca, verify-full'],
    ['sslmode=no-verify', 'sslmode (or PGSSLMODE) must be one of disable, require, verify-ca, verify-full'],
    ['sslmode=verify-ca', 'sslmode=verify-ca needs sslrootcert'],
    ['sslmode=verify-full&sslrootcert=/nowhere/ca.crt', "ENOENT: no such file or directory, open '/nowhere/ca.crt'"],
    ['sslMode=require', 'sslMode must be written sslmode'],
    ['ssl=require', 'ssl must be true or false: for more, use sslmode'],
  ] as const)
    test(`with ${query} it ends the start, which says why`, async (t) => {
      const program = runProgram(t, { env: testEnvironment(`postgres://u:hunter2@127.0.0.1:1/d?${query}`) })
      assert.equal((await program.exited).code, 1)
      assert.equal(program.stderr(), `waybill: DATABASE_URL: ${said}`)
    })

  for (const query of [
    'sslmode=require',
    'sslmode=require&sslrootcert=CA',
    'sslmode=verify-ca&sslrootcert=CA',
    'sslmode=verify-full&sslrootcert=CA',
  ])
    test(`with ${query}, whatever connects does so encrypted`, async (t) => {
      const { url, sql, ca } = await createTlsDatabase(t)
      const receiver = await startReceiver(t)
      // Spaces around it come with copying.
      const service = await startService(t, { databaseUrl: ` ${url}?${query.replace('CA', ca)} ` })
      const tenant = await createTenant(service)
      await tenant.createEndpoint(receiver.url())
      await tenant.publish()
      await receiver.until(1)
      await settled(sql)
      const connections = await sql`
        select ssl, application_name from pg_stat_ssl join pg_stat_activity using (pid)
        where datname = current_database() and application_name like 'waybill%'`
      assert.ok(connections.some(({ application_name }) => application_name === 'waybill queue'))
      assert.deepEqual(new Set(connections.map(({ ssl }) => ssl)), new Set([true]))
    })
})
