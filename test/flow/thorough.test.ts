import assert from 'node:assert/strict'
import { test } from 'node:test'
import { DatabaseError } from 'pg'
import { createThoroughness } from '../../src/flow/thorough.ts'

/** Looks that take `tookMs` by a clock that the test moves, and answer, or fail with, `end`. */
function setUp() {
  let now = 0
  const run = createThoroughness(() => now)
  return {
    pass: (ms: number) => {
      now += ms
    },
    async look(tookMs: number, fail?: Error): Promise<boolean> {
      let wasThorough = false
      const looked = run(async (thorough) => {
        wasThorough = thorough
        now += tookMs
        if (fail) throw fail
        return 'found'
      })
      if (fail) await assert.rejects(looked, fail)
      else assert.equal(await looked, 'found')
      return wasThorough
    },
  }
}

const cancelled = Object.assign(new DatabaseError('canceling statement', 0, 'error'), { code: '57014' })

test('the first look is thorough, and while they are quick one a second', async () => {
  const { look, pass } = setUp()
  assert.equal(await look(1), true)
  pass(998)
  assert.equal(await look(1), false)
  assert.equal(await look(1), true)
})

for (const [how, fail] of [
  ['that are slow', undefined],
  ['that are cancelled for being slow', cancelled],
] as const)
  test(`thorough looks ${how} take a fiftieth of the time, from the second on`, async () => {
    const { look, pass } = setUp()
    const isNextAfter = async (ms: number) => {
      pass(ms - 1)
      assert.equal(await look(1), false)
    }
    assert.equal(await look(3000, fail), true)
    // It may have waited for a lock.
    await isNextAfter(7000)
    assert.equal(await look(3000, fail), true)
    await isNextAfter(147_000)
    assert.equal(await look(1), true)
    pass(999)
    assert.equal(await look(3000, fail), true)
    await isNextAfter(7000)
    assert.equal(await look(1), true)
  })

test('that the database is away says nothing about how slow a thorough look is', async () => {
  const { look, pass } = setUp()
  assert.equal(await look(3000, new Error('connection refused')), true)
  pass(1)
  assert.equal(await look(1), true)
})
