import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase, type TestDatabase } from './support/database.ts'
import { createTenant, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const LISTS = 40
const RARE = '/v1/deliveries?event_type=rare'

/** Keeps whoever reads the deliveries of the earliest day there is waiting, until the returned function is called. */
async function holdEarliestDay({ sql }: TestDatabase): Promise<() => Promise<unknown>> {
  const { promise: locked, resolve: lock } = Promise.withResolvers<void>()
  const { promise: released, resolve: release } = Promise.withResolvers<void>()
  const [day] = await sql<{ name: string }[]>`
    select min(inhrelid::regclass::text) as name from pg_inherits
    where inhparent = 'waybill.deliveries'::regclass and inhrelid <> 'waybill.deliveries_default'::regclass`
  const holding = sql.begin(async (tx) => {
    await tx`lock table ${tx.unsafe(day!.name)} in access exclusive mode`
    lock()
    await released
  })
  await locked
  return async () => {
    release()
    await holding
  }
}

test('a tenant’s lists that go through too much keep nobody else from publishing and reading, and are told so', async (t) => {
  const database = await createDatabase(t)
  const service = await startService(t, { databaseUrl: database.url, mode: 'api' })
  const [greedy, other] = [await createTenant(service), await createTenant(service)]
  await other.createEndpoint('http://127.0.0.1:9/')
  const today = `since=${new Date().toISOString().slice(0, 10)}T00:00:00Z`
  const release = await holdEarliestDay(database)
  const atWork = async () => {
    const [row] = await database.sql`
      select count(*)::int as n from pg_stat_activity
      where datname = current_database() and application_name like 'waybill%' and wait_event_type = 'Lock'`
    return row?.n
  }

  let answered = false
  const asked = Promise.all(Array.from({ length: LISTS }, () => greedy.call('GET', RARE))).finally(() => {
    answered = true
  })
  await waitFor(async () => (await atWork()) >= 2, { what: 'the lists to be at work' })
  for (let rounds = 0; !answered || rounds < 5; rounds++) {
    const { delivery_ids } = await other.publish('thing.happened')
    const { status, body } = await other.call('GET', `/v1/deliveries?event_type=thing.happened&${today}`)
    assert.equal(status, 200)
    assert.equal(body.data[0].delivery_id, delivery_ids[0])
    assert.equal((await other.call('GET', '/v1/endpoints')).status, 200)
    assert.ok((await atWork()) <= 4, 'half of the connections are left to others')
  }

  const answers = await asked
  const refused = answers.filter(({ status }) => status === 503)
  const givenUp = answers.filter(({ status }) => status === 400)
  assert.equal(refused.length + givenUp.length, LISTS)
  assert.ok(refused.length > 0)
  for (const { headers, body } of refused) {
    assert.equal(headers.get('retry-after'), '1')
    assert.deepEqual(body, { ok: false, error: 'service overloaded' })
  }
  const message = 'the list took too long to read: narrow it by since and until'
  assert.deepEqual(givenUp[0]?.body, { ok: false, error: 'invalid request', details: [{ path: 'since', message }] })
  assert.equal((await greedy.call('GET', `${RARE}&${today}`)).status, 200, 'it was narrowed')
  await release()
  assert.equal((await greedy.call('GET', RARE)).status, 200)
})
