import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import type { Claim, Kind } from '../../src/flow/claim.ts'
import { createClaim } from '../../src/flow/claim-due.ts'
import { createAttempt } from '../support/attempts.ts'
import { createDatabase, insertEndpoint } from '../support/database.ts'
import { assertBooks, publishMany } from '../support/deliveries.ts'

type Claims = [Claim, Claim, Claim, Claim, Claim, Claim, Claim]

/** Seven claims of one endpoint; the last has a job of its own, the others share one if they are `together`. */
async function start(t: TestContext, together: boolean) {
  const { sql, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  for (let left = 6; left > 0; left -= together ? 6 : 1) await publishMany(sql, 'acme', together ? 6 : 1)
  await publishMany(sql, 'acme', 1)
  const pool = openPool({ max: 2 })
  const claimDue = createClaim(pool, 1e9)
  const claim = async (kind: Kind) => (await claimDue({ kind, thorough: true, max: 100 })).send
  const send = await claim('first')
  assert.equal(new Set(send.map(({ bundle, deliveryId }) => bundle ?? deliveryId)).size, together ? 2 : 7)
  let statements = 0
  const counting = (parts: TemplateStringsArray, ...values: never[]) => {
    statements++
    return pool(parts, ...values)
  }
  return {
    sql,
    claim,
    claims: send as Claims,
    attempt: createAttempt(Object.assign(counting, { begin: pool.begin }) as unknown as Pool),
    statements: () => statements,
    delivery: async ({ deliveryId }: Claim) => {
      const [row] = await sql`
        select status, dead_letter_reason as reason, attempt_count as attempts, next_attempt_at as next from waybill.deliveries where delivery_id = ${deliveryId}`
      return { ...row }
    },
    deadLetters: async () =>
      // pg-boss says of its own which job it was; ours carry what they are about.
      (
        await sql`
          select coalesce(data ->> 'delivery_id', source_id::text) as id from pgboss.job where name = 'dead_letters' order by 1`
      ).map(({ id }) => id),
    attemptsCounted: async () =>
      (await sql`select count from waybill.usage where metric = 'attempts'`).map(({ count }) => Number(count)),
  }
}

for (const together of [false, true]) {
  const jobs = together ? 'share a job' : 'have jobs of their own'

  test(`of attempts that are recorded together, and ${jobs}, each delivery comes to what its own came to`, async (t) => {
    const { sql, claims, attempt, delivery, deadLetters, attemptsCounted } = await start(t, together)
    const [delivered, failed, asked, gone, moved, unmade, last] = claims
    await sql`update pgboss.job set retry_limit = 0 where name = 'deliveries' and id = ${last.deliveryId}`
    const before = Date.now()
    const recorded = await Promise.all([
      attempt(delivered, 200),
      attempt(failed, 500),
      attempt(asked, 503, { retryAfter: '7200' }),
      attempt(gone, 410),
      attempt({ ...moved, url: 'http://before' }, 410),
      attempt(unmade, null),
      attempt(last, 500),
    ])
    assert.deepEqual(
      recorded.map(({ settled }) => settled),
      Array(7).fill(true),
    )
    const rows = await Promise.all(claims.map(delivery))
    assert.deepEqual(
      rows.map(({ status, reason, attempts }) => [status, reason, attempts]),
      [
        ['delivered', null, 1],
        ['retrying', null, 1],
        ['retrying', null, 1],
        ['dead_lettered', 'endpoint_gone', 1],
        ['retrying', null, 1],
        ['dead_lettered', 'monthly_attempt_limit', 0],
        ['dead_lettered', 'retries_exhausted', 1],
      ],
    )
    assert.deepEqual(
      rows.map(({ next }) => next),
      recorded.map(({ nextAttemptAt }) => nextAttemptAt),
    )
    const waits = rows.map(({ next }) => next && next.getTime() - before >= 7_190_000)
    assert.deepEqual(waits, [null, false, true, null, false, null, null])

    const waiting = await sql`
      select id, state, start_after from pgboss.job where name = 'deliveries' order by id`
    assert.deepEqual(
      [...waiting],
      [1, 2, 4].map((nth) => ({ id: claims[nth]?.deliveryId, state: 'retry', start_after: rows[nth]?.next })),
    )
    assert.deepEqual(await deadLetters(), [gone, unmade, last].map(({ deliveryId }) => deliveryId).sort())
    assert.deepEqual(await attemptsCounted(), [6])
    const endpoints = await sql`select is_active, inactive_reason from waybill.endpoints`
    assert.deepEqual([...endpoints], [{ is_active: false, inactive_reason: 'gone' }])
    await assertBooks(sql)
  })

  test(`attempts of deliveries that ${jobs}, and have been claimed again since, change nothing`, async (t) => {
    const { sql, claim, claims, attempt, delivery, deadLetters, attemptsCounted } = await start(t, together)
    const [delivered, failed, , gone, moved, unmade, last] = claims
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = 'deliveries'`
    await sql`select from waybill.take_back('10 seconds', 3, 5, 100, true)`
    const again = [await claim('first'), await claim('retry')].flat()
    assert.equal(again.length, 7)
    // As after a replay, when a job has the retry count again that it had.
    await sql`update pgboss.job set retry_count = 0 where id = ${last.deliveryId}`
    const state = async () => [
      ...(await Promise.all(claims.map(delivery))),
      ...(await sql`select * from pgboss.job order by name, id`),
      ...(await sql`select * from waybill.endpoints`),
    ]
    const before = await state()
    const recorded = await Promise.all([
      attempt(delivered, 200),
      attempt(failed, 500),
      attempt(gone, 410),
      attempt({ ...moved, url: 'http://before' }, 410),
      attempt(unmade, null),
      attempt(last, null),
    ])
    assert.deepEqual(
      recorded.map(({ settled }) => settled),
      Array(6).fill(false),
    )
    assert.deepEqual(await state(), before)
    assert.deepEqual([await deadLetters(), await attemptsCounted()], [[], [14]])
    await assertBooks(sql)
  })
}

test('what is stored again, as an earlier try was not answered, is not counted again', async (t) => {
  const { sql, claims, attempt, deadLetters, attemptsCounted } = await start(t, true)
  const [unmade, failed, gone] = claims
  for (const settled of [true, false]) {
    const recorded = await Promise.all([attempt(unmade, null), attempt(failed, 500), attempt(gone, 410)])
    assert.deepEqual(
      recorded.map((one) => one.settled),
      Array(3).fill(settled),
    )
    assert.equal((await deadLetters()).length, 2)
    assert.deepEqual(await attemptsCounted(), [6])
    await assertBooks(sql)
  }
})

for (const [stale, valid] of [
  [503, 200],
  [200, 503],
  [null, 200],
  [200, 200],
  [503, 503],
  // At a former URL.
  [410, 200],
] as const)
  test(`of a delivery that was claimed twice, the attempt whose claim holds is stored in one go with others (${stale}, then ${valid})`, async (t) => {
    const { sql, claim, claims, attempt, delivery, statements } = await start(t, false)
    const [first, ...others] = claims
    await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${first.deliveryId}`
    await sql`select from waybill.take_back('10 seconds', 3, 5, 100, true)`
    const [second] = [await claim('first'), await claim('retry')].flat() as [Claim]
    assert.equal(second.deliveryId, first.deliveryId)
    const recorded = await Promise.all([
      attempt(second, valid),
      attempt({ ...first, url: 'http://before' }, stale),
      ...others.map((other) => attempt(other, 200)),
    ])
    assert.deepEqual(
      recorded.map(({ settled }) => settled),
      [true, false, ...others.map(() => true)],
    )
    assert.ok(statements() <= 2, 'one, and one that catches up')
    const { status, attempts } = await delivery(first)
    assert.deepEqual([status, attempts], [valid === 200 ? 'delivered' : 'retrying', 2])
    await assertBooks(sql)
  })
