import assert from 'node:assert/strict'
import { test } from 'node:test'
import { followClock } from '../../src/flow/database-clock.ts'

/** A clock that is followed, and runs so many milliseconds ahead of this process's and is answered so late. */
function setUp() {
  let now = 0
  const follow = followClock(() => now)
  return (passedMs: number, aheadMs: number, lateMs = 0) => {
    const asked = now + passedMs
    now = asked + lateMs
    return follow(asked + aheadMs, asked)
  }
}

test('a clock that advances as time does has not moved, however long nobody looked', () => {
  const look = setUp()
  assert.deepEqual(look(0, 1e12), { ahead: 1e12, moved: 0 }, 'the first look has nothing to compare with')
  assert.deepEqual(look(1000, 1e12), { ahead: 1e12, moved: 0 })
  assert.deepEqual(look(86_400_000, 1e12), { ahead: 1e12, moved: 0 })
})

test('a clock that is ahead by more than before has moved, once', () => {
  const look = setUp()
  look(0, 0)
  assert.deepEqual(look(1000, 3001), { ahead: 3001, moved: 3001 })
  assert.deepEqual(look(1000, 3001), { ahead: 3001, moved: 0 })
  assert.deepEqual(look(1000, 6002), { ahead: 6002, moved: 3001 })
})

test('an answer that was late moves nothing, nor does the next one', () => {
  const look = setUp()
  look(0, 0)
  assert.equal(look(1000, 0, 50_000).moved, 0)
  assert.equal(look(1000, 0).moved, 0)
  assert.equal(look(1000, 3001).moved, 3001)
})

test('a clock that was set back moves back, and again when it is put right', () => {
  const look = setUp()
  look(0, 0)
  assert.equal(look(1000, -3_600_000).moved, -3_600_000)
  assert.equal(look(1000, -3_600_000).moved, 0)
  assert.equal(look(1000, 0).moved, 3_600_000)
})
