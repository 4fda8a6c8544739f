import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setImmediate as turn } from 'node:timers/promises'
import { createLeapWatch, startTakingBack } from '../../src/flow/take-back.ts'
import { createLog } from '../../src/log.ts'

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

test('nothing is taken back for five seconds after a start, after the database was away, and after its clock has leapt', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  let now = 0
  t.mock.method(performance, 'now', () => now)
  const looks: number[] = []
  const pool = Object.assign(async () => [{ now: new Date(now < 13_000 ? now : now + 60_000) }], {
    text: async () => {
      if (now === 6000 || now === 7000) throw new Error('no connection')
    },
    begin: async () => {
      looks.push(now)
      return []
    },
  })
  const deps = { pool: pool as never, boss: null as never, wake: () => {}, log: createLog('silent') }
  const loop = startTakingBack(deps)
  t.after(loop.stop)
  for (; now < 20_000; now += 1000) {
    t.mock.timers.tick(1000)
    await turn()
  }
  assert.deepEqual(looks, [5000, 12_000, 18_000, 19_000])
})
