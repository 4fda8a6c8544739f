import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import type { Claim } from '../../src/flow/claim.ts'
import { createClaim } from '../../src/flow/claim-due.ts'
import { insistOn } from '../../src/flow/record.ts'
import type { AttemptRecord } from '../../src/flow/store.ts'
import { createLog } from '../../src/log.ts'
import { createAttempt } from '../support/attempts.ts'
import { createDatabase, insertEndpoint, lock, waitingForLocks } from '../support/database.ts'
import { assertBooks, publishMany, standingOf } from '../support/deliveries.ts'
import { waitFor } from '../support/wait.ts'

/** Two claims of an endpoint whose breaker has opened since. */
async function startOpen(t: TestContext) {
  const database = await createDatabase(t)
  const { sql, openPool } = database
  const endpoint = await insertEndpoint(sql)
  for (let n = 0; n < 2; n++) await publishMany(sql, 'acme', 1)
  const pool = openPool({ max: 2, patienceMs: 1000 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 2 })
  await sql`update waybill.endpoint_stats set breaker = 'open', breaker_since = now(), next_probe_at = now(), held = 5`
  return {
    ...database,
    pool,
    claims: send as [Claim, Claim],
    breaker: async () => (await standingOf(sql, endpoint)).breaker,
  }
}

test('an attempt is stored though its endpoint’s breaker cannot be moved; the next success moves it', async (t) => {
  const { sql, pool, claims, breaker } = await startOpen(t)
  await sql.text(`
    create function refuse() returns trigger language plpgsql as $$ begin raise 'it cannot be moved'; end $$;
    create trigger refuse before update on waybill.endpoint_stats for each row when (new.breaker <> old.breaker) execute function refuse()`)
  const attempt = createAttempt(pool)
  assert.equal((await attempt(claims[0], 200)).settled, true)
  assert.equal(await breaker(), 'open')
  await sql.text('drop trigger refuse on waybill.endpoint_stats')
  assert.equal((await attempt(claims[1], 200)).settled, true)
  assert.equal(await breaker(), 'half_open')
})

test('an attempt that has failed is stored though what was asked for meanwhile cannot be attended to', async (t) => {
  const { sql, pool, claims } = await startOpen(t)
  await sql.text('alter table waybill.replay_requests rename to gone')
  const { settled, nextAttemptAt, caughtUp } = await createAttempt(pool)(claims[0], 503)
  assert.equal(settled, true)
  assert.ok(nextAttemptAt instanceof Date)
  await caughtUp
})

/** Three claims, each of another endpoint. */
async function startThree(t: TestContext) {
  const database = await createDatabase(t)
  const { sql, openPool } = database
  for (const type of ['a', 'b', 'c']) {
    await insertEndpoint(sql, { types: [type] })
    await publishMany(sql, 'acme', 1, type)
  }
  const pool = openPool({ max: 4 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 3 })
  return { ...database, claims: send as [Claim, Claim, Claim], attempt: createAttempt(pool) }
}

test('nobody’s record waits until what was asked for during attempts is attended to', {
  timeout: 15_000,
}, async (t) => {
  const { newSession, claims, attempt } = await startThree(t)
  const unlock = await lock(newSession(), 'waybill.replay_requests in access exclusive mode')
  const { settled, caughtUp } = await attempt(claims[0], 503)
  assert.equal(settled, true)
  assert.equal((await attempt(claims[1], 503)).settled, true)
  assert.equal((await attempt(claims[2], 200)).settled, true)
  let isCaughtUp = false
  const catchingUp = caughtUp?.then(() => {
    isCaughtUp = true
  })
  await new Promise((resolve) => setImmediate(resolve))
  assert.equal(isCaughtUp, false)
  await unlock()
  await catchingUp
})

test('whether an attempt counts is unknown where an earlier try to record it was not answered', async () => {
  const settledAfter = async (...answers: (Error | boolean)[]) => {
    const record = insistOn(async () => {
      const settled = answers.shift()
      if (typeof settled !== 'boolean') throw settled
      return { settled, nextAttemptAt: null, held: false }
    }, createLog('silent'))
    return (await record({ claim: { deliveryId: 'one' } } as AttemptRecord)).settled
  }
  const lost = new Error('connection lost')
  assert.deepEqual(await Promise.all([settledAfter(false), settledAfter(lost, true), settledAfter(lost, false)]), [
    false,
    true,
    null,
  ])
})

test('failures that are recorded with successes are not in a row, and keep no breaker from closing', async (t) => {
  const { sql, openPool } = await createDatabase(t)
  const endpoint = await insertEndpoint(sql)
  await publishMany(sql, 'acme', 8)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 8 })
  await sql`update waybill.endpoint_stats set breaker = 'half_open', ramp = 20, held = 50`
  const attempt = createAttempt(pool)
  await Promise.all(send.map((claim, nth) => attempt(claim, nth < 4 ? 503 : 200)))
  const { breaker, failed_probes } = await standingOf(sql, endpoint)
  assert.deepEqual({ breaker, failed_probes }, { breaker: 'closed', failed_probes: 0 })
})

for (const [what, burst, opens] of [
  ['a burst of failures that is recorded a minute late, after an outage', { startedAt: -65_000 }, false],
  ['a burst of attempts that have hung for a minute', { startedAt: -65_000, durationMs: 65_000 }, true],
  ['a burst of failures by a clock that has since been set back', { ahead: 86_400_000 }, false],
] as const)
  test(`${what} opens ${opens ? 'a' : 'no'} breaker`, async (t) => {
    const { sql, openPool } = await createDatabase(t)
    const endpoint = await insertEndpoint(sql)
    await publishMany(sql, 'acme', 12)
    const pool = openPool({ max: 2 })
    const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 12 })
    const [first, ...others] = send as [Claim, ...Claim[]]
    const rules = { failures: 10, seconds: 60, probeSeconds: 1, probeMaxSeconds: 1, cap: 5, disableAfterSeconds: 0 }
    const attempt = createAttempt(pool, { rules })
    const { startedAt = 0, durationMs = 1, ahead = 0 } = burst as { [name: string]: number }
    const fail = (claim: Claim) =>
      attempt({ ...claim, clockOffsetMs: claim.clockOffsetMs + ahead }, 503, {
        startedAt: performance.now() + startedAt,
        durationMs,
      })
    // The streak begins by the clock as it is.
    await attempt(first, 503, { startedAt: performance.now() + startedAt, durationMs })
    await Promise.all(others.slice(1).map(fail))
    assert.equal((await standingOf(sql, endpoint)).breaker, opens ? 'open' : 'closed')
    if (opens || ahead > 0) return
    await attempt(others[0] as Claim, 503)
    assert.equal((await standingOf(sql, endpoint)).breaker, 'open', 'it goes on failing')
  })

test('a success does not move a breaker that somebody else moves at the same time', async (t) => {
  const { sql, newSession, pool, claims, breaker } = await startOpen(t)
  const moving = newSession()
  const recordThen = async (parts: TemplateStringsArray, ...values: never[]) => {
    const rows = await pool(parts, ...values)
    await moving`begin`
    await moving`update waybill.endpoint_stats set breaker = 'closed', breaker_since = null`
    return rows
  }
  const attempt = createAttempt(Object.assign(recordThen, { begin: pool.begin }) as unknown as Pool)
  const recorded = attempt(claims[0], 200)
  await waitFor(() => waitingForLocks(sql), { what: 'it to wait', intervalMs: 5 })
  await moving`commit`
  assert.equal((await recorded).settled, true)
  assert.equal(await breaker(), 'closed')
})

test('what waits too long to be recorded is kept from lapsing', async (t) => {
  const { sql, pool, claims } = await startOpen(t)
  await sql`update pgboss.job set heartbeat_on = now() - interval '9 seconds'`
  const unlock = await lock(sql, 'waybill.attempts')
  await assert.rejects(createAttempt(pool)(claims[0], 200), { code: '57014' })
  await unlock()
  const kept = await sql`select id from pgboss.job where heartbeat_on > now() - interval '8 seconds'`
  assert.deepEqual([...kept], [{ id: claims[0].deliveryId }])
})

test('attempts are recorded although one of their deliveries has been changed meanwhile', async (t) => {
  const { sql, newSession, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  await publishMany(sql, 'acme', 3)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 3 })
  const changing = newSession()
  await changing`begin`
  await changing`update waybill.deliveries set updated_at = now() where delivery_id = ${(send[1] as Claim).deliveryId}`
  const attempt = createAttempt(pool)
  const recorded = Promise.all(send.map((claim) => attempt(claim, 200)))
  await waitFor(() => waitingForLocks(sql), { what: 'the record to wait' })
  await changing`commit`
  await recorded
  const statuses = await sql`select status, attempt_count from waybill.deliveries`
  assert.deepEqual([...statuses], Array(3).fill({ status: 'delivered', attempt_count: 1 }))
})

test('of attempts that are recorded together, one that is late changes nothing, and keeps neither a failure nor a success from being stored', async (t) => {
  const { sql, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  // One by one: what is published together shares a job.
  for (let nth = 0; nth < 3; nth++) await publishMany(sql, 'acme', 1)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 3 })
  const [failed, late, delivered] = send as [Claim, Claim, Claim]
  await sql`update pgboss.job set retry_count = 1 where id = ${late.deliveryId}`
  const attempt = createAttempt(pool)
  const recorded = await Promise.all([attempt(failed, 503), attempt(late, 200), attempt(delivered, 200)])
  assert.deepEqual(
    recorded.map(({ settled }) => settled),
    [true, false, true],
  )
  const stored = await sql`
    select d.delivery_id, d.status, array_agg(status_code) as codes
    from waybill.deliveries d left join waybill.attempts a using (delivery_id) group by 1, 2`
  assert.deepEqual(
    send.map(({ deliveryId }) => {
      const { status, codes } = stored.find(({ delivery_id }) => delivery_id === deliveryId) ?? {}
      return [status, codes]
    }),
    [
      ['retrying', [503]],
      ['pending', [null]],
      ['delivered', [200]],
    ],
  )
  await assertBooks(sql)
})

test('an attempt that is recorded late makes neither the last success nor the last failure older', async (t) => {
  const { sql, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  await publishMany(sql, 'acme', 4)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 4 })
  const attempt = createAttempt(pool)
  const last = async () => [...(await sql`select last_success_at, last_failure_at from waybill.endpoint_stats`)]
  await attempt(send[0] as Claim, 200)
  await attempt(send[1] as Claim, 503)
  const before = await last()
  const late = { startedAt: performance.now() - 60_000 }
  await attempt(send[2] as Claim, 200, late)
  await attempt(send[3] as Claim, 503, late)
  assert.deepEqual(await last(), before)
})

/** Three claims of an endpoint, and a clock that stands still. */
async function startTimeless(t: TestContext, slots: number) {
  const { sql, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  await publishMany(sql, 'acme', 3)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 3 })
  let statements = 0
  const counting = (parts: TemplateStringsArray, ...values: never[]) => {
    statements++
    return pool(parts, ...values)
  }
  let now = performance.now()
  t.mock.method(performance, 'now', () => now)
  return {
    claims: send as [Claim, Claim, Claim],
    attempt: createAttempt(Object.assign(counting, { begin: pool.begin }) as unknown as Pool, { slots }),
    statements: () => statements,
    pass: (ms: number) => (now += ms),
  }
}

for (const [what, startAt] of [
  ['attempts', null],
  ['attempts of an endpoint that is paced', 0],
] as const)
  test(`${what} that end within a moment are recorded together`, async (t) => {
    const { claims, attempt, statements, pass } = await startTimeless(t, 200)
    const [first, second, third] = claims.map((claim) => ({ ...claim, startAt })) as [Claim, Claim, Claim]
    await attempt(first, 200)
    const one = attempt(second, 200)
    await new Promise((resolve) => setTimeout(resolve, 5))
    const other = attempt(third, 200)
    await new Promise((resolve) => setTimeout(resolve, 5))
    pass(10)
    for (const { settled } of await Promise.all([one, other])) assert.ok(settled)
    assert.equal(statements(), 2)
  })

for (const [who, slots, atOnce] of [
  ['an endpoint that takes one at a time', 200, 1],
  ['a worker with one slot', 1, null],
] as const)
  test(`an attempt of ${who} is recorded at once`, { timeout: 15_000 }, async (t) => {
    const { claims, attempt, statements } = await startTimeless(t, slots)
    for (const claim of claims) assert.ok((await attempt({ ...claim, atOnce }, 200)).settled)
    assert.equal(statements(), 3)
  })

test('what was not sent, and so has kept its slot, is recorded at once', { timeout: 15_000 }, async (t) => {
  const { sql, openPool } = await createDatabase(t)
  await insertEndpoint(sql)
  await publishMany(sql, 'acme', 2)
  const pool = openPool({ max: 2 })
  const { send } = await createClaim(pool, 0)({ kind: 'first', thorough: true, max: 2 })
  const now = performance.now()
  t.mock.method(performance, 'now', () => now)
  const attempt = createAttempt(pool, { slots: 200 })
  for (const claim of send) assert.ok((await attempt(claim, null)).settled)
})
