import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { startDeadline } from '../../src/http/deadline.ts'

test('the steps of a request have four seconds together, not each', async () => {
  const began = performance.now()
  const inTime = startDeadline()
  assert.equal(await inTime(() => sleep(2500, 'done')), 'done')
  await assert.rejects(
    inTime(() => new Promise(() => {})),
    /has not answered in time/,
  )
  const took = performance.now() - began
  assert.ok(took >= 4000 && took < 6400, `${took} ms`)
})
