import assert from 'node:assert/strict'

import { test } from 'node:test'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase } from './support/database.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService } from './support/service.ts'
import { listenTcp } from './support/tcp.ts'
import { waitFor } from './support/wait.ts'

const HOSTILE = 500

test('500 endpoints that never answer do not keep a healthy one waiting', async (t) => {
  const database = await createDatabase(t)
  const receiver = await startReceiver(t)
  const { port, sockets, close } = await listenTcp(() => {})
  cleanUp(t, close)
  const service = await startService(t, {
    databaseUrl: database.url,
    env: {
      MAX_ENDPOINTS: '1000',
      MAX_FANOUT_ENDPOINTS: '1000',
      RATE_LIMIT_ENDPOINTS_WRITE: '0',
      // None of them ends while we look.
      ATTEMPT_TIMEOUT_SECONDS: '300',
    },
  })
  const hostile = await createTenant(service)
  for (let n = 0; n < HOSTILE; n += 50) {
    const some = Array.from({ length: 50 }, (_, i) =>
      hostile.createEndpoint(`http://127.0.0.1:${port}/${n + i}`, { subscribed_events: ['trap'] }),
    )
    await Promise.all(some)
  }
  const healthy = await createTenant(service)
  await healthy.createEndpoint(receiver.url('/healthy'), { subscribed_events: ['tick'] })
  await healthy.call('POST', '/v1/events', { body: { event_type: 'tick', payload: { n: 0 } } })
  await receiver.until(1)

  const published = await hostile.call('POST', '/v1/events', { body: { event_type: 'trap', payload: {} } })
  assert.equal(published.body.delivery_ids.length, HOSTILE)
  await waitFor(() => sockets.length >= 50, { what: 'the worker to be caught' })
  for (let n = 1; n <= 40; n++) {
    await healthy.call('POST', '/v1/events', { body: { event_type: 'tick', payload: { n } } })
    await receiver.until(n + 1, { timeoutMs: 60_000 })
  }
  const ended = service.logs.filter((line) => line.msg === 'delivery.attempted' && line.tenant_id === hostile.tenantId)
  assert.deepEqual(ended, [], 'no hostile attempt had to end first')
})
