import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { ClaimedJob } from '../../src/flow/claim.ts'
import { createInHand } from '../../src/flow/in-hand.ts'
import { createLog } from '../../src/log.ts'

test('as many as there are slots wait without one, and who is under way has one until it is let go', () => {
  const pool = null as never // Nothing is put away here.
  const inHand = createInHand({ pool, slots: 2, closing: new AbortController().signal, log: createLog('silent') })
  const slots = new Set<object>()
  const takeSlot = () => {
    const slot = {}
    slots.add(slot)
    return () => void slots.delete(slot)
  }
  const [started, ...waiting] = Array.from({ length: 4 }, (_, nth): ClaimedJob => {
    const id = String(nth)
    const claim = {
      tenantId: 'acme',
      deliveryId: id,
      endpointId: 'one',
      job: { id, retryCount: 0 },
      bundle: null,
      claimedAtMs: 0,
      hand: null,
    }
    inHand.take(claim, takeSlot)
    if (nth === 0) inHand.takeSlot(claim)
    else inHand.wait(claim)
    return claim
  }) as [ClaimedJob, ...ClaimedJob[]]
  assert.equal(slots.size, 2, 'the one that is under way, and the third that waits')

  inHand.answered(started)
  for (const claim of waiting) inHand.takeSlot(claim)
  assert.equal(slots.size, 3, 'each that waited is under way now')
  inHand.letGo([started, ...waiting])
  assert.equal(slots.size, 0)
  assert.deepEqual(inHand.all(), [])
})
