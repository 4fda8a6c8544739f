import assert from 'node:assert/strict'
import { suite, test } from 'node:test'
import { type Breaker, type BreakerRules, type Evidence, nextBreaker } from '../../src/flow/breaker.ts'

const RULES: BreakerRules = { failures: 10, seconds: 60, probeSeconds: 5, probeMaxSeconds: 300, cap: 50 }
const CLOSED: Breaker = { state: 'closed', ramp: null, failedProbes: 0, probeInSeconds: null }
const NOTHING: Evidence = {
  successes: 0,
  probeFailed: false,
  probeUnmade: false,
  failureStreak: 0,
  failingSeconds: 0,
  held: 100,
}

const after = (now: Partial<Breaker>, seen: Partial<Evidence>) =>
  nextBreaker({ ...CLOSED, ...now }, { ...NOTHING, ...seen }, RULES)

suite('the breaker', () => {
  test('stays closed until there are enough failures in a row and they span long enough', () => {
    assert.equal(after({}, { failureStreak: 9, failingSeconds: 600 }).state, 'closed')
    assert.equal(after({}, { failureStreak: 500, failingSeconds: 59 }).state, 'closed')
    assert.deepEqual(after({}, { failureStreak: 10, failingSeconds: 60 }), {
      state: 'open',
      ramp: null,
      failedProbes: 0,
      probeInSeconds: 5,
    })
  })

  test('waits twice as long after each probe that failed, up to the maximum', () => {
    let breaker: Breaker = { ...CLOSED, state: 'open' }
    const waits = Array.from({ length: 8 }, () => {
      breaker = nextBreaker(breaker, { ...NOTHING, probeFailed: true }, RULES)
      return breaker.probeInSeconds
    })
    assert.deepEqual(waits, [10, 20, 40, 80, 160, 300, 300, 300])
    assert.equal(after({ state: 'open', failedProbes: 5000 }, { probeFailed: true }).probeInSeconds, 300)
  })

  test('does not move while open for a failure that was no probe', () => {
    const open: Breaker = { ...CLOSED, state: 'open', failedProbes: 3 }
    assert.deepEqual(after(open, { failureStreak: 50 }), open)
  })

  test('opens half way on a success, grows by what succeeds, and closes beyond the cap, or when nothing is held', () => {
    const first = after({ state: 'open', failedProbes: 4 }, { successes: 1 })
    assert.deepEqual(first, { state: 'half_open', ramp: 2, failedProbes: 4, probeInSeconds: null })
    const second = after(first, { successes: 2 })
    assert.equal(second.ramp, 4)
    assert.equal(after(second, { successes: 4 }).ramp, 8)
    const last = after({ ...second, ramp: 49 }, { successes: 49 })
    assert.equal(last.ramp, 50)
    assert.deepEqual(after(last, { successes: 1 }), CLOSED)
    assert.deepEqual(after(last, { failureStreak: 1 }), last)
    assert.deepEqual(after(second, { successes: 1, held: 0 }), CLOSED)
    assert.deepEqual(after({ state: 'open', failedProbes: 4 }, { successes: 1, held: 0 }), CLOSED)
  })

  test('forgives a stray failure half way, and opens again after three in a row, with a longer wait', () => {
    const half: Breaker = { state: 'half_open', ramp: 8, failedProbes: 2, probeInSeconds: null }
    assert.deepEqual(after(half, { failureStreak: 1 }), half)
    assert.deepEqual(after(half, { failureStreak: 1, held: 0 }), half, 'though nothing waits for it any more')
    assert.equal(after(half, { successes: 1, failureStreak: 0 }).ramp, 9)
    const again = after(half, { failureStreak: 3 })
    assert.deepEqual(again, { state: 'open', ramp: null, failedProbes: 3, probeInSeconds: 40 })
    assert.deepEqual(after({ ...half, ramp: 50 }, {}), { ...half, ramp: 50 }, 'nor does what tells nothing close it')
  })
})
