import { execFile } from 'node:child_process'
import { writeFile } from 'node:fs/promises'
import { join } from 'node:path'
import { promisify } from 'node:util'
import type { Pool } from '../../src/db/open.ts'
import { connect } from '../../test/support/database.ts'
import { percentile } from '../percentile.ts'
import type { BenchDatabase } from './database.ts'
import { nowMicros } from './serve.ts'

// What the machine can do with no service in between: durable commits of one row of an event's size.

const INSERT = 'insert into rows (tenant_id, event_type, payload) values'

export type Commits = { tool: string; perSecond: number }

export async function makeTable(database: BenchDatabase): Promise<void> {
  const sql = connect(database.benchUrl)
  await sql`create table if not exists rows (
    tenant_id text not null, id uuid not null default gen_random_uuid(), event_type text not null, payload text not null,
    created_at timestamptz not null default now(), primary key (tenant_id, id))`
  await sql.end()
}

/** One row a transaction on `clients` connections at once, with pgbench where it is installed. */
export async function measureCommits(
  database: BenchDatabase,
  { clients, seconds, payloadBytes }: { clients: number; seconds: number; payloadBytes: number },
): Promise<Commits> {
  const script = join(database.directory, 'insert.sql')
  await writeFile(script, `${INSERT} ('bench', 'bench.one', '${'x'.repeat(payloadBytes)}');\n`)
  const options = ['-n', '-M', 'prepared', '-c', clients, '-j', 2, '-T', seconds, '-f', script]
  const server = ['-h', '127.0.0.1', '-p', database.port, '-U', 'waybill', 'bench']
  const env = { ...process.env, PGPASSWORD: database.password }
  const pgbench = promisify(execFile)('pgbench', [...options, ...server].map(String), { env })
  const { stdout } = await pgbench.catch(() => ({ stdout: '' }))
  const tps = /tps = ([\d.]+)/.exec(stdout)?.[1]
  if (tps !== undefined) return { tool: 'pgbench', perSecond: Number(tps) }

  const sql = connect(database.benchUrl, clients)
  const until = nowMicros() + seconds * 1e6
  let commits = 0
  await Promise.all(
    Array.from({ length: clients }, async () => {
      while (nowMicros() < until) {
        await insert(sql, payloadBytes)
        commits++
      }
    }),
  )
  await sql.end()
  return { tool: 'pg', perSecond: commits / seconds }
}

/** The median time in ms of one bare commit from one node client, nothing else going on. */
export async function measureOneCommit(database: BenchDatabase, count: number, payloadBytes: number): Promise<number> {
  const sql = connect(database.benchUrl)
  const times: number[] = []
  for (let nth = 0; nth < count + 50; nth++) {
    const begun = nowMicros()
    await insert(sql, payloadBytes)
    // The first ones warm the client up.
    if (nth >= 50) times.push(nowMicros() - begun)
  }
  await sql.end()
  return percentile(times, 0.5) / 1000
}

const insert = (sql: Pool, payloadBytes: number) =>
  sql`insert into rows (tenant_id, event_type, payload) values ('bench', 'bench.one', ${'x'.repeat(payloadBytes)})`
