import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setImmediate as turn } from 'node:timers/promises'
import { DatabaseError } from 'pg'
import { startAnnouncing } from '../../src/flow/announce.ts'
import { createLog } from '../../src/log.ts'

test('of announcements that take too long half as many are told at once, until that is quick again', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const tooSlow = Object.assign(new DatabaseError('canceled', 8, 'error'), { code: '57014' })
  const asked: number[] = []
  const tell = async (_: unknown, most: number) => {
    asked.push(most)
    if (asked.length < 3) throw tooSlow
    return [{ told: asked.length < 5 ? most : 0 }]
  }
  const loop = startAnnouncing(tell as never, createLog('silent'))
  t.after(loop.stop)
  for (let failure = 1; failure < 3; failure++) {
    await turn()
    t.mock.timers.tick(500)
  }
  await turn()
  assert.deepEqual(asked, [100, 50, 25, 50, 100])
})
