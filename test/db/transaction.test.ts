import assert from 'node:assert/strict'
import type { AddressInfo } from 'node:net'
import { createServer, connect as dial } from 'node:net'
import { test } from 'node:test'
import { openDb } from '../../src/db/open.ts'
import { createLog } from '../../src/log.ts'
import { cleanUp, type Scope } from '../support/cleanup.ts'
import { createDatabase } from '../support/database.ts'

/** A way to a database on which the next statement `text` is spelled wrong: what a cancel leaves that arrives as it begins. */
async function startSpoiler(scope: Scope, url: string) {
  let spoiled: string | undefined
  const server = createServer((client) => {
    const upstream = dial(Number(new URL(url).port), '127.0.0.1')
    client.on('error', () => {}).on('close', () => upstream.destroy())
    upstream.on('error', () => {}).on('close', () => client.destroy())
    upstream.pipe(client)
    client.on('data', (data) => {
      const at = spoiled === undefined ? -1 : data.indexOf(`${spoiled}\0`)
      if (at >= 0) {
        data.write('x', at)
        spoiled = undefined
      }
      upstream.write(data)
    })
  })
  await new Promise<void>((listening) => server.listen(0, '127.0.0.1', listening))
  cleanUp(scope, () => void server.close())
  const through = new URL(url)
  through.port = String((server.address() as AddressInfo).port)
  through.hostname = '127.0.0.1'
  return {
    url: through.href,
    spoil: (text: string) => {
      spoiled = text
    },
  }
}

test('a connection whose commit or rollback failed is not lent again in its transaction', async (t) => {
  const spoiler = await startSpoiler(t, (await createDatabase(t)).url)
  const pool = openDb(spoiler.url, { log: createLog('silent'), name: 'spoiled', max: 1 })
  cleanUp(t, () => pool.end(1000))
  const pid = async () => (await pool<{ pid: number }[]>`select pg_backend_pid() as pid`)[0]?.pid
  const before = await pid()
  await pool.begin((sql) => sql`select 1`)
  await assert.rejects(
    pool.begin((sql) => sql`select 1 / 0`),
    { code: '22012' },
  )
  assert.equal(await pid(), before, 'one that was rolled back is kept')
  for (const [text, work] of [
    ['commit', 'select 1'],
    ['rollback', 'select 1 / 0'],
  ] as const) {
    spoiler.spoil(text)
    await assert.rejects(pool.begin((sql) => sql.text(work)))
    await pool`select 1`
  }
})

test('what is left of a transaction that failed does not run after its rollback', async (t) => {
  const { sql: pool } = await createDatabase(t)
  await pool.text('create table done (what text)')
  const { promise: failed, resolve: goOn } = Promise.withResolvers<void>()
  let rest: Promise<unknown> | undefined
  await assert.rejects(
    pool.begin(async (sql) => {
      rest = failed.then(() => sql`insert into done values ('late')`)
      await sql`select 1 / 0`
    }),
    { code: '22012' },
  )
  goOn()
  await assert.rejects(async () => await rest, /the transaction is over/)
  assert.deepEqual(await pool`select from done`, [])
})

test('a transaction in which a failure was overlooked is not taken for one that was committed', async (t) => {
  const { sql: pool } = await createDatabase(t)
  await pool.text('create table done (what text)')
  const overlooking = pool.begin(async (sql) => {
    await sql`insert into done values ('early')`
    await sql`select 1 / 0`.catch(() => {})
  })
  await assert.rejects(overlooking, /the transaction was rolled back/)
  assert.deepEqual(await pool`select from done`, [])
})
