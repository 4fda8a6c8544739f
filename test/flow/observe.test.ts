import assert from 'node:assert/strict'
import { test } from 'node:test'
import { type Standing, wouldMove } from '../../src/flow/observe.ts'
import type { Result } from '../../src/flow/settle.ts'

const RULES = { failures: 10, seconds: 60, probeSeconds: 5, probeMaxSeconds: 300, cap: 50, disableAfterSeconds: 0 }
const OPEN: Standing = {
  tenant_id: 'acme',
  endpoint_id: 'one',
  held: 5,
  failure_streak: 50,
  failing_seconds: 600,
  breaker: 'open',
  ramp: null,
  failed_probes: 1,
  probing: 'the probe',
}

const moves = (deliveryId: string, ending: Result['ending'], endpointId = 'one') =>
  wouldMove(
    [OPEN],
    [
      {
        claim: { deliveryId, endpointId },
        outcome: ending === 'monthly_attempt_limit' ? null : {},
        ending,
        nextAttemptAt: null,
      } as Result,
    ],
    RULES,
  )

test('of what fails while a breaker is open the probe alone puts off the next one; whatever succeeds opens it half way', () => {
  assert.equal(moves('the probe', 'retrying'), true)
  assert.equal(moves('an older one', 'retrying'), false)
  assert.equal(moves('an older one', 'delivered'), true)
  assert.equal(moves('an older one', 'delivered', 'another'), false)
})

test('a probe that has not been made, as the month is used up, is due again; another delivery is none', () => {
  assert.equal(moves('the probe', 'monthly_attempt_limit'), true)
  assert.equal(moves('an older one', 'monthly_attempt_limit'), false)
})
