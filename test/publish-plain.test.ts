import assert from 'node:assert/strict'
import { test } from 'node:test'
import { isRetryable } from '../src/db/errors.ts'
import type { Db, Pool } from '../src/db/open.ts'
import { createPublish } from '../src/flow/publish.ts'
import { createDatabase, insertEndpoint, waitingForLocks } from './support/database.ts'
import { NO_LIMITS } from './support/deliveries.ts'
import { waitFor } from './support/wait.ts'

// A window of a day, which does not end in the middle of a test.
const LIMITS = JSON.stringify({
  ...NO_LIMITS,
  rate: 10,
  window_seconds: 86_400,
  monthly_events: 10,
  monthly_attempts: 10,
})

const addTenant = (sql: Pool, tenant: string) => insertEndpoint(sql, { tenant, types: ['a'] })

/** One event for each of the keys. */
const publishPlain = (sql: Pool, tenant: string, keys: (string | null)[] = [null]) =>
  sql`
    select event_ids, delivery_ids, items, rate_limit, rate_count, window_start, window_left
    from waybill.publish_plain(
      ${tenant}, ${keys.map(() => 'a')}::text[], ${keys.map(() => '{"n":1}')}::text[], ${keys}::text[], ${LIMITS})`

/** The same in the way of those that are not plain. */
const publish = (sql: Pool, tenant: string, keys: (string | null)[] = [null]) =>
  sql`
    select outcome from waybill.publish(
      ${keys.map(() => tenant)}::text[], ${keys.map(() => 'a')}::text[], ${keys.map(() => '{"n":1}')}::text[], ${keys}::text[], ${LIMITS})`

/** What is stored of a tenant, but for ids and times. */
async function stored(sql: Pool, tenant: string) {
  const [row] = await sql<Record<string, unknown[]>[]>`
    with about as (select * from waybill.deliveries where tenant_id = ${tenant})
    select
      array(select to_jsonb(e) - array['tenant_id', 'event_id'] from waybill.events e where tenant_id = ${tenant} order by event_id) as events,
      array(select to_jsonb(d) - array['tenant_id', 'delivery_id', 'event_id', 'endpoint_id', 'next_attempt_at', 'updated_at']
          || jsonb_build_object('shares_id', left(delivery_id::text, 18) = left(event_id::text, 18),
            'is_dated', next_attempt_at = updated_at and updated_at between now() - interval '1 minute' and now())
        from about d order by delivery_id) as deliveries,
      array(select to_jsonb(j) - array['id', 'start_after', 'keep_until'] || jsonb_build_object('data', j.data - 'tenant_id',
          'is_theirs', j.data ->> 'tenant_id' = ${tenant}, 'is_due', start_after <= now(), 'kept_for', keep_until - start_after)
        from pgboss.job j join about on delivery_id = j.id order by j.id) as jobs,
      array(select to_jsonb(w) - 'tenant_id' from waybill.rate_windows w where tenant_id = ${tenant}) as windows,
      array(select to_jsonb(u) - 'tenant_id' from waybill.usage u where tenant_id = ${tenant}) as usage,
      array(select to_jsonb(s) - array['tenant_id', 'endpoint_id'] from waybill.endpoint_stats s where tenant_id = ${tenant} order by pending, retrying) as stats,
      array(select key from waybill.idempotency_keys where tenant_id = ${tenant} order by event_id) as keys`
  return row
}

test('a lone event is stored and answered as a batch would be', async (t) => {
  const { sql } = await createDatabase(t)
  for (const tenant of ['alone', 'batch']) await addTenant(sql, tenant)
  await sql`update waybill.queue_clock set tag = 2.5`
  // Their turn is shared by other endpoints of theirs for which first attempts wait, and by nobody else's.
  for (const tenant of ['alone', 'batch', 'other'])
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, retrying, held, tag)
      select ${tenant}, gen_random_uuid(), * from (values (40, 20, 0, 1), (1000, 0, 0, 3), (0, 70, 60, 3), (90, 1, 90, 3)) as waiting (pending, retrying, held, tag)`
  for (const key of ['first', null, 'third']) {
    const [alone] = await publishPlain(sql, 'alone', [key])
    const [batch] = await sql`
      select delivery_ids, rate_limit, rate_count, window_start, window_left
      from waybill.publish(array['batch'], array['a'], array['{"n":1}'], array[${key}]::text[], ${LIMITS})`
    assert.ok(alone && batch)
    const { event_ids, delivery_ids, items, window_left, ...rest } = alone
    assert.deepEqual(rest, {
      rate_limit: batch.rate_limit,
      rate_count: batch.rate_count,
      window_start: batch.window_start,
    })
    assert.equal((event_ids as string[]).length, 1)
    assert.equal((delivery_ids as string[]).length, (batch.delivery_ids as string[]).length)
    assert.deepEqual(items, [1])
    assert.ok(Math.abs(Number(window_left) - Number(batch.window_left)) <= 1)
  }
  const all = await stored(sql, 'alone')
  assert.ok(all?.jobs?.length === 3)
  assert.deepEqual(all, await stored(sql, 'batch'))
  // Behind one that waits in the queue: of the other endpoint with a backlog all is under way.
  assert.equal((all.jobs[0] as { data: { tag: number } }).data.tag, 2.5 + 2 / 64)
})

test('what comes to an endpoint takes its part of a turn once: of however many kinds, and not again where it is repeated', async (t) => {
  const { sql } = await createDatabase(t)
  const limits = JSON.stringify(NO_LIMITS)
  const publish = async (how: string, events: { type: string; key: string | null }[]) => {
    const [types, keys] = [events.map(({ type }) => type), events.map(({ key }) => key)]
    const payloads = types.map(() => '{}')
    await (how === 'plain'
      ? sql`select from waybill.publish_plain(${how}, ${types}::text[], ${payloads}::text[], ${keys}::text[], ${limits})`
      : sql`select from waybill.publish(${types.map(() => how)}::text[], ${types}::text[], ${payloads}::text[], ${keys}::text[], ${limits})`)
  }
  const waiting = async () => [...(await sql`select pending::int, tag from waybill.endpoint_stats`)]
  for (const how of ['plain', 'batch']) {
    await insertEndpoint(sql, { tenant: how })
    for (const n of [60, 100])
      await publish(
        how,
        Array.from({ length: n }, (_, nth) => ({ type: `kind ${nth}`, key: null })),
      )
    assert.deepEqual(await waiting(), [{ pending: 160, tag: 160 / 64 }])
    await sql`truncate waybill.endpoint_stats`
  }
  for (let nth = 0; nth < 3; nth++) await insertEndpoint(sql, { tenant: 'repeats' })
  await publish('repeats', Array(100).fill({ type: 'a', key: 'same' }))
  assert.deepEqual(await waiting(), Array(3).fill({ pending: 1, tag: 3 / 64 }))
})

/** The shape of what is stored of a tenant: everything but ids, times, and which of an event's deliveries come first. */
async function shape(sql: Pool, tenant: string) {
  const [row] = await sql<Record<string, unknown[]>[]>`
    with ordered as (select *, dense_rank() over (order by event_id) as event from waybill.events where tenant_id = ${tenant}),
      goes as (select d.*, event, e.description as endpoint from waybill.deliveries d join ordered using (tenant_id, event_id)
        join waybill.endpoints e using (tenant_id, endpoint_id)),
      job as (select * from pgboss.job where name = 'deliveries' and data ->> 'tenant_id' = ${tenant})
    select
      array(select jsonb_build_array(event, event_type, payload, idempotency_key, delivery_count) from ordered order by event) as events,
      array(select jsonb_build_array(event, endpoint, event_type, status, held, next_attempt_at = updated_at,
          (select jsonb_build_array(priority, data -> 'ids' ? delivery_id::text, jsonb_array_length(data -> 'ids')) from job
            where job.id = coalesce(bundle, delivery_id)))
        from goes order by event, endpoint) as deliveries,
      array(select jsonb_build_array(priority, data -> 'tag', jsonb_array_length(data -> 'ids')) from job order by 1) as jobs,
      array(select to_jsonb(w) - 'tenant_id' from waybill.rate_windows w where tenant_id = ${tenant}) as windows,
      array(select to_jsonb(u) - 'tenant_id' from waybill.usage u where tenant_id = ${tenant}) as usage,
      array(select to_jsonb(s) - array['tenant_id', 'endpoint_id'] from waybill.endpoint_stats s join waybill.endpoints e using (tenant_id, endpoint_id)
        where tenant_id = ${tenant} order by e.description) as stats,
      array(select key from waybill.idempotency_keys where tenant_id = ${tenant} order by event_id) as keys`
  return row
}

test('many events of one tenant, to several endpoints or none, are stored and answered as waybill.publish would', async (t) => {
  const { sql } = await createDatabase(t)
  const limits = JSON.stringify({ ...NO_LIMITS, rate: 1000, window_seconds: 86_400, fanout: 10 })
  for (const tenant of ['plain', 'batch']) {
    await sql`insert into waybill.tenants (tenant_id, tenant_slug) values (${tenant}, ${tenant})`
    await sql`
      insert into waybill.endpoints (tenant_id, endpoint_id, url, description, subscribed_events, signing_secret)
      select ${tenant}, make_id, 'http://x', name, types, ''
      from (values (1, 'one', array['a']), (2, 'two', array['a', 'b']), (3, 'three', array['b', 'z'])) as e (nth, name, types), waybill.make_id(nth)`
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, tag)
      select tenant_id, endpoint_id, waiting, tag from waybill.endpoints
      join (values ('two', 20, 7.25), ('three', 0, 1.25)) as s (name, waiting, tag) on name = description where tenant_id = ${tenant}`
  }
  await sql`update waybill.queue_clock set tag = 2.5`
  for (const types of [['c'], ['a'], Array.from({ length: 100 }, (_, nth) => 'aabcd'[nth % 5] as string)]) {
    const payloads = types.map((_, nth) => `{"n":${nth}}`)
    const keys = types.map((_, nth) => (nth % 3 === 1 ? `key ${nth}` : null))
    const [plain] = await sql`
      select * from waybill.publish_plain('plain', ${types}::text[], ${payloads}::text[], ${keys}::text[], ${limits})`
    const batch = await sql`
      select * from waybill.publish(${types.map(() => 'batch')}::text[], ${types}::text[], ${payloads}::text[], ${keys}::text[], ${limits})`
    assert.ok(plain)
    const events = await sql`select event_id from waybill.events where tenant_id = 'plain' order by event_id`
    assert.deepEqual(
      plain.event_ids,
      events.slice(-types.length).map(({ event_id }) => event_id),
    )
    const counts = types.map((_, nth) => (plain.items as number[]).filter((item) => item === nth + 1).length)
    assert.deepEqual(
      counts,
      batch.map(({ delivery_ids }) => (delivery_ids as string[]).length),
    )
    for (const [nth, id] of (plain.delivery_ids as string[]).entries())
      assert.equal(id.slice(0, 18), (plain.event_ids as string[])[(plain.items as number[])[nth]! - 1]?.slice(0, 18))
    assert.deepEqual([plain.rate_limit, plain.rate_count], [batch.at(-1)?.rate_limit, batch.at(-1)?.rate_count])
  }
  const all = await shape(sql, 'plain')
  assert.equal(all?.deliveries?.length, 2 + 40 * 2 + 20 * 2)
  assert.ok(all.jobs && all.jobs.length < all.deliveries.length / 4, 'deliveries share jobs')
  assert.deepEqual(all, await shape(sql, 'batch'))
})

test('a window that was full refuses nobody in the next one, whichever way an event is counted', async (t) => {
  const { sql } = await createDatabase(t)
  const limits = JSON.stringify({ ...NO_LIMITS, rate: 10 })
  for (const tenant of ['alone', 'batch', 'early']) await addTenant(sql, tenant)
  await sql`update waybill.endpoints set max_per_second = 1 where tenant_id = 'early'`
  await sql`
    insert into waybill.rate_windows select tenant_id, 'events:write', date_bin('60 seconds', now(), 'epoch') - interval '1 hour', 10 from waybill.tenants`
  const publish = (tenant: string) => sql`
    select outcome, rate_count, window_start > now() - interval '10 minutes' as is_new
    from waybill.publish(array[${tenant}], array['a'], array['{}'], array[null], ${limits})`
  const [alone] = await sql`
    select 'accepted' as outcome, rate_count, window_start > now() - interval '10 minutes' as is_new
    from waybill.publish_plain('alone', array['a'], array['{}'], array[null], ${limits})`
  const all = [alone, ...(await publish('batch')), ...(await publish('early'))]
  assert.deepEqual(
    all.map((row) => ({ ...row })),
    Array(3).fill({ outcome: 'accepted', rate_count: 1, is_new: true }),
  )
  const windows =
    await sql`select from waybill.rate_windows where count = 1 and window_start > now() - interval '10 minutes'`
  assert.equal(windows.length, 3)
})

test('an event that goes to too many endpoints takes no place in the month from one behind it', async (t) => {
  const { sql } = await createDatabase(t)
  await addTenant(sql, 'acme')
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    select 'acme', gen_random_uuid(), 'http://y', '{wide}', '' from generate_series(1, 2)`
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    values ('acme', date_trunc('month', now() at time zone 'utc') - interval '1 month', 'events', 5)`
  const limits = JSON.stringify({ ...NO_LIMITS, fanout: 1, monthly_events: 1 })
  const outcomes = await sql`
    select outcome, details ->> 'current' as current
    from waybill.publish(array_fill('acme'::text, array[4]), array['wide', 'a', 'wide', 'a'], array_fill('{}'::text, array[4]), array_fill(null::text, array[4]), ${limits})`
  assert.deepEqual(
    outcomes.map(({ outcome, current }) => [outcome, current]),
    [
      ['fanout', '2'],
      ['accepted', null],
      ['fanout', '2'],
      ['monthly_events', '1'],
    ],
  )
  const counts = await sql`select count::int from waybill.usage where metric = 'events' order by month`
  assert.deepEqual([...counts], [{ count: 5 }, { count: 1 }])
})

test('who has published more in the month than it may by now is told how much that is', async (t) => {
  const { sql } = await createDatabase(t)
  await addTenant(sql, 'acme')
  await sql`insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'events', 5)`
  const refused = await sql`
    select outcome, details ->> 'limit' as limit, details ->> 'current' as current
    from waybill.publish('{acme,acme}', '{a,a}', array['{}', '{}'], array[null, null]::text[], ${JSON.stringify({ ...NO_LIMITS, monthly_events: 2 })})`
  assert.deepEqual([...refused], Array(2).fill({ outcome: 'monthly_events', limit: '2', current: '5' }))
})

const ADD_STATS =
  'insert into waybill.endpoint_stats (tenant_id, endpoint_id) select tenant_id, endpoint_id from waybill.endpoints'
const NOT_PLAIN: Record<string, string> = {
  'its rate window has not room for both': `insert into waybill.rate_windows values ('acme', 'events:write', '2100-01-01', 9)`,
  'its window is full by a limit of its tenant’s own': `
    update waybill.tenants set limits = '{"events_write_rate":3}';
    insert into waybill.rate_windows values ('acme', 'events:write', '2100-01-01', 3)`,
  'the month’s events are used up': `
    insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'events', 9)`,
  'the month’s attempts are used up': `
    insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'attempts', 10)`,
  'the month’s attempts are used up by a limit of its tenant’s own': `
    update waybill.tenants set limits = '{"monthly_attempts":3}';
    insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'attempts', 3)`,
  'it may go to no endpoint': `update waybill.tenants set limits = '{"max_fanout_endpoints":0}'`,
  'it may go to one endpoint, and two have subscribed': `
    update waybill.tenants set limits = '{"max_fanout_endpoints":1}';
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    values ('acme', gen_random_uuid(), 'http://y', '{*}', '')`,
  'its endpoint is ordered': 'update waybill.endpoints set ordered = true',
  'its endpoint is paced': 'update waybill.endpoints set max_per_second = 100',
  'its endpoint has deliveries that are held': `${ADD_STATS}; update waybill.endpoint_stats set held = 1, pending = 1`,
  'its endpoint’s breaker is open': `${ADD_STATS}; update waybill.endpoint_stats set breaker = 'open'`,
  'an idempotency key is taken': `insert into waybill.idempotency_keys values ('acme', 'taken', gen_random_uuid())`,
}

for (const [what, change] of Object.entries(NOT_PLAIN))
  test(`events are left to waybill.publish, with nothing stored, when ${what}`, async (t) => {
    const { sql } = await createDatabase(t)
    await addTenant(sql, 'acme')
    await sql.text(change)
    const before = await stored(sql, 'acme')
    assert.deepEqual(await publishPlain(sql, 'acme', ['new', 'taken']), [])
    assert.deepEqual(await stored(sql, 'acme'), before)
  })

test('events are plain whatever limits other tenants have, and however much these have used', async (t) => {
  const { sql } = await createDatabase(t)
  for (const tenant of ['aaa', 'acme', 'zzz']) await addTenant(sql, tenant)
  const none = '{"events_write_rate":1,"monthly_events":0,"monthly_attempts":0,"max_fanout_endpoints":0}'
  await sql`update waybill.tenants set limits = case when tenant_id = 'acme' then '{}' else ${none}::jsonb end`
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    select tenant_id, date_trunc('month', now() at time zone 'utc'), metric, 10
    from waybill.tenants, unnest(array['events', 'attempts']::waybill.metered[]) metric where tenant_id <> 'acme'`
  await sql`
    insert into waybill.rate_windows (tenant_id, action, window_start, count)
    select tenant_id, 'events:write', '2100-01-01', 10 from waybill.tenants where tenant_id <> 'acme'`
  assert.equal((await publishPlain(sql, 'acme')).length, 1)
})

test('events are plain however much was used in other months', async (t) => {
  const { sql } = await createDatabase(t)
  await addTenant(sql, 'acme')
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    select 'acme', date_trunc('month', now() at time zone 'utc') - ago * interval '1 month', metric, 10
    from generate_series(1, 2) ago, unnest(array['events', 'attempts']::waybill.metered[]) metric`
  assert.equal((await publishPlain(sql, 'acme')).length, 1)
})

const OVERTAKEN = {
  'its rate window': `insert into waybill.rate_windows values ('acme', 'events:write', '2100-01-01', 9)`,
  'the month’s events': `insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'events', 9)`,
}
for (const [what, count] of Object.entries(OVERTAKEN))
  test(`an event that others have overtaken on the way to the limit of ${what} stores nothing, and fails so that it is tried again`, async (t) => {
    const { sql, newSession } = await createDatabase(t)
    await addTenant(sql, 'acme')
    await sql.text(count)
    let overtaken: Promise<unknown[]> | undefined
    await newSession().begin(async (other) => {
      await other`update waybill.rate_windows set count = 10`
      await other`update waybill.usage set count = 10`
      overtaken = Promise.all(
        [publishPlain, publish].map((either) => either(sql, 'acme').catch((error: unknown) => error)),
      )
      await waitFor(async () => (await waitingForLocks(sql)) === 2)
    })
    assert.deepEqual((await overtaken)?.map(isRetryable), [true, true])
    assert.deepEqual((await stored(sql, 'acme'))?.events, [])
  })

for (const either of [publishPlain, publish])
  test(`events take their idempotency keys in order, so that none waits for a key with another one taken that is before it (${either.name})`, async (t) => {
    const { sql, newSession } = await createDatabase(t)
    await addTenant(sql, 'acme')
    const take = (session: Db, key: string) =>
      session`insert into waybill.idempotency_keys values ('acme', ${key}, gen_random_uuid())`
    let waiting: Promise<unknown[]> | undefined
    await newSession().begin(async (other) => {
      await take(other, 'first')
      waiting = either(sql, 'acme', ['second', 'first'])
      await waitFor(async () => (await waitingForLocks(sql)) > 0)
      await other`set local lock_timeout = '10ms'`
      await take(other, 'second')
    })
    await waiting
    assert.deepEqual([...(await sql`select from waybill.events`)], [])
  })

test('events with the same idempotency key are left to waybill.publish, with nothing stored', async (t) => {
  const { sql } = await createDatabase(t)
  await addTenant(sql, 'acme')
  const before = await stored(sql, 'acme')
  assert.deepEqual(await publishPlain(sql, 'acme', ['same', 'other', 'same']), [])
  assert.deepEqual(await stored(sql, 'acme'), before)
})

test('events that waited for an idempotency key go to the endpoints that are active then', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await addTenant(sql, 'acme')
  let publishing: Promise<unknown> | undefined
  const other = newSession().begin(async (other) => {
    await other`insert into waybill.idempotency_keys values ('acme', 'key', gen_random_uuid())`
    publishing = publishPlain(sql, 'acme', ['key']).catch((error: unknown) => error)
    await waitFor(async () => (await waitingForLocks(sql)) > 0)
    await sql`update waybill.endpoints set is_active = false`
    throw new Error('it fails, and the key is free again')
  })
  await assert.rejects(other, /free again/)
  await publishing
  assert.equal((await sql`select from waybill.events`).length, 1)
  assert.deepEqual([...(await sql`select from waybill.deliveries`)], [])
})

/** How often publishing asks waybill.publish_plain. */
async function countAsked(sql: Db): Promise<() => Promise<number>> {
  await sql.text(`
      create sequence public.asked;
      alter function waybill.publish_plain rename to publish_plain_itself;
      create function waybill.publish_plain(a text, b text[], c text[], d text[], e jsonb)
      returns table (event_ids uuid[], delivery_ids uuid[], items int[], rate_limit int, rate_count int, window_start timestamptz, window_left int)
      language plpgsql as $$ begin
        perform nextval('public.asked');
        return query select * from waybill.publish_plain_itself(a, b, c, d, e);
      end $$`)
  return async () => {
    const [row] = await sql<
      { asked: number }[]
    >`select case when is_called then last_value::int else 0 end as asked from public.asked`
    return row?.asked ?? 0
  }
}

// What is not plain is published anyway: asking waybill.publish_plain first, each time, costs a fifth more.
test('an event that goes to a paced endpoint is not tried as a plain one each time', async (t) => {
  const { sql } = await createDatabase(t)
  await addTenant(sql, 'acme')
  await sql`update waybill.endpoints set max_per_second = 100`
  const asked = await countAsked(sql)
  const publish = createPublish(sql, NO_LIMITS)
  for (let nth = 0; nth < 6; nth++)
    await publish({ tenantId: 'acme', event: { type: 'a', payload: '{}', idempotencyKey: null } })
  assert.equal((await sql`select from waybill.deliveries`).length, 6)
  assert.ok((await asked()) < 6, `${await asked()} of 6`)
})

test('after an event is repeated with its idempotency key, the next ones are tried as plain ones all the same', async (t) => {
  const { sql } = await createDatabase(t)
  await addTenant(sql, 'acme')
  const asked = await countAsked(sql)
  const publish = createPublish(sql, NO_LIMITS)
  const outcomes = []
  for (const idempotencyKey of ['one', 'one', 'two', 'three'])
    outcomes.push((await publish({ tenantId: 'acme', event: { type: 'a', payload: '{}', idempotencyKey } })).outcome)
  assert.deepEqual(outcomes, ['accepted', 'repeated', 'accepted', 'accepted'])
  assert.equal(await asked(), 4)
})
