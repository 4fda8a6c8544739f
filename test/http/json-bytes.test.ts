import assert from 'node:assert/strict'
import { test } from 'node:test'
import { jsonBytes } from '../../src/http/json-bytes.ts'

const MIB = 1024 * 1024
const list = (data: unknown[]) => ({ ok: true, data, limit: 250, next_cursor: null })

test('an answer is written as JSON.stringify writes it, whatever is in its items and however many there are', async () => {
  const item = { text: '"data":[],é😀\u0001\\', at: new Date(), data: [1] }
  const lists = [0, 1, 2, 5000].map((length) => list(Array.from({ length }, () => item)))
  for (const value of [...lists, list(['x'.repeat(MIB)]), { ok: true }, { ok: true, data: { data: [item] } }])
    assert.equal((await jsonBytes(value)).toString(), JSON.stringify(value))
})

test('while large lists are written, the event loop turns for each 128 KiB of them at least', async () => {
  const items = Array.from({ length: 500 }, () => ({ response_body: '\u0001'.repeat(2048) }))
  let turns = 0
  let ended = false
  const count = () => {
    turns++
    if (!ended) setImmediate(count)
  }
  setImmediate(count)
  const written = await Promise.all([jsonBytes(list(items)), jsonBytes(list(items))])
  ended = true
  const bytes = written.reduce((sum, { length }) => sum + length, 0)
  assert.ok(bytes > 11 * MIB)
  assert.ok(turns > bytes / (MIB / 8), `${turns} turns for ${bytes} bytes`)
})

test('of long lists one is written at a time, and shorter ones beside it', async () => {
  const began: string[] = []
  const ended: string[] = []
  const write = async (name: string, count: number) => {
    const item = {
      toJSON() {
        began.push(name)
        return 'x'.repeat(MIB / 16)
      },
    }
    await jsonBytes(list(Array(count).fill(item)))
    ended.push(name)
  }
  await Promise.all([write('long', 200), write('longer', 300), write('short', 10)])
  assert.deepEqual(ended, ['short', 'long', 'longer'])
  assert.equal(began.slice(0, began.lastIndexOf('long')).filter((name) => name === 'longer').length, 16)
})
