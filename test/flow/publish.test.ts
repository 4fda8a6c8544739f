import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createPublish } from '../../src/flow/publish.ts'
import { createDatabase } from '../support/database.ts'
import { NO_LIMITS } from '../support/deliveries.ts'

test('who publishes one event does not wait for all that another publishes', async (t) => {
  const { sql } = await createDatabase(t)
  for (const id of ['zeta', 'acme'])
    await sql`insert into waybill.tenants (tenant_id, tenant_slug) values (${id}, ${id})`
  const publish = createPublish(sql, NO_LIMITS)
  const order: string[] = []
  const publishOne = async (tenantId: string) => {
    const { outcome } = await publish({ tenantId, event: { type: 'a', payload: '{}', idempotencyKey: null } })
    assert.equal(outcome, 'accepted')
    order.push(tenantId)
  }
  const flood = Array.from({ length: 300 }, () => publishOne('zeta'))
  await publishOne('acme')
  assert.ok(order.length <= 100, `${order.length} before it`)
  await Promise.all(flood)
})
