import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase } from './support/database.ts'
import { assertBooks } from './support/lanes.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const LOST = 'worker_lost'

test('what lost its worker is due at once; what loses one after the other waits, and is dead-lettered after the fifth', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const api = await startService(t, { databaseUrl, mode: 'api', env: { RETRY_DELAY_SECONDS: '60' } })
  const tenant = await createTenant(api)
  await tenant.createEndpoint(receiver.url('/hook'))
  const cases = {
    'in the hands of a worker': { claims: 1, failures: 0, silentSeconds: -300 },
    'lost once': { claims: 1, failures: 0, silentSeconds: 11 },
    'lost twice': { claims: 2, failures: 0, silentSeconds: 11 },
    'lost 3 times': { claims: 3, failures: 0, silentSeconds: 11 },
    'lost 5 times': { claims: 5, failures: 0, silentSeconds: 11 },
    'failed 5 times, then lost': { claims: 6, failures: 5, silentSeconds: 11 },
  }
  const ids: Record<string, string> = {}
  for (const [name, { claims, failures, silentSeconds }] of Object.entries(cases)) {
    const [id] = (await tenant.publish(name.replaceAll(/\W+/g, '-'))).delivery_ids
    ids[name] = id!
    // As if workers had claimed it so often, had recorded some of the attempts, and were gone.
    await sql`
      update pgboss.job set state = 'active', started_on = now(), retry_count = ${claims - 1},
        heartbeat_on = now() - ${silentSeconds} * interval '1 second' where name = 'deliveries' and id = ${id!}`
    await sql`
      insert into waybill.attempts (tenant_id, delivery_id, endpoint_id, url, attempt_number, status_code, error, response_truncated, duration_ms, retry_state, started_at)
      select tenant_id, delivery_id, endpoint_id, 'http://x', n, 500, 'http_status', false, 1, 'will_retry', now()
      from waybill.deliveries, generate_series(1, ${failures}::int) n where delivery_id = ${id!}`
    await sql`update waybill.deliveries set attempt_count = ${failures} where delivery_id = ${id!}`
  }

  const worker = await startService(t, { databaseUrl, mode: 'worker', env: { RETRY_DELAY_SECONDS: '60' } })
  const attemptsOf = async (name: string) => {
    const rows = (await tenant.call('GET', `/v1/deliveries/${ids[name]}/attempts`)).body.data
    return rows.map((row: { status_code: number; error: string }) => row.status_code ?? row.error)
  }
  const becomes = (name: string, status: string) =>
    waitFor(async () => (await tenant.call('GET', `/v1/deliveries/${ids[name]}`)).body.status === status, {
      what: `what was ${name} to be ${status}`,
    })
  for (const name of ['lost once', 'lost twice', 'failed 5 times, then lost']) await becomes(name, 'delivered')
  assert.deepEqual(await attemptsOf('lost once'), [LOST, 200])
  assert.deepEqual(await attemptsOf('lost twice'), [LOST, LOST, 200])
  assert.deepEqual(await attemptsOf('failed 5 times, then lost'), [500, 500, 500, 500, 500, LOST, 200])
  await becomes('lost 5 times', 'dead_lettered')
  assert.deepEqual(await attemptsOf('lost 5 times'), [LOST, LOST, LOST, LOST, LOST])

  const jobOf = async (name: string) =>
    (
      await sql`
        select state, retry_count, start_after > now() + interval '1 minute' as waits
        from pgboss.job where name = 'deliveries' and id = ${ids[name]!}`
    )[0]
  assert.deepEqual({ ...(await jobOf('lost 3 times')) }, { state: 'retry', retry_count: 2, waits: true })
  const { next_attempt_at } = (await tenant.call('GET', `/v1/deliveries/${ids['lost 3 times']}`)).body
  assert.ok(Date.parse(next_attempt_at) > Date.now() + 60_000, 'its record says when it is due')
  assert.equal(receiver.receipts.length, 3)
  await worker.kill()
  await assertBooks(sql)
})
