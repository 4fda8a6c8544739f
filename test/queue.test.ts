import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { createDatabase } from './support/database.ts'

test('a job that publishing makes is the same row as one that pg-boss makes', async (t) => {
  const { sql } = await createDatabase(t)
  const [ours, theirs] = [randomUUID(), randomUUID()]
  const jobs = await sql.begin(async (tx) => {
    await tx`select waybill.enqueue_new(array['acme'], array[${ours}]::uuid[], array[2.5]::float8[], array[false])`
    const job = { id: theirs, priority: -2, data: { tenant_id: 'acme', tag: 2.5 } }
    // The very statement of pg-boss's insert(), captured when the queue was installed.
    await tx`select waybill.enqueue(${JSON.stringify([job])})`
    return await tx`select to_jsonb(j) - 'id' as row from pgboss.job j where id in (${ours}, ${theirs})`
  })
  assert.equal(jobs.length, 2)
  assert.deepEqual(jobs[0]?.row, jobs[1]?.row)
  assert.equal(jobs[0]?.row.priority, -2)
})

test('held deliveries get no job', async (t) => {
  const { sql } = await createDatabase(t)
  const ids = [randomUUID(), randomUUID()]
  await sql`select waybill.enqueue_new(array['acme', 'acme'], ${ids}::uuid[], array[1, 2]::float8[], array[true, false])`
  assert.deepEqual(
    (await sql`select id from pgboss.job where name = 'deliveries'`).map((row) => row.id),
    [ids[1]],
  )
})
