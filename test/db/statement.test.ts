import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { assignments, fragment, identifier, join, textList } from '../../src/db/statement.ts'
import { createDatabase } from '../support/database.ts'

test('lists arrive as they are, whatever stands in them', async (t) => {
  const { sql } = await createDatabase(t)
  const texts = fc.array(fc.option(fc.string({ unit: 'binary' }).map((text) => text.replaceAll('\0', '"\\{},NULL '))))
  await fc.assert(
    fc.asyncProperty(texts, async (list) => {
      const [row] = await sql`select ${list}::text[] as escaped, ${textList(list)}::text[] as as_kept`
      assert.deepEqual(row, { escaped: list, as_kept: list })
    }),
  )
  const other = {
    flags: [true, false, null],
    moments: [new Date(0), null],
    bytes: [Buffer.from([0, 255]), null],
    none: [],
  }
  const [row] = await sql`
    select ${other.flags}::boolean[] as flags, ${other.moments}::timestamptz[] as moments, ${other.bytes}::bytea[] as bytes, ${other.none}::uuid[] as none`
  assert.deepEqual(row, other)
})

test('a parameter that is undefined is refused, and what is put together keeps its order', async (t) => {
  const { sql } = await createDatabase(t)
  const absent = undefined as unknown as null
  await assert.rejects(sql`select ${absent}`, TypeError)
  await assert.rejects(sql`select ${['there', absent]}::text[]`, TypeError)
  const conditions = join([fragment`n > ${1}`, fragment`n < ${5}`], ' and ')
  const rows = await sql<{ n: number }[]>`
    select n from generate_series(${0}::int, ${9}::int) as ${identifier('odd "name"')} (n) where ${conditions} and n <> ${3}`
  assert.deepEqual(
    rows.map(({ n }) => n),
    [2, 4],
  )
  await sql`create table things (id int, "a ""name""" text, kept text)`
  await sql`insert into things values (1, 'before', 'kept')`
  const [changed] = await sql`
    update things set ${assignments({ 'a "name"': 'after', kept: undefined })} where id = ${1} returning *`
  assert.deepEqual(changed, { id: 1, 'a "name"': 'after', kept: 'kept' })
})
