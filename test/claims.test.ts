import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import type { Db, Pool } from '../src/db/open.ts'
import { createClaim } from '../src/flow/claim-due.ts'
import { createDatabase, insertEndpoint } from './support/database.ts'
import { publishMany } from './support/deliveries.ts'
import { claim, queueAt, startFailing } from './support/queue.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

test('saying of claims that they are alive, and taking them back, takes as long as they are many, and not its square', async (t) => {
  const { url, sql } = await createDatabase(t)
  const tenant = await createTenant(await startService(t, { databaseUrl: url, mode: 'api' }))
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  // What the planner knows of a queue that is empty most of the time.
  await sql.text('analyze')
  const timed = async (work: () => Promise<unknown>) => {
    const began = performance.now()
    await work()
    return performance.now() - began
  }
  const measure = async (most: number) => {
    await publishMany(sql, tenant.tenantId, most - (await sql`select from waybill.deliveries`).length)
    const states = async () => [
      ...(await sql`
        select state::text, count(*)::int as jobs, count(*) filter (where heartbeat_on > now() - interval '1 minute')::int as alive
        from pgboss.job where name = 'deliveries' group by 1`),
    ]
    const loseAll = () =>
      sql`update pgboss.job set state = 'active', started_on = now(), heartbeat_on = now() - interval '1 hour' where name = 'deliveries'`
    await loseAll()
    // Some bundles hold fewer than sixteen, so twice as many are asked for as there are.
    const takingBack = await timed(async () => {
      const lost = await sql`select due_now from waybill.take_back('10 seconds', 3, 5, ${2 * most}, true)`
      assert.equal(lost.filter(({ due_now }) => due_now).length, most)
    })
    assert.deepEqual(await states(), [{ state: 'retry', jobs: most, alive: 0 }])
    await loseAll()
    const jobs = await sql<
      { id: string; retry_count: number }[]
    >`select id, retry_count from pgboss.job where name = 'deliveries'`
    const touching = await timed(
      () =>
        sql`select waybill.touch(${jobs.map(({ id }) => id)}::uuid[], ${jobs.map(({ retry_count }) => retry_count)}::int[])`,
    )
    assert.deepEqual(await states(), [{ state: 'active', jobs: most, alive: most }])
    return [takingBack, touching] as const
  }
  const few = await measure(1000)
  const many = [await measure(8000), await measure(8000)]
  for (const kind of [0, 1] as const) {
    const best = Math.min(...many.map((times) => times[kind]))
    // Eight times as long, with room for what else is going on; the square would be 64 times as long.
    assert.ok(best < 25 * few[kind], `${few[kind]} ms, then ${best} ms`)
  }
})

test('saying that claims are alive waits for none that is being settled', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const ids = [randomUUID(), randomUUID(), randomUUID()].sort()
  await sql`select waybill.enqueue_new(array_agg('acme'::text), array_agg(id), array_agg(1::float8), array_agg(false), null) from unnest(${ids}::uuid[]) as u (id)`
  await sql`update pgboss.job set state = 'active', heartbeat_on = now() - interval '1 minute' where name = 'deliveries'`
  const settling = newSession()
  await settling`begin`
  await settling`select from pgboss.job where name = 'deliveries' and id = ${ids[1]!} for update`
  await sql.begin(async (tx) => {
    await tx`set local lock_timeout = '100ms'`
    // The last has been claimed anew since.
    await tx`select waybill.touch(${ids}::uuid[], array[0, 0, 7])`
  })
  await settling`commit`
  const touched =
    await sql`select id from pgboss.job where name = 'deliveries' and heartbeat_on > now() - interval '30 seconds'`
  assert.deepEqual(
    touched.map(({ id }) => id),
    [ids[0]],
  )
})

test('a probe that has been tried before goes before all retries that are due', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  const endpoint = randomUUID()
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', ${endpoint}, 'http://x', array['*'], '')`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, retrying, held, breaker, next_probe_at) values ('acme', ${endpoint}, 1, 1, 'open', now())`
  const [delivery] = await sql`
    with e as (insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) values ('acme', waybill.make_id(clock_timestamp()), 'a', '{}', 1) returning event_id)
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, held, spent_retries, attempt_count, updated_at)
    select 'acme', waybill.make_delivery_id(event_id), event_id, ${endpoint}, 'a', 'retrying', true, 3, 4, now() from e returning delivery_id`
  // Retries that have been due for an hour, and for half of one.
  await sql`
    with ids as (select gen_random_uuid() as id from generate_series(1, 300))
    select waybill.enqueue_new(array_agg('acme'::text), array_agg(id), array_agg(1::float8), array_agg(false), null) from ids`
  await sql`
    update pgboss.job j set state = 'retry', priority = waybill.retry_priority(due), start_after = due
    from (select id, now() - case when row_number() over () <= 100 then interval '1 hour' else interval '30 minutes' end as due
          from pgboss.job where name = 'deliveries') d where j.name = 'deliveries' and j.id = d.id`
  // Claiming has got to the second.
  await sql`select * from waybill.claim_due(true, true, 100, 1000000)`
  await sql`select * from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '25 seconds')`
  const claimed = await sql`select id from waybill.fetch_due(-2147483648, -1400000000, 1)`
  assert.deepEqual(
    claimed.map(({ id }) => id),
    [delivery?.delivery_id],
  )
})

test('who hands a claim back late leaves alone what was taken from it and claimed again', async (t) => {
  const { sql } = await createDatabase(t)
  const [id] = await queueAt(sql, [1])
  await claim(sql)
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where id = ${id!}`
  await sql`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`
  assert.deepEqual(await claim(sql), [id])
  const handBack = (retries: number) =>
    sql`select waybill.unclaim(array[${id!}]::uuid[], array[${retries}::int])::int as n`
  assert.deepEqual([...(await handBack(0))], [{ n: 0 }])
  assert.deepEqual([...(await handBack(1))], [{ n: 1 }])
})

test('a place in the month that is given back is taken off this month’s attempts, and off nothing else', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme'), ('other', 'other')`
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    select tenant, date_trunc('month', now() at time zone 'utc')::date - ago * interval '1 month', metric, 5
    from unnest(array['acme', 'other']) tenant, generate_series(0, 1) ago, unnest(array['attempts', 'events']::waybill.metered[]) metric`
  await sql`select waybill.refund_attempts(array['acme', 'acme'])`
  const changed = await sql<{ tenant_id: string; metric: string; is_now: boolean; count: number }[]>`
    select tenant_id, metric, month = date_trunc('month', now() at time zone 'utc')::date as is_now, count::int from waybill.usage where count <> 5`
  assert.deepEqual([...changed], [{ tenant_id: 'acme', metric: 'attempts', is_now: true, count: 3 }])
  // Some of these may have been counted in the month before.
  await sql`select waybill.refund_attempts(array_fill('acme'::text, array[4]))`
  assert.deepEqual([...(await sql`select count::int from waybill.usage where count < 5`)], [{ count: 0 }])
})

test('of what is put away for a failing endpoint the probe alone has the next one made soon', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false])
  const [other, probe] = ids as [string, string]
  await sql`update waybill.endpoint_stats set probing = ${probe}`
  await sql`select * from waybill.claim_due(false, true, 10, 1000)`
  const putAway = async (id: string) => {
    await sql`select waybill.hold_claims(array['acme'], array[${id}]::uuid[], array[${endpoint}]::uuid[], array[null]::uuid[], array[0], false)`
    const [row] = await sql`
      select held::int, probing, next_probe_at between now() and now() + interval '10 seconds' as is_soon from waybill.endpoint_stats`
    return { ...row }
  }
  assert.deepEqual(await putAway(other), { held: 1, probing: probe, is_soon: false })
  assert.deepEqual(await putAway(probe), { held: 2, probing: probe, is_soon: true })
})

test('the oldest that is held is probed with where what was asked for is not held any more', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [true, true, false])
  await sql`update waybill.endpoint_stats set probing = ${ids[2]!}, next_probe_at = now()`
  await sql`
    select * from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '25 seconds')`
  const [standing] = await sql`select probing, held::int from waybill.endpoint_stats`
  assert.deepEqual({ ...standing }, { probing: ids[0], held: 1 })
})

test('the retry for which an ordered endpoint’s others wait is claimed as soon as it is hurried', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, true])
  await sql`update waybill.endpoints set ordered = true`
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`
    update pgboss.job set state = 'retry', retry_count = 1, start_after = now() + interval '1 hour',
      priority = waybill.retry_priority(now() + interval '1 hour') where name = 'deliveries'`
  await sql`select waybill.hurry_ordered('acme', ${endpoint})`
  const claimed = await sql<{ id: string }[]>`select delivery_id as id from waybill.claim_due(true, true, 10, 1000)`
  assert.deepEqual([...claimed], [{ id: ids[0] }])
})

test('what is put away after it was counted gives its places in the month back', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`select * from waybill.claim_due(false, true, 10, 1000)`
  const attempts = async () => (await sql`select count::int from waybill.usage where metric = 'attempts'`)[0]?.count
  assert.equal(await attempts(), 2)
  await sql`select waybill.hold_claims(array['acme'], array[${ids[0]!}]::uuid[], array[${endpoint}]::uuid[], array[null]::uuid[], array[0], true)`
  assert.equal(await attempts(), 1)
})

test('of claims that are put away together, the one that somebody has claimed since is left alone', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false, false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`select * from waybill.claim_due(false, true, 10, 1000)`
  await sql`update pgboss.job set retry_count = 2 where name = 'deliveries' and id = ${ids[1]!}`
  const each = <T>(value: T) => ids.map(() => value)
  await sql`
    select waybill.hold_claims(${each('acme')}::text[], ${ids}::uuid[], ${each(endpoint)}::uuid[], ${each(null)}::uuid[], '{0,1,0}', true)`
  assert.deepEqual(
    (await sql`select held from waybill.deliveries order by delivery_id`).map(({ held }) => held),
    [true, false, true],
  )
  const [counts] = await sql`
    select held::int, (select count(*)::int from waybill.attempts) as lost,
      (select count::int from waybill.usage where metric = 'attempts') as counted from waybill.endpoint_stats`
  assert.deepEqual({ ...counts }, { held: 2, lost: 0, counted: 1 })
})

test('a paced endpoint gets what has a slot in the time ahead, the first at once, and each shows its slot as its next attempt', async (t) => {
  for (const [rate, ahead, slots] of [
    [1, 0.5, [0]],
    [5, 0.5, [0, 200, 400]],
    [5, 0.25, [0, 200]],
    [5, 0.001, [0]],
  ] as const) {
    const { sql } = await createDatabase(t)
    const { endpoint } = await startFailing(sql, [true, true, true, true])
    await sql`update waybill.endpoints set max_per_second = ${rate}`
    await sql`update waybill.endpoint_stats set breaker = 'closed'`
    await sql`select * from waybill.release_held(array['acme'], array[${endpoint}]::uuid[], array[0], array[50], interval '25 seconds', make_interval(secs => ${ahead}))`
    const released = await sql<{ shown: number; late: number }[]>`
      select round(extract(epoch from next_attempt_at - min(next_attempt_at) over ()) * 1000)::int as shown,
        round(extract(epoch from next_attempt_at) * 1000 - (data ->> 'slot')::float8)::int as late
      from waybill.deliveries join pgboss.job on name = 'deliveries' and id = delivery_id order by delivery_id`
    assert.deepEqual(
      [...released],
      slots.map((shown) => ({ shown, late: 0 })),
    )
  }
})

test('an endpoint that is paced since a moment ago gets nothing without a slot, and one that is ordered one at a time', async (t) => {
  const { sql } = await createDatabase(t)
  await startFailing(sql, [false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  const claimed = async (rule: string) => {
    await sql.text(
      `update waybill.endpoints set max_per_second = null, ordered = false; update waybill.endpoints set ${rule}`,
    )
    await sql`update pgboss.job set state = 'created', started_on = null where name = 'deliveries'`
    const [row] = await sql`select sendable, at_once from waybill.claim_due(false, true, 10, 1000)`
    return { ...row }
  }
  assert.deepEqual(await claimed('is_active = true'), { sendable: true, at_once: null })
  assert.deepEqual(await claimed('max_per_second = 100'), { sendable: false, at_once: null })
  assert.deepEqual(await claimed('ordered = true'), { sendable: true, at_once: 1 })
})

test('a job whose delivery is finished counts no attempt', async (t) => {
  const { sql } = await createDatabase(t)
  await startFailing(sql, [false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  await sql`update waybill.deliveries set status = 'delivered'`
  assert.equal((await claim(sql, { thorough: true })).length, 1)
  assert.deepEqual([...(await sql`select count from waybill.usage where metric = 'attempts'`)], [])
})

test('a worker drops the job of what is finished', async (t) => {
  const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/never')
  await tenant.publish()
  await sql`update waybill.deliveries set status = 'delivered'`
  await startService(t, { databaseUrl, mode: 'worker' })
  const jobs = () => sql`select from pgboss.job where name = 'deliveries'`
  await waitFor(async () => (await jobs()).length === 0, { what: 'the job to go' })
  const held =
    await sql`select from waybill.deliveries d cross join waybill.endpoint_stats s where d.held or s.held > 0`
  assert.equal(held.length, 0, 'it does not wait to be released')
})

test('the last attempts of a month go to the oldest that can be sent, whatever else is claimed with them', async (t) => {
  const { sql } = await createDatabase(t)
  const { ids } = await startFailing(sql, [false, false, false, false])
  await sql`update waybill.endpoint_stats set breaker = 'closed'`
  const [off, foreign] = [randomUUID(), randomUUID()]
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('other', 'other')`
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret, is_active)
    values ('acme', ${off}, 'http://y', '{*}', '', false), ('other', ${foreign}, 'http://z', '{*}', '', true)`
  await sql`update waybill.deliveries set endpoint_id = ${off} where delivery_id = ${ids[2]!}`
  await sql`update waybill.deliveries set endpoint_id = ${foreign}, tenant_id = 'other' where delivery_id = ${ids[3]!}`
  await sql`update pgboss.job set data = data || '{"tenant_id":"other"}' where name = 'deliveries' and id = ${ids[3]!}`
  const claimed = await sql<{ sendable: boolean; within_quota: boolean }[]>`
    select sendable, sendable and within_quota as within_quota from waybill.claim_due(false, true, 10, 1)`
  assert.deepEqual(
    claimed.map(({ sendable, within_quota }) => [sendable, within_quota]),
    [
      [true, true],
      [true, false],
      [false, false],
      [true, true],
    ],
  )
})

test('an endpoint is well for half a minute after a success, and failing from its first failure on', async (t) => {
  const { sql } = await createDatabase(t)
  const standing = async (failures: number, ago: string | null) =>
    (await sql`select waybill.standing(${failures}, now() - ${ago}::text::interval) as is`)[0]?.is
  assert.deepEqual(
    await Promise.all([
      standing(0, '25 seconds'),
      standing(0, '35 seconds'),
      standing(0, null),
      standing(1, '1 second'),
    ]),
    ['good', 'unsure', 'unsure', 'failing'],
  )
})

test('what is claimed for an endpoint whose breaker is not closed is known to have been held', async (t) => {
  const { sql } = await createDatabase(t)
  await insertEndpoint(sql)
  for (const [breaker, isKnown] of [
    ['closed', false],
    ['half_open', true],
  ] as const) {
    await publishMany(sql, 'acme', 1)
    await sql`update waybill.endpoint_stats set breaker = ${breaker}, breaker_since = now(), ramp = 5`
    const { send } = await createClaim(sql, 1e9)({ kind: 'first', thorough: true, max: 1 })
    assert.deepEqual(
      send.map(({ isProbed }) => isProbed),
      [isKnown],
    )
  }
})

test('of what is settled in one bundle at once each leaves it, and who comes after it was taken back is late', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', gen_random_uuid(), 'http://x', '{*}', '')`
  await publishMany(sql, 'acme', 4)
  const claimed = await sql<
    { id: string; bundle: string }[]
  >`select delivery_id as id, bundle from waybill.claim_due(false, true, 10, 1000)`
  const session = newSession()
  const finish = (db: Db, nth: number) =>
    db<{ ids: string[] }[]>`
      select waybill.finish_claims(array[${claimed[nth]!.id}]::uuid[], array[${`${claimed[nth]!.bundle}:0`}]) as ids`
  const waits = () => sql`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`
  /** Finishes while the other's transaction has the bundle. */
  const behind = async (other: (tx: Db) => Promise<unknown>, nth: number) => {
    const { finishing } = await sql.begin(async (tx) => {
      await other(tx)
      const finishing = finish(session, nth)
      await waitFor(async () => (await waits()).length > 0)
      return { finishing }
    })
    return (await finishing)[0]?.ids
  }
  assert.deepEqual(await behind((tx) => finish(tx, 0), 1), [claimed[1]!.id])
  const [job] = await sql`select data -> 'ids' as ids from pgboss.job where name = 'deliveries'`
  assert.deepEqual(job?.ids.sort(), [claimed[2]!.id, claimed[3]!.id])
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = 'deliveries'`
  assert.deepEqual(await behind((tx) => tx`select * from waybill.take_back('10 seconds', 3, 5, 10, true)`, 2), [])
})

test('a delivery that the month allows no attempt shows how the one before went, if there was one', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false, false])
  const [, lost, replayed] = ids as [string, string, string]
  const counts = [0, 1, 1]
  await sql`
    update waybill.deliveries set attempt_count = 1, last_attempt_at = '2026-01-01', last_status_code = 503, last_error = 'http_status'
    where delivery_id = ${lost}`
  await sql`
    update waybill.deliveries set attempt_count = 1, last_attempt_at = '2026-01-01', last_status_code = 200 where delivery_id = ${replayed}`
  await sql`
    insert into waybill.attempts (tenant_id, delivery_id, attempt_number, endpoint_id, url, status_code, response_truncated, duration_ms, retry_state, started_at)
    values ('acme', ${lost}, 1, ${endpoint}, 'http://x', 503, false, 1, 'will_retry', '2026-01-01'),
      ('acme', ${replayed}, 1, ${endpoint}, 'http://x', 200, false, 1, 'succeeded', '2026-01-01')`
  const each = <T>(value: T) => ids.map(() => value)
  await sql`
    select from waybill.record(${each('acme')}::text[], ${ids}::uuid[], ${each(null)}::text[], ${each(endpoint)}::uuid[], ${each('http://x')}::text[],
      array[1, 4, 2], ${counts}::int[], ${each('pending')}::waybill.delivery_status[], ${each('dead_lettered')}::waybill.delivery_status[],
      ${each('monthly_attempt_limit')}::waybill.dead_letter_reason[], null, ${each(null)}::timestamptz[], ${each(0)}::int[], ${each(null)}::smallint[],
      null, null, null, ${each(false)}::boolean[])`
  const shown = await sql<Record<string, unknown>[]>`
    select d.attempt_count, last_status_code, last_error, last_attempt_at is not null as was_attempted, last_attempt_at > '2026-01-02' as is_recent,
      array(select retry_state::text from waybill.attempts a where a.delivery_id = d.delivery_id order by attempt_number) as attempts
    from waybill.deliveries d order by delivery_id`
  assert.deepEqual(
    shown.map((row) => Object.values(row)),
    [
      [0, null, null, false, null, []],
      [3, null, 'worker_lost', true, true, ['will_retry', 'will_retry', 'exhausted']],
      [1, 200, null, true, false, ['succeeded']],
    ],
  )
})

test('of deliveries that the month allows no attempt each has its last one marked, in whatever order they are recorded', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false, false, false])
  await sql`
    insert into waybill.attempts (tenant_id, delivery_id, attempt_number, endpoint_id, url, status_code, response_truncated, duration_ms, retry_state, started_at)
    select 'acme', id, 1, ${endpoint}, 'http://x', 503, false, 1, 'will_retry', '2026-01-01' from unnest(${ids}::uuid[]) as u (id)`
  const each = <T>(value: T) => ids.map(() => value)
  await sql`
    select from waybill.record(${each('acme')}::text[], ${[ids[1]!, ids[2]!, ids[0]!]}::uuid[], ${each(null)}::text[], ${each(endpoint)}::uuid[],
      ${each('http://x')}::text[], ${each(2)}::int[], ${each(1)}::int[], ${each('retrying')}::waybill.delivery_status[],
      ${each('dead_lettered')}::waybill.delivery_status[], ${each('monthly_attempt_limit')}::waybill.dead_letter_reason[], null,
      ${each(null)}::timestamptz[], ${each(0)}::int[], ${each(null)}::smallint[], null, null, null, ${each(false)}::boolean[])`
  const shown = await sql`select status, retry_state from waybill.deliveries join waybill.attempts using (delivery_id)`
  assert.deepEqual([...shown], Array(3).fill({ status: 'dead_lettered', retry_state: 'exhausted' }))
})

test('who records late that the month allows no attempt leaves the one before as it is', async (t) => {
  const { sql } = await createDatabase(t)
  const { endpoint, ids } = await startFailing(sql, [false])
  const [id] = ids as [string]
  await sql`
    insert into waybill.attempts (tenant_id, delivery_id, attempt_number, endpoint_id, url, status_code, response_truncated, duration_ms, retry_state, started_at)
    values ('acme', ${id}, 1, ${endpoint}, 'http://x', 503, false, 1, 'will_retry', '2026-01-01')`
  await sql`update pgboss.job set state = 'active', retry_count = 2 where name = 'deliveries'`
  const settled = await sql`
    select from waybill.record('{acme}', ${[id]}::uuid[], ${[`${id}:1`]}::text[], ${[endpoint]}::uuid[], '{http://x}', '{2}', '{1}', '{retrying}',
      '{dead_lettered}', '{monthly_attempt_limit}', null, array[null]::timestamptz[], '{0}', array[null]::smallint[], null, null, null, '{false}')`
  assert.deepEqual([...settled], [])
  assert.deepEqual([...(await sql`select retry_state from waybill.attempts`)], [{ retry_state: 'will_retry' }])
})

test('taking claims back waits for none that is being settled, nor for a bundle of which some is', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await insertEndpoint(sql)
  for (let nth = 0; nth < 2; nth++) await publishMany(sql, 'acme', 2)
  const own = await queueAt(sql, [1, 1])
  await claim(sql, { thorough: true })
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = 'deliveries'`
  const settling = newSession()
  await settling`begin`
  const [bundle] = await settling`
    select id, data -> 'ids' as ids from pgboss.job where name = 'deliveries' and data ? 'ids' order by id limit 1 for update`
  await settling`select from pgboss.job where name = 'deliveries' and id = ${own[0]!} for update`
  const taken = await sql.begin(async (tx) => {
    await tx`set local lock_timeout = '100ms'`
    return await tx<{ delivery_id: string }[]>`select delivery_id from waybill.take_back('10 seconds', 3, 5, 100, true)`
  })
  await settling`commit`
  const others = await sql<
    { id: string }[]
  >`select delivery_id as id from waybill.deliveries where delivery_id <> all(${bundle!.ids}::uuid[])`
  assert.deepEqual(taken.map(({ delivery_id }) => delivery_id).sort(), [own[1]!, ...others.map(({ id }) => id)].sort())
})

test('what is taken back with no retry left does not become due', async (t) => {
  const { sql } = await createDatabase(t)
  const [last] = await queueAt(sql, [1, 1])
  await claim(sql)
  await sql`update pgboss.job set heartbeat_on = now() - interval '11 seconds' where name = 'deliveries'`
  await sql`update pgboss.job set retry_limit = retry_count where id = ${last!}`
  const taken =
    await sql`select delivery_id = ${last!} as is_last, due_now from waybill.take_back('10 seconds', 3, 5, 10, true) order by 1`
  assert.deepEqual(
    [...taken],
    [
      { is_last: false, due_now: true },
      { is_last: true, due_now: false },
    ],
  )
})

test('a claim may lapse from when it was asked for, however late the database answers', async (t) => {
  const { sql } = await createDatabase(t)
  await insertEndpoint(sql)
  await publishMany(sql, 'acme', 1)
  let askedAt = 0
  const pool = ((...question: Parameters<Pool>) => {
    askedAt = performance.now()
    return sql(...question)
  }) as Pool
  const { send } = await createClaim(pool, 1e9)({ kind: 'first', thorough: true, max: 1 })
  assert.ok(send[0]!.touchedAt <= askedAt)
})
