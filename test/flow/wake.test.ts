import assert from 'node:assert/strict'
import { test } from 'node:test'
import { startReceiver } from '../support/receiver.ts'
import { startService, startTenant } from '../support/service.ts'

test('what is published is sent at once, by a worker in another process that had nothing to do', async (t) => {
  const receiver = await startReceiver(t)
  const { databaseUrl, tenant } = await startTenant(t, { mode: 'api' })
  await startService(t, { databaseUrl, mode: 'worker' })
  await tenant.createEndpoint(receiver.url('/hook'))
  const waits: number[] = []
  for (let round = 1; round <= 6; round++) {
    const begun = performance.now()
    await tenant.publish()
    await receiver.until(round)
    waits.push(performance.now() - begun)
  }
  // The machine may stand still for a moment, but not each time; a worker that is not woken looks every half second, from when it
  // sent the one before.
  assert.ok(Math.min(...waits.slice(1)) < 250, `it took ${waits.join(', ')} ms`)
})
