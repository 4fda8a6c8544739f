import assert from 'node:assert/strict'
import { test } from 'node:test'
import { DatabaseError } from 'pg'
import { insist } from '../../src/flow/insist.ts'

const refused = new DatabaseError('no', 2, 'error')
refused.code = '22003'

test('what the database cannot take now is tried until it can, and what it refuses, or is a fault of ours, is given up', async (t) => {
  let ahead = 0
  const now = performance.now.bind(performance)
  t.mock.method(performance, 'now', () => now() + ahead)
  const failing = (error: Error) => {
    let tries = 0
    return async () => {
      ahead += 40_000
      if (++tries < 3) throw error
      return tries
    }
  }
  const told: unknown[] = []
  const full = new Error('could not extend file')
  assert.equal(await insist(failing(full), (error) => told.push(error)), 3)
  assert.deepEqual(told, [full])
  for (const fault of [refused, new TypeError('ours'), new RangeError('ours')])
    await assert.rejects(
      insist(failing(fault), () => {}),
      fault,
    )
  await assert.rejects(
    insist(failing(full), () => {}, { forMs: 60_000 }),
    full,
  )
  await assert.rejects(
    insist(failing(full), () => {}, { signal: AbortSignal.abort() }),
    full,
  )
})
