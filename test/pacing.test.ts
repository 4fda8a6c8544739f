import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createTurns, limitPerTurn } from '../src/pacing.ts'

const nextTurn = () => new Promise(setImmediate)

test('in each turn of the event loop so many run, in order, and what comes meanwhile runs behind what waits', async () => {
  const run = limitPerTurn(2)
  const ran: number[] = []
  const ask = (n: number) => run(() => ran.push(n))
  for (let n = 1; n <= 5; n++) ask(n)
  assert.deepEqual(ran, [1, 2])
  await nextTurn()
  ask(6)
  assert.deepEqual(ran, [1, 2], 'the turn belongs to those that wait')
  await nextTurn()
  assert.deepEqual(ran, [1, 2, 3, 4])
  await nextTurn()
  assert.deepEqual(ran, [1, 2, 3, 4, 5, 6])
  await nextTurn()
  ask(7)
  assert.equal(ran.at(-1), 7, 'at once if nothing has run in this turn')
})

test('callers that await their turn go on in order, so many in each', async () => {
  const turn = createTurns(1)
  const ran: number[] = []
  const all = Promise.all([1, 2, 3].map((n) => turn().then(() => ran.push(n))))
  await nextTurn()
  assert.deepEqual(ran, [1])
  await all
  assert.deepEqual(ran, [1, 2, 3])
})
