import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setImmediate as turn } from 'node:timers/promises'
import { startTakingBack } from '../../src/flow/take-back.ts'
import { createLog } from '../../src/log.ts'

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
  const deps = { pool: pool as never, wake: () => {}, log: createLog('silent') }
  const loop = startTakingBack(deps)
  t.after(loop.stop)
  for (; now < 20_000; now += 1000) {
    t.mock.timers.tick(1000)
    await turn()
  }
  assert.deepEqual(looks, [5000, 12_000, 18_000, 19_000])
})
