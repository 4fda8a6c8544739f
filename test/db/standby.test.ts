import assert from 'node:assert/strict'
import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { type TestContext, test } from 'node:test'
import { freePort, loadPackage, serverOptions } from '../../src/embedded.ts'
import { cleanUp } from '../support/cleanup.ts'
import { connect, PASSWORD } from '../support/database.ts'
import { createDirectory } from '../support/directory.ts'
import { runProgram, testEnvironment } from '../support/service.ts'
import { waitFor } from '../support/wait.ts'

/** A server of its own, which is a standby until `select pg_promote()`. */
async function startStandby(t: TestContext) {
  const databaseDir = join(await createDirectory(t), 'postgres')
  const port = await freePort()
  const Server = await loadPackage()
  const server = new Server(serverOptions({ databaseDir, port, password: PASSWORD, settings: ['fsync=off'] }))
  await server.initialise()
  await writeFile(join(databaseDir, 'standby.signal'), '')
  // The package takes a server for started when it can write. The directory's removal ends it.
  void server.start().catch(() => {})
  const url = `postgres://waybill:${PASSWORD}@127.0.0.1:${port}/postgres`
  const sql = connect(url)
  cleanUp(t, () => sql.end())
  await waitFor(() => sql`select 1`.catch(() => null), { what: 'the standby to answer' })
  return { url, sql }
}

test('a connection that leads to a standby is used once, and kept once that is the primary', async (t) => {
  const { sql } = await startStandby(t)
  const backend = async () => (await sql<{ pid: number }[]>`select pg_backend_pid() as pid`)[0]?.pid
  assert.notEqual(await backend(), await backend())
  await sql`select pg_promote()`
  assert.equal(await backend(), await backend())
})

test('a service that starts with a standby says so, and waits until that is the primary', async (t) => {
  const { url, sql } = await startStandby(t)
  const program = runProgram(t, { env: testEnvironment(url) })
  const { err } = await program.logged('database.waiting')
  assert.equal((err as Error).message, 'the database is a standby, which only reads')
  await sql`select pg_promote()`
  await program.logged('service.ready')
})
