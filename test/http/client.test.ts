import assert from 'node:assert/strict'
import { after, describe, test } from 'node:test'
import { apiClient } from '../support/client.ts'
import { createDatabase } from '../support/database.ts'
import { startReceiver } from '../support/receiver.ts'
import { ADMIN_KEY, startService } from '../support/service.ts'
import { waitFor } from '../support/wait.ts'

const database = await createDatabase({ after })
const service = await startService({ after }, { databaseUrl: database.url })
const receiver = await startReceiver({ after })

/** The body of a success; fails with the error's text otherwise. */
function sent<Data, Failure>(answer: { data?: Data; error?: Failure }): NonNullable<Data> {
  assert.ok(answer.data, JSON.stringify(answer.error))
  return answer.data
}

describe('a client that was generated from the API’s description', () => {
  test('does all that a tenant and an operator can do', async () => {
    const operator = apiClient(service, ADMIN_KEY)
    const limits = { monthly_events: 100 }
    const made = sent(
      await operator.POST('/v1/admin/tenants', { body: { tenant_id: 'acme', tenant_slug: 'acme', limits } }),
    )
    assert.equal(made.created, true)
    assert.deepEqual(made.limits, limits)
    const again = sent(
      await operator.POST('/v1/admin/tenants', { body: { tenant_id: 'acme', tenant_slug: 'acme-inc' } }),
    )
    assert.deepEqual([again.created, again.tenant_slug, again.limits], [false, 'acme-inc', limits])
    assert.ok(again.updated_at >= made.updated_at)
    assert.equal(again.created_at, made.created_at)
    const key = sent(await operator.POST('/v1/admin/api-keys', { body: { tenant_id: 'acme', name: 'billing' } }))
    assert.match(key.api_key, /^wb_live_[A-Za-z0-9_-]{43}$/)

    const client = apiClient(service, key.api_key)
    const body = { url: receiver.url('/hook'), subscribed_events: ['invoice.paid'], description: 'Billing' }
    const endpoint = sent(await client.POST('/v1/endpoints', { body }))
    assert.match(endpoint.signing_secret, /^whsec_[A-Za-z0-9+/]{43}=$/)
    const path = { endpoint_id: endpoint.endpoint_id }
    const event = { event_type: 'invoice.paid', payload: { invoice_id: 'inv_1', amount: 4200 } }
    const header = { 'idempotency-key': 'inv_1-paid' }
    const published = await client.POST('/v1/events', { body: event, params: { header } })
    assert.equal(published.response.status, 202)
    const { event_id, delivery_ids, endpoint_count } = sent(published)
    assert.equal(endpoint_count, 1)
    const repeated = await client.POST('/v1/events', { body: event, params: { header } })
    assert.equal(repeated.response.status, 200)
    assert.equal(repeated.response.headers.get('Idempotent-Replayed'), 'true')
    assert.deepEqual(sent(repeated), sent(published))

    await receiver.until(1, { path: '/hook' })
    const delivery = { delivery_id: delivery_ids[0] ?? '' }
    const found = await waitFor(async () => {
      const current = sent(await client.GET('/v1/deliveries/{delivery_id}', { params: { path: delivery } }))
      return current.status === 'delivered' ? current : null
    })
    assert.deepEqual([found.last_status_code, found.dead_letter_reason, found.attempt_count], [200, null, 1])
    const attempts = sent(await client.GET('/v1/deliveries/{delivery_id}/attempts', { params: { path: delivery } }))
    assert.deepEqual(
      attempts.data.map((attempt) => [attempt.attempt_number, attempt.retry_state]),
      [[1, 'succeeded']],
    )
    const stored = sent(await client.GET('/v1/events/{event_id}', { params: { path: { event_id } } }))
    assert.deepEqual(stored.payload, event.payload)
    const ofEvent = sent(await client.GET('/v1/events/{event_id}/deliveries', { params: { path: { event_id } } }))
    const { ok, ...record } = found
    assert.equal(ok, true)
    assert.deepEqual(ofEvent.data, [record])
    assert.equal(
      sent(await client.POST('/v1/deliveries/{delivery_id}/replay', { params: { path: delivery } })).delivery_id,
      delivery.delivery_id,
    )
    await receiver.until(2, { path: '/hook' })

    const health = await waitFor(async () => {
      const current = sent(await client.GET('/v1/endpoints/{endpoint_id}/health', { params: { path } }))
      return current.attempts === 2 ? current : null
    })
    assert.deepEqual([health.success_rate, health.window_hours], [1, 24])
    const rotated = sent(await client.POST('/v1/endpoints/{endpoint_id}/rotate-secret', { params: { path } }))
    assert.notEqual(rotated.signing_secret, endpoint.signing_secret)
    const overlap = Date.parse(rotated.previous_secret_expires_at) - Date.parse(rotated.updated_at)
    assert.ok(Math.abs(overlap - 86_400_000) <= 1, `${overlap}`)
    const changed = sent(
      await client.PATCH('/v1/endpoints/{endpoint_id}', { params: { path }, body: { is_active: false } }),
    )
    assert.equal(changed.is_active, false)
    const active = sent(await client.GET('/v1/endpoints', { params: { query: { active_only: true, limit: 10 } } }))
    assert.deepEqual(active.data, [])
    assert.deepEqual(sent(await client.GET('/v1/endpoints/{endpoint_id}', { params: { path } })), changed)

    const query = { status: 'delivered' as const, event_type: 'invoice.paid', ...path, limit: 1 }
    assert.equal(sent(await client.GET('/v1/deliveries', { params: { query } })).data.length, 1)
    assert.deepEqual(sent(await client.GET('/v1/dlq')).data, [])
    const metrics = sent(await client.GET('/v1/metrics/summary'))
    assert.deepEqual(metrics.deliveries_by_status, { pending: 0, retrying: 0, delivered: 1, dead_lettered: 0 })
    assert.deepEqual(metrics.endpoint_counts, { total: 1, active: 0, inactive: 1 })
    const usage = sent(await client.GET('/v1/usage/current'))
    assert.deepEqual([usage.events_count, usage.attempts_count], [1, 2])
    assert.equal(usage.month, usage.period_start.slice(0, 7))
    assert.equal(sent(await client.GET('/v1/usage/limits')).monthly.events, 100)
    assert.equal(sent(await client.GET('/v1/safety/limits')).protections.ssrf_protection, true)
    const retention = sent(await operator.POST('/v1/admin/retention/run', { body: { apply: false } }))
    assert.deepEqual([retention.applied, retention.events], [false, 0])
    assert.equal(sent(await client.GET('/health')).database, 'ok')
  })

  test('tells errors apart by their types', async () => {
    const { error } = await apiClient(service, 'wb_live_x').POST('/v1/events', {
      body: { event_type: 'a', payload: {} },
    })
    assert.ok(error)
    // Each case is a type of its own: its details are known to the compiler.
    switch (error.error) {
      case 'invalid API key':
        break
      case 'rate limit exceeded':
        assert.fail(`after ${error.details.retry_after_seconds} s`)
        break
      case 'idempotency key already used with a different payload':
        assert.fail(error.details.event_id)
        break
      default:
        assert.fail(error.error)
    }
  })
})
