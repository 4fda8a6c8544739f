import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { createAttempt } from './support/attempts.ts'
import { createDatabase, insertEndpoint, lock, waitingFor, waitingForLocks } from './support/database.ts'
import { NO_LIMITS, publishMany } from './support/deliveries.ts'
import { claim, startFailing } from './support/queue.ts'
import { waitFor } from './support/wait.ts'

type Claimed = { tenant_id: string; id: string; endpoint: string; bundle: string | null }

/** What has been published, claimed; the last comes first. */
async function claimAll(sql: Pool): Promise<Claimed[]> {
  await claim(sql, { thorough: true })
  return await sql<Claimed[]>`
    select tenant_id, delivery_id as id, endpoint_id as endpoint, bundle from waybill.deliveries order by delivery_id desc`
}

/** Six endpoints that are well, the last by id first, as their counters are stored: of two, every other order would be right by chance. */
async function insertSix(sql: Pool, held: boolean[] = []): Promise<string[]> {
  for (let nth = 0; nth < 6; nth++) await startFailing(sql, held)
  const stored = await sql<{ id: string }[]>`select endpoint_id as id from waybill.endpoint_stats order by 1 desc`
  for (const { id } of stored)
    await sql`update waybill.endpoint_stats set breaker = 'closed', next_probe_at = null, tag = 2e8 where endpoint_id = ${id}`
  return stored.map(({ id }) => id)
}

async function holdSix(sql: Pool) {
  await insertSix(sql, [false])
  const claims = await claimAll(sql)
  return () => sql`
    select waybill.hold_claims(${claims.map((c) => c.tenant_id)}::text[], ${claims.map(({ id }) => id)}::uuid[],
      ${claims.map(({ endpoint }) => endpoint)}::uuid[], ${claims.map(({ bundle }) => bundle)}::uuid[], ${claims.map(() => 0)}::int[], false)`
}

/** What wants several rows, by the table and column whose order it has to keep; `prepare` resolves with what is to wait. */
const CASES: Record<string, [table: string, column: string, prepare: (sql: Pool) => Promise<() => Promise<unknown>>]> =
  {
    'what is released': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        const endpoints = await insertSix(sql, [true])
        return () => sql`
        select from waybill.release_held(${endpoints.map(() => 'acme')}::text[], ${endpoints}::uuid[], ${endpoints.map(() => 0)}::int[],
          ${endpoints.map(() => 50)}::int[], interval '25 seconds')`
      },
    ],
    'what is counted as held': ['waybill.endpoint_stats', 'endpoint_id', holdSix],
    'what becomes held': ['waybill.deliveries', 'delivery_id', holdSix],
    'what is counted by status': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        const endpoints = await insertSix(sql)
        return () => sql`
        select waybill.count_deliveries(${endpoints.map(() => 'acme')}::text[], ${endpoints}::uuid[],
          ${endpoints.map(() => 'pending')}::waybill.delivery_status[], ${endpoints.map(() => 1)}::int[])`
      },
    ],
    'what is published': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        await insertSix(sql)
        return () => publishMany(sql, 'acme', 1)
      },
    ],
    'what is published alone': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        await insertSix(sql)
        return () => sql`
        select from waybill.publish_plain('acme', '{a}', array['{}'], array[null]::text[], ${JSON.stringify(NO_LIMITS)})`
      },
    ],
    'what is published, and held for all but the first,': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        const first = (await insertSix(sql)).at(-1) as string
        await sql`update waybill.endpoints set ordered = endpoint_id <> ${first}`
        return () => publishMany(sql, 'acme', 1)
      },
    ],
    'what is recorded': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        await insertSix(sql, [false])
        return () => sql`
        select waybill.record_lost(array_agg(tenant_id), array_agg(delivery_id), array_agg(endpoint_id), array_agg('http://x'::text), array_agg(1),
          array_agg(0), array_agg(status), false) from (select * from waybill.deliveries order by delivery_id desc) d`
      },
    ],
    'what is claimed': [
      'waybill.usage',
      'tenant_id',
      async (sql) => {
        for (const tenant of ['zeta', 'acme']) {
          await insertEndpoint(sql, { tenant })
          await publishMany(sql, tenant, 1)
        }
        await sql`insert into waybill.usage select tenant_id, month, 'attempts', 0 from waybill.usage`
        await sql`delete from waybill.usage where metric = 'events'`
        return () => claim(sql, { thorough: true })
      },
    ],
    'what is taken off the month': [
      'waybill.usage',
      'tenant_id',
      async (sql) => {
        await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('zeta', 'zeta'), ('acme', 'acme')`
        await sql`
        insert into waybill.usage (tenant_id, month, metric, count)
        select tenant_id, date_trunc('month', now() at time zone 'utc')::date, 'attempts', 5 from waybill.tenants`
        return () => sql`select waybill.refund_attempts('{zeta,acme}')`
      },
    ],
    'what is announced': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        await insertSix(sql)
        await sql`update waybill.endpoints set subscribed_events = '{endpoint.disabled}'`
        await sql`select waybill.announce('acme', gen_random_uuid(), 'endpoint.disabled', '{}')`
        return () => sql`select waybill.publish_announcements(10)`
      },
    ],
    'what is set back': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        await insertSix(sql)
        await sql`update waybill.queue_clock set tag = 2e8`
        return () => sql`select waybill.rebase_queue()`
      },
    ],
    'what is gathered': [
      'waybill.endpoint_stats',
      'endpoint_id',
      async (sql) => {
        await insertSix(sql)
        return () => sql`select waybill.gather_strays()`
      },
    ],
    'what leaves bundles': [
      'pgboss.job',
      'id',
      async (sql) => {
        const claims = await claimBundles(sql)
        return () => sql`
        select waybill.finish_claims(${claims.map(({ id }) => id)}::uuid[], ${claims.map(({ bundle }) => `${bundle}:0`)}::text[])`
      },
    ],
    'what gets jobs of its own': [
      'pgboss.job',
      'id',
      async (sql) => {
        const claims = await claimBundles(sql)
        return () => sql`
        select waybill.unbundle(${claims.map((c) => c.tenant_id)}::text[], ${claims.map(({ bundle }) => bundle)}::uuid[],
          ${claims.map(({ id }) => id)}::uuid[], true)`
      },
    ],
    'what is recorded as not made': [
      'pgboss.job',
      'id',
      async (sql) => {
        await insertEndpoint(sql)
        for (let nth = 0; nth < 6; nth++) await publishMany(sql, 'acme', 1)
        const { send } = await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 100 })
        const attempt = createAttempt(sql)
        return () => Promise.all(send.toReversed().map((claim) => attempt(claim, null)))
      },
    ],
    'what is recorded, if some have failed': [
      'pgboss.job',
      'id',
      async (sql) => {
        await insertSixBundles(sql)
        const { send } = await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 100 })
        const attempt = createAttempt(sql)
        const [last, ...others] = send.toSorted((one, other) => (one.bundle! < other.bundle! ? 1 : -1))
        return () => Promise.all([attempt(last!, 503), ...others.map((claim) => attempt(claim, 410))])
      },
    ],
  }

/** Six bundles, claimed; the last comes first. */
async function claimBundles(sql: Pool): Promise<Claimed[]> {
  await insertSixBundles(sql)
  return await claimAll(sql)
}

async function insertSixBundles(sql: Pool): Promise<void> {
  await insertEndpoint(sql)
  for (let nth = 0; nth < 6; nth++) await publishMany(sql, 'acme', 2)
}

for (const [what, [table, column, prepare]] of Object.entries(CASES))
  test(`${what} has none of several ${table.split('.')[1]} locked while it waits for the first, or two could wait for each other`, async (t) => {
    const { sql, newSession } = await createDatabase(t)
    const call = await prepare(sql)
    const rows = () => sql.text(`select ${column} from ${table} order by ${column} for update skip locked`)
    const all = (await rows()).length
    assert.ok(all > 1)
    let waiting: Promise<unknown> | undefined
    const free = await newSession().begin(async (other) => {
      await other.text(
        `select from ${table} where ${column} = (select min(${column}::text) from ${table})::${column === 'tenant_id' ? 'text' : 'uuid'} for update`,
      )
      waiting = call()
      await waitFor(async () => (await waitingForLocks(sql)) > 0, { what: 'it to wait' })
      return (await rows()).length
    })
    await waiting
    assert.equal(free, all - 1)
  })

test('who publishes to an ordered endpoint has no counters while waiting for the tables', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await insertEndpoint(sql, { ordered: true })
  await publishMany(sql, 'acme', 1)
  // As waybill.rebase_queue does, which then wants the counters.
  const unlock = await lock(newSession(), 'only waybill.deliveries in share row exclusive mode')
  const publishing = publishMany(sql, 'acme', 1)
  await waitFor(async () => (await waitingFor(sql, 'waybill.deliveries')) > 0, { what: 'it to wait' })
  for (const counters of ['usage', 'endpoint_stats'])
    assert.equal((await sql.text(`select from waybill.${counters} for update skip locked`)).length, 1, counters)
  await unlock()
  await publishing
})
