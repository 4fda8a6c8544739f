import assert from 'node:assert/strict'
import { test } from 'node:test'
import { isRetryable } from '../src/db/errors.ts'
import type { Pool } from '../src/db/open.ts'
import { createPublish } from '../src/flow/publish.ts'
import { createDatabase, insertEndpoint } from './support/database.ts'
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

const publishOne = (sql: Pool, tenant: string, key: string | null = null) =>
  sql`
    select delivery_ids, rate_limit, rate_count, window_start, window_left
    from waybill.publish_one(${tenant}, 'a', '{"n":1}', ${key}, ${LIMITS})`

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
      array(select to_jsonb(j) - array['id', 'start_after', 'created_on', 'keep_until'] || jsonb_build_object('data', j.data - 'tenant_id',
          'is_theirs', j.data ->> 'tenant_id' = ${tenant}, 'is_due', start_after <= now(), 'kept_for', keep_until - created_on)
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
  // Their turn is shared by what waits for other endpoints of theirs, and of nobody else's.
  for (const tenant of ['alone', 'batch', 'other'])
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, retrying, held)
      select ${tenant}, gen_random_uuid(), * from (values (40, 20, 0), (1000, 0, 0), (0, 70, 60), (90, 0, 90)) as waiting (pending, retrying, held)`
  for (const key of ['first', null, 'third']) {
    const [alone] = await publishOne(sql, 'alone', key)
    const [batch] = await sql`
      select delivery_ids, rate_limit, rate_count, window_start, window_left
      from waybill.publish(array['batch'], array['a'], array['{"n":1}'], array[${key}]::text[], ${LIMITS})`
    assert.ok(alone && batch)
    const { delivery_ids, window_left, ...rest } = alone
    assert.deepEqual(rest, {
      rate_limit: batch.rate_limit,
      rate_count: batch.rate_count,
      window_start: batch.window_start,
    })
    assert.equal((delivery_ids as string[]).length, (batch.delivery_ids as string[]).length)
    assert.ok(Math.abs(Number(window_left) - Number(batch.window_left)) <= 1)
  }
  const all = await stored(sql, 'alone')
  assert.ok(all?.jobs?.length === 3)
  assert.deepEqual(all, await stored(sql, 'batch'))
  assert.equal((all.jobs[0] as { data: { tag: number } }).data.tag, 2.5 + (60 + 64 + 10) / 64 / 64)
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
    from waybill.publish_one('alone', 'a', '{}', null, ${limits})`
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
})

const ADD_STATS =
  'insert into waybill.endpoint_stats (tenant_id, endpoint_id) select tenant_id, endpoint_id from waybill.endpoints'
const NOT_PLAIN: Record<string, string> = {
  'its rate window is full': `insert into waybill.rate_windows values ('acme', 'events:write', '2100-01-01', 10)`,
  'its window is full by a limit of its tenant’s own': `
    update waybill.tenants set limits = '{"events_write_rate":3}';
    insert into waybill.rate_windows values ('acme', 'events:write', '2100-01-01', 3)`,
  'the month’s events are used up': `
    insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'events', 10)`,
  'the month’s attempts are used up': `
    insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'attempts', 10)`,
  'the month’s attempts are used up by a limit of its tenant’s own': `
    update waybill.tenants set limits = '{"monthly_attempts":3}';
    insert into waybill.usage values ('acme', date_trunc('month', now() at time zone 'utc'), 'attempts', 3)`,
  'it may go to no endpoint': `update waybill.tenants set limits = '{"max_fanout_endpoints":0}'`,
  'no endpoint has subscribed': `update waybill.endpoints set subscribed_events = '{b}'`,
  'its endpoint is inactive': 'update waybill.endpoints set is_active = false',
  'two endpoints have subscribed': `
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    values ('acme', gen_random_uuid(), 'http://y', '{*}', '')`,
  'its endpoint is ordered': 'update waybill.endpoints set ordered = true',
  'its endpoint is paced': 'update waybill.endpoints set max_per_second = 100',
  'its endpoint has deliveries that are held': `${ADD_STATS}; update waybill.endpoint_stats set held = 1, pending = 1`,
  'its endpoint’s breaker is open': `${ADD_STATS}; update waybill.endpoint_stats set breaker = 'open'`,
  'its idempotency key is taken': `insert into waybill.idempotency_keys values ('acme', 'taken', gen_random_uuid())`,
}

for (const [what, change] of Object.entries(NOT_PLAIN))
  test(`a lone event is left to the batch, with nothing stored, when ${what}`, async (t) => {
    const { sql } = await createDatabase(t)
    await addTenant(sql, 'acme')
    await sql.text(change)
    const before = await stored(sql, 'acme')
    assert.deepEqual(await publishOne(sql, 'acme', 'taken'), [])
    assert.deepEqual(await stored(sql, 'acme'), before)
  })

test('a lone event that others have overtaken on the way to a limit stores nothing, and fails so that it is tried again', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  await addTenant(sql, 'acme')
  await sql`insert into waybill.rate_windows values ('acme', 'events:write', '2100-01-01', 9)`
  let overtaken: Promise<unknown> | undefined
  await newSession().begin(async (other) => {
    await other`update waybill.rate_windows set count = 10`
    overtaken = publishOne(sql, 'acme').catch((error: unknown) => error)
    await waitFor(async () => (await sql`select from pg_locks where not granted`).length > 0)
  })
  assert.equal(isRetryable(await overtaken), true)
  assert.deepEqual((await stored(sql, 'acme'))?.events, [])
})

// What is not plain is published by the batch anyway: asking waybill.publish_one first, each time, costs a fifth more.
for (const [what, count, of, types] of [
  ['goes to a paced endpoint', 1, 'max_per_second', ['a', 'a', 'a', 'a', 'a', 'a']],
  ['has a type that nobody has seen, of a tenant with five endpoints', 5, '', ['a', 'b', 'c', 'd', 'e', 'f']],
] as const)
  test(`an event that ${what} is not tried alone each time`, async (t) => {
    const { sql } = await createDatabase(t)
    await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
    await sql`
      insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret, max_per_second)
      select 'acme', gen_random_uuid(), 'http://x', '{*}', '', ${of ? 100 : null} from generate_series(1, ${count}::int)`
    await sql.text(`
      create sequence public.asked;
      create or replace function waybill.make_id(at timestamptz) returns uuid language plpgsql as $$ begin
        perform nextval('public.asked');
        return waybill.make_id((extract(epoch from at) * 1000000)::bigint);
      end $$`)
    const publish = createPublish(sql, NO_LIMITS)
    for (const type of types) await publish({ tenantId: 'acme', event: { type, payload: '{}', idempotencyKey: null } })
    assert.equal((await sql`select from waybill.deliveries`).length, 6 * count)
    const [row] = await sql<{ asked: number }[]>`select last_value::int as asked from public.asked`
    assert.ok(row && row.asked < 6, `${row?.asked} of 6`)
  })
