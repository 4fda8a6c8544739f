import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase, lock, type TestDatabase, waitingForLocks } from './support/database.ts'
import { createTenant, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const LISTS = 40
const RARE = '/v1/deliveries?event_type=rare'

/**
 * Keeps whoever reads the events or deliveries of the earliest day there is waiting, until `release` is called. `id` is of
 * that day.
 */
async function holdEarliestDay({ sql }: TestDatabase) {
  const days = await sql<{ name: string; id: string }[]>`
    select distinct on (inhparent) oid::regclass::text as name, substring(pg_get_expr(relpartbound, oid) from $$'([0-9a-f-]{36})'$$) as id
    from pg_inherits join pg_class on oid = inhrelid
    where inhparent in ('waybill.events'::regclass, 'waybill.deliveries'::regclass) and relname not like '%default'
    order by inhparent, 1`
  const release = await lock(sql, `${days.map(({ name }) => name).join()} in access exclusive mode`)
  return { id: days[0]!.id, release }
}

test('a tenant’s lists that go through too much keep nobody else from publishing and reading, and are told so', async (t) => {
  const database = await createDatabase(t)
  const service = await startService(t, { databaseUrl: database.url, mode: 'api' })
  const [greedy, other] = [await createTenant(service), await createTenant(service)]
  await other.createEndpoint('http://127.0.0.1:9/')
  const today = `since=${new Date().toISOString().slice(0, 10)}T00:00:00Z`
  const { release } = await holdEarliestDay(database)
  const atWork = () => waitingForLocks(database.sql)

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

test('nor do reads of single events and deliveries, and of what belongs to one', async (t) => {
  const database = await createDatabase(t)
  const service = await startService(t, { databaseUrl: database.url, mode: 'api' })
  const [greedy, other] = [await createTenant(service), await createTenant(service)]
  const { id, release } = await holdEarliestDay(database)
  const paths = [
    `/v1/events/${id}`,
    `/v1/events/${id}/deliveries`,
    `/v1/deliveries/${id}`,
    `/v1/deliveries/${id}/attempts`,
  ]
  for (const path of paths) {
    let answered = false
    const asked = Promise.all(Array.from({ length: LISTS }, () => greedy.call('GET', path))).finally(() => {
      answered = true
    })
    await waitFor(async () => (await waitingForLocks(database.sql)) >= 2, { what: 'the reads to be at work' })
    let rounds = 0
    for (; !answered; rounds++) {
      await other.publish()
      assert.ok((await waitingForLocks(database.sql)) <= 4, 'half of the connections are left to others')
    }
    assert.ok(rounds > 1, 'publishing does not wait until they are given up')
    const refused = (await asked).filter(({ status }) => status === 503)
    assert.ok(refused.length > 0)
  }
  await release()
  for (const path of paths) assert.equal((await greedy.call('GET', path)).status, 404)
})

test('a tenant’s single delivery, endpoint and usage are looked up while others’ lists have all their turns', async (t) => {
  const database = await createDatabase(t)
  const service = await startService(t, { databaseUrl: database.url, mode: 'api' })
  const tenant = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/')
  const { delivery_ids } = await tenant.publish()
  // Made before: each list waits for a few seconds only, and all are to wait at once.
  const others = await Promise.all(Array.from({ length: 4 }, () => createTenant(service)))
  const { release } = await holdEarliestDay(database)
  let answered = false
  const lists = others.flatMap(({ call }) => Array.from({ length: LISTS }, () => call('GET', RARE)))
  const asked = Promise.all(lists).finally(() => {
    answered = true
  })
  await waitFor(async () => (await waitingForLocks(database.sql)) >= 7, { what: 'the lists to have their turns' })
  for (let rounds = 0; !answered || rounds < 3; rounds++)
    for (const path of [`deliveries/${delivery_ids[0]}`, `endpoints/${endpoint_id}`, 'usage/current'])
      assert.equal((await tenant.call('GET', `/v1/${path}`)).status, 200, path)
  await asked
  await release()
})
