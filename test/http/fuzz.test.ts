import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import fc from 'fast-check'
import { Pool } from 'undici'
import { type FuzzRequest, requests } from '../support/requests.ts'
import { ADMIN_KEY, startTenant } from '../support/service.ts'
import { checkAnswer } from '../support/validate.ts'

const UNLIMITED = {
  MAX_ENDPOINTS: '100000',
  MAX_FANOUT_ENDPOINTS: '10000',
  RATE_LIMIT_EVENTS_WRITE: '0',
  RATE_LIMIT_ENDPOINTS_WRITE: '0',
  RATE_LIMIT_DELIVERIES_REPLAY: '0',
  RATE_LIMIT_READ: '0',
}
const AT_ONCE = 32
const REQUESTS = 20_480

test(`${REQUESTS} requests made from the API’s description get answers that it describes, and no 5xx`, async (t) => {
  const { service, tenant } = await startTenant(t, { mode: 'api', env: UNLIMITED })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/', { subscribed_events: ['thing.happened'] })
  const { event_id, delivery_ids } = await tenant.publish()
  const pool = new Pool(service.url, { connections: AT_ONCE })
  t.after(() => pool.destroy())
  const keys = { own: tenant.key, admin: ADMIN_KEY, wrong: 'wb_live_wrong', none: undefined }
  const counts = new Map<number, number>()

  async function send(request: FuzzRequest, isFirst = true): Promise<void> {
    const { method, path, key, headers, body } = request
    const token = keys[key]
    const answer = await pool.request({
      method: method as 'GET',
      path,
      headers: { ...headers, ...(token && { authorization: `Bearer ${token}` }) },
      ...(body !== undefined && { body }),
    })
    const text = await answer.body.text()
    const { statusCode: status } = answer
    checkAnswer(method, path, { status, headers: new Headers(answer.headers as Record<string, string>), text })
    // Where the service stood still for a second, there was no room for so long: whoever comes back is served.
    if (status === 503 && isFirst) {
      await sleep(1000)
      return await send(request, false)
    }
    counts.set(status, (counts.get(status) ?? 0) + 1)
    assert.ok(status < 500, text)
  }

  const ids = { endpoint_id: [endpoint_id], event_id: [event_id], delivery_id: delivery_ids }
  const batch = fc.array(requests(ids), { minLength: AT_ONCE, maxLength: AT_ONCE })
  await fc.assert(
    fc.asyncProperty(batch, async (together) => {
      await Promise.all(together.map((request) => send(request)))
    }),
    { numRuns: REQUESTS / AT_ONCE, endOnFailure: true },
  )
  t.diagnostic(
    `answers: ${[...counts]
      .sort()
      .map(([status, count]) => `${count} × ${status}`)
      .join(', ')}`,
  )
  const sent = [...counts.values()].reduce((sum, count) => sum + count, 0)
  assert.equal(sent, REQUESTS)
  const fine = [...counts].filter(([status]) => status < 300).reduce((sum, [, count]) => sum + count, 0)
  assert.ok(fine > REQUESTS / 5, `only ${fine} requests were fine: the others test little but the refusals`)
  assert.deepEqual(
    service.logs.filter((line) => line.level === 'error'),
    [],
  )
})
