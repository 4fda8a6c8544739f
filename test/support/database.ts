import { randomBytes } from 'node:crypto'
import type postgresTypes from 'postgres'
import { postgres } from '../../src/driver.ts'
import { cleanUp, type Scope } from './cleanup.ts'

/** The variable through which test/setup.ts tells the test files where its Postgres is. */
export const SERVER_URL = 'WAYBILL_TEST_SERVER'
export const TEMPLATE = 'waybill_template'
/** Long enough to be told from other words in a log. */
export const PASSWORD = 'test-database-password'

export type TestDatabase = { url: string; sql: postgresTypes.Sql }

/**
 * A database of the test's own, cloned from the migrated template (`template: null`: an empty one), and dropped
 * afterwards, whoever is still connected.
 */
export async function createDatabase(
  scope: Scope,
  { template = TEMPLATE as string | null } = {},
): Promise<TestDatabase> {
  const server = process.env[SERVER_URL]
  if (!server) throw new Error('no test database: run with --test-global-setup=test/setup.ts, as npm test does')
  const name = `test_${randomBytes(6).toString('hex')}`
  const admin = postgres(`${server}/postgres`, { max: 1, idle_timeout: 5, onnotice: () => {} })
  await admin.unsafe(`create database ${name} template ${template ?? 'template0'} strategy wal_log`)
  const url = `${server}/${name}`
  const sql = postgres(url, { max: 4, idle_timeout: 5, onnotice: () => {} })
  cleanUp(scope, async () => {
    await sql.end({ timeout: 1 })
    await admin.unsafe(`drop database ${name} with (force)`)
    await admin.end()
  })
  return { url, sql }
}
