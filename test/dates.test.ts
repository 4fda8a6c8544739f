import assert from 'node:assert/strict'
import { suite, type TestContext, test } from 'node:test'
import { createClaim } from '../src/flow/claim-due.ts'
import { createAttempt } from './support/attempts.ts'
import { waitingForLocks } from './support/database.ts'
import { publishMany } from './support/deliveries.ts'
import { startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

async function start(t: TestContext) {
  const world = await startTenant(t, { mode: 'api' })
  const blocked = (query: string) => waitFor(() => waitingForLocks(world.sql, query), { what: 'it to wait' })
  return { ...world, blocked }
}

suite('what waits for others is dated after them', () => {
  for (const change of ['patch', 'rotate'] as const) {
    test(`a change of an endpoint: ${change}`, async (t) => {
      const { sql, tenant, blocked } = await start(t)
      const { endpoint_id: id } = await tenant.createEndpoint('http://127.0.0.1:9/')
      const answer = await sql.begin(async (other) => {
        await other`select from waybill.endpoints where endpoint_id = ${id} for no key update`
        const asked =
          change === 'patch'
            ? tenant.call('PATCH', `/v1/endpoints/${id}`, { body: { description: 'later' } })
            : tenant.call('POST', `/v1/endpoints/${id}/rotate-secret`)
        await blocked('%waybill.endpoints%')
        const [first] = await other<{ updated_at: Date }[]>`
          update waybill.endpoints set updated_at = clock_timestamp() where endpoint_id = ${id} returning updated_at`
        return { asked, first: first!.updated_at.toISOString() }
      })
      const { body } = await answer.asked
      assert.ok(body.updated_at >= answer.first, `${body.updated_at} is not before ${answer.first}`)
    })
  }

  test('a change of a tenant that has just been created', async (t) => {
    const { sql, service, blocked } = await start(t)
    const { asked } = await sql.begin(async (other) => {
      await other`select pg_advisory_xact_lock(hashtext('waybill.tenants'))`
      const asked = service.call('POST', '/v1/admin/tenants', {
        key: ADMIN_KEY,
        body: { tenant_id: 'new', tenant_slug: 'new' },
      })
      await blocked('%waybill.tenants%')
      await other`insert into waybill.tenants (tenant_id, tenant_slug, created_at, updated_at) values ('new', 'new', clock_timestamp(), clock_timestamp())`
      return { asked }
    })
    const { body } = await asked
    assert.ok(body.updated_at >= body.created_at, `${body.updated_at} is not before ${body.created_at}`)
    await sql`update waybill.tenants set updated_at = created_at - interval '1 hour' where tenant_id = 'new'`
    const again = await service.call('POST', '/v1/admin/tenants', {
      key: ADMIN_KEY,
      body: { tenant_id: 'new', tenant_slug: 'new' },
    })
    assert.ok(again.body.updated_at > body.created_at)
  })

  test('a release of what was published while it waited', async (t) => {
    const { sql, newSession, tenant, blocked } = await start(t)
    const receiver = await startReceiver(t)
    const ids: string[] = []
    for (const type of ['a', 'b'])
      ids.push(
        (await tenant.createEndpoint(receiver.url(), { subscribed_events: [type], max_per_second: 10 })).endpoint_id,
      )
    await tenant.publish('a')
    const releasing = await sql.begin(async (other) => {
      await other`select from waybill.endpoint_stats where endpoint_id = ${ids[0]!} for no key update`
      const released = newSession()`
        select * from waybill.release_held(array_fill(${tenant.tenantId}::text, array[2]), ${ids}::uuid[], array[0, 0], array[5, 5], '10 seconds')`.then(
        (rows) => rows.length,
      )
      await blocked('%release_held%')
      await tenant.publish('b')
      return { released }
    })
    assert.equal(await releasing.released, 2)
    const { body } = await tenant.call('GET', `/v1/deliveries?endpoint_id=${ids[1]}`)
    const [delivery] = body.data
    assert.ok(delivery.updated_at >= delivery.created_at, `${delivery.updated_at} is not before ${delivery.created_at}`)
    assert.ok(
      delivery.next_attempt_at >= delivery.created_at,
      `${delivery.next_attempt_at} is not before ${delivery.created_at}`,
    )
  })
})

test('an attempt is dated by the database’s clock, wherever this machine’s own stands', async (t) => {
  const { sql, tenant } = await start(t)
  await tenant.createEndpoint('http://127.0.0.1:9/')
  await publishMany(sql, tenant.tenantId, 1)
  const [claim] = (await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 1 })).send
  // As if it was an hour ahead.
  await createAttempt(sql)({ ...claim!, clockOffsetMs: claim!.clockOffsetMs + 3_600_000 }, 200)
  const [attempt] =
    await sql`select round(extract(epoch from started_at - now()) / 60)::int as minutes from waybill.attempts`
  assert.equal(attempt!.minutes, 60)
})
