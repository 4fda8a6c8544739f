import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Line } from '../src/line.ts'

/** A line of these, with each one's place. */
function lineOf(...values: string[]) {
  const line = new Line<string>()
  return { line, places: values.map((value) => line.join(value)) }
}

test('who joins stands behind all others, and who leaves is missed by nobody', () => {
  for (const leaving of [[0], [1], [2], [0, 1], [2, 1], [0, 2], [1, 0, 2]]) {
    const { line, places } = lineOf('a', 'b', 'c')
    for (const nth of leaving) line.leave(places[nth]!)
    line.join('d')
    const expected = ['a', 'b', 'c'].filter((_, nth) => !leaving.includes(nth)).concat('d')
    assert.deepEqual([...line], expected, `${leaving} left`)
    assert.equal(line.size, expected.length)
  }
})

test('a place that was left already is not left again', () => {
  const { line, places } = lineOf('a', 'b')
  line.leave(places[0]!)
  line.leave(places[0]!)
  assert.deepEqual([...line], ['b'])
  assert.equal(line.size, 1)
})
