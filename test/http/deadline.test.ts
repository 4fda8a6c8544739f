import assert from 'node:assert/strict'
import { once } from 'node:events'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { Worker } from 'node:worker_threads'
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

test('what takes no longer than the process stood still, and a moment, is not late', async (t) => {
  const worker = new Worker(
    `const { parentPort } = require('node:worker_threads')
    parentPort.on('message', () => setTimeout(() => parentPort.postMessage('done'), 4700))`,
    { eval: true },
  )
  t.after(() => worker.terminate())
  // Timers come next, before anything is read.
  await new Promise((resolve) => setImmediate(resolve))
  const inTime = startDeadline()
  const step = inTime(async () => {
    worker.postMessage('begin')
    return await once(worker, 'message')
  })
  const began = performance.now()
  while (performance.now() < began + 4500);
  assert.deepEqual(await step, ['done'])
})
