import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createLeapWatch } from '../../src/flow/take-back.ts'

/** A watch, this process's clock, and the database's, which runs so many milliseconds ahead of it and is answered so late. */
function setUp() {
  let now = 0
  const hasLeapt = createLeapWatch(() => now)
  return (passedMs: number, aheadMs: number, lateMs = 0) => {
    const asked = now + passedMs
    now = asked + lateMs
    return hasLeapt(asked + aheadMs, asked)
  }
}

test('a clock that advances as time does has not leapt, however long nobody looked', () => {
  const look = setUp()
  assert.equal(look(0, 1e12), false, 'the first look has nothing to compare with')
  assert.equal(look(1000, 1e12), false)
  assert.equal(look(86_400_000, 1e12), false)
  assert.equal(look(1000, 1e12 + 3000), false, 'workers still touch what they hold in time')
})

test('a clock that is ahead by more than before has leapt, once', () => {
  const look = setUp()
  look(0, 0)
  assert.equal(look(1000, 3001), true)
  assert.equal(look(1000, 3001), false)
  assert.equal(look(1000, 6002), true)
})

test('an answer that was late makes no leap of the next one', () => {
  const look = setUp()
  look(0, 0)
  assert.equal(look(1000, 0, 50_000), false)
  assert.equal(look(1000, 0), false)
  assert.equal(look(1000, 3001), true)
})

test('a clock that was set back has leapt when it is put right', () => {
  const look = setUp()
  look(0, 0)
  assert.equal(look(1000, -3_600_000), false)
  assert.equal(look(1000, -3_600_000), false)
  assert.equal(look(1000, 0), true)
})
