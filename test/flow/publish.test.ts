import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import { createPublish } from '../../src/flow/publish.ts'
import { createDatabase, insertEndpoint } from '../support/database.ts'
import { NO_LIMITS } from '../support/deliveries.ts'

/** What becomes of events that arrive together. */
async function publishTogether(
  publish: ReturnType<typeof createPublish>,
  events: { tenantId?: string; type?: string; idempotencyKey?: string }[],
) {
  const results = events.map(({ tenantId = 'acme', type = 'a', idempotencyKey = null }) =>
    publish({ tenantId, event: { type, payload: '{}', idempotencyKey } }),
  )
  return (await Promise.all(results)).map(({ outcome }) => outcome)
}

test('who publishes one event does not wait for all that another publishes', async (t) => {
  const { sql } = await createDatabase(t)
  for (const id of ['zeta', 'acme'])
    await sql`insert into waybill.tenants (tenant_id, tenant_slug) values (${id}, ${id})`
  const publish = createPublish(sql, NO_LIMITS)
  const order: string[] = []
  const publishOne = async (tenantId: string) => {
    const { outcome } = await publish({ tenantId, event: { type: 'a', payload: '{}', idempotencyKey: null } })
    assert.equal(outcome, 'accepted')
    order.push(tenantId)
  }
  const flood = Array.from({ length: 300 }, () => publishOne('zeta'))
  await publishOne('acme')
  assert.ok(order.length <= 100, `${order.length} before it`)
  await Promise.all(flood)
})

test('few events share a batch as long as nobody knows how many deliveries their tenant’s make, and more once that is known', async (t) => {
  const { sql } = await createDatabase(t)
  await insertEndpoint(sql)
  const publish = createPublish(sql, NO_LIMITS)
  const batches = async () => {
    await publishTogether(publish, Array<object>(50).fill({}))
    const stored = await sql<{ events: number }[]>`
      with stored as (delete from waybill.events returning xmin::text as batch, event_id)
      select count(*)::int as events from stored group by batch order by min(event_id::text)`
    return stored.map(({ events }) => events)
  }
  const [first = 0, second] = await batches()
  assert.ok(first <= 6, `${first} in the first`)
  assert.equal(second, 50 - first)
  assert.deepEqual(await batches(), [50])
})

test('the first events of many tenants share batches as others’ first ones have made few deliveries, and of one tenant few do', async (t) => {
  const { sql } = await createDatabase(t)
  const tenants = Array.from({ length: 300 }, (_, nth) => `tenant-${nth}`)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) select id, id from unnest(${[...tenants, 'new']}::text[]) as t (id)`
  const publish = createPublish(sql, NO_LIMITS)
  const batches = async (events: { tenantId: string }[]) => {
    assert.deepEqual(new Set(await publishTogether(publish, events)), new Set(['accepted']))
    const stored = await sql<{ events: number }[]>`
      with stored as (delete from waybill.events returning xmin::text as batch, event_id)
      select count(*)::int as events from stored group by batch order by min(event_id::text)`
    return stored.map(({ events }) => events)
  }
  const sizes = await batches(tenants.map((tenantId) => ({ tenantId })))
  assert.ok(sizes.length <= 12, `${sizes}`)
  const [first = 0, ...others] = await batches(Array(50).fill({ tenantId: 'new' }))
  assert.ok(first <= 6, `${first} in the first`)
  assert.deepEqual(others, [50 - first])
})

test('requests that make no deliveries share a batch, however many the tenant’s last event made', async (t) => {
  const { sql } = await createDatabase(t)
  for (let nth = 0; nth < 100; nth++) await insertEndpoint(sql)
  let batches = 0
  const counting = (parts: TemplateStringsArray, ...values: never[]) => {
    batches++
    return sql(parts, ...values)
  }
  const publish = createPublish(counting as Pool, { ...NO_LIMITS, rate: 1, window_seconds: 86_400 })
  assert.deepEqual(await publishTogether(publish, [{}]), ['accepted'])
  batches = 0
  const refused = Array.from({ length: 50 }, () => publish({ tenantId: 'acme', event: 'refused' }))
  assert.deepEqual(new Set((await Promise.all(refused)).map(({ outcome }) => outcome)), new Set(['rate_limited']))
  assert.equal(batches, 1)
})

for (const [whose, tenants] of [
  ['one tenant', ['acme', 'acme', 'acme']],
  ['two tenants', ['acme', 'zeta', 'acme', 'zeta', 'zeta']],
] as const)
  test(`events of ${whose} that arrive together are each stored, counted and answered as its own`, async (t) => {
    const { sql } = await createDatabase(t)
    for (const tenant of ['acme', 'acme', 'acme', 'acme', 'zeta']) await insertEndpoint(sql, { tenant })
    // Each at a place of its own in the queue.
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, tag)
      select tenant_id, endpoint_id, row_number() over (order by endpoint_id) from waybill.endpoints`
    const publish = createPublish(sql, { ...NO_LIMITS, rate: 10, window_seconds: 86_400 })
    const results = await Promise.all(
      tenants.map((tenantId, nth) =>
        publish({ tenantId, event: { type: 'a', payload: `{"n":${nth}}`, idempotencyKey: null } }),
      ),
    )
    for (const [nth, tenantId] of tenants.entries()) {
      const result = results[nth]
      assert.ok(result?.outcome === 'accepted')
      assert.equal(result.rate.count, tenants.slice(0, nth + 1).filter((id) => id === tenantId).length)
      const [stored] = await sql`
        select payload, array(select delivery_id from waybill.deliveries d
          where d.tenant_id = e.tenant_id and d.event_id = e.event_id order by delivery_id) as ids
        from waybill.events e where tenant_id = ${tenantId} and event_id = ${result.eventId}`
      assert.deepEqual([stored?.payload, stored?.ids], [`{"n":${nth}}`, result.deliveryIds])
      assert.equal(result.deliveryIds.length, tenantId === 'acme' ? 4 : 1)
    }
    assert.equal((await sql`select from waybill.events`).length, tenants.length)
  })

test('an event that reaches too many endpoints takes no place in the month from those that arrive together with it', async (t) => {
  const { sql } = await createDatabase(t)
  for (const types of [['wide', 'narrow'], ['wide']]) await insertEndpoint(sql, { types })
  const publish = createPublish(sql, { ...NO_LIMITS, fanout: 1, monthly_events: 2 })
  const outcomes = await publishTogether(
    publish,
    ['wide', 'narrow', 'wide', 'narrow', 'narrow'].map((type) => ({ type })),
  )
  assert.deepEqual(outcomes, ['fanout', 'accepted', 'fanout', 'accepted', 'monthly_events'])
})

test('who may reach fewer endpoints than another may not reach more for publishing together with that one, whose month counts its own', async (t) => {
  const { sql } = await createDatabase(t)
  for (const tenant of ['acme', 'acme', 'zeta']) await insertEndpoint(sql, { tenant })
  await sql`update waybill.tenants set limits = '{"max_fanout_endpoints": 1}' where tenant_id = 'acme'`
  const publish = createPublish(sql, NO_LIMITS)
  const outcomes = await publishTogether(
    publish,
    ['acme', 'zeta'].map((tenantId) => ({ tenantId })),
  )
  assert.deepEqual(outcomes, ['fanout', 'accepted'])
  const counts = await sql`select tenant_id, count::int from waybill.usage where metric = 'events' order by tenant_id`
  assert.deepEqual(
    [...counts],
    [
      { tenant_id: 'acme', count: 0 },
      { tenant_id: 'zeta', count: 1 },
    ],
  )
})

for (const limits of [{ fanout: 1 }, { monthly_events: 1 }])
  test(`an event that is refused by ${Object.keys(limits)[0]} does not put back in the queue what is published together with it`, async (t) => {
    const { sql } = await createDatabase(t)
    for (const types of [['narrow'], ['wide'], ['wide']]) await insertEndpoint(sql, { types })
    const publish = createPublish(sql, { ...NO_LIMITS, ...limits })
    await publishTogether(
      publish,
      ['narrow', ...Array(50).fill('wide')].map((type) => ({ type })),
    )
    assert.deepEqual([...(await sql`select tag from waybill.endpoint_stats`)], [{ tag: 1 / 64 }])
  })

for (const limits of [{ rate: 2, window_seconds: 86_400 }, { monthly_events: 2 }])
  test(`of tenants whose events arrive together each has as many accepted as its own ${Object.keys(limits)[0]} allows`, async (t) => {
    const { sql } = await createDatabase(t)
    for (const tenant of ['acme', 'zeta']) await insertEndpoint(sql, { tenant })
    const publish = createPublish(sql, { ...NO_LIMITS, ...limits })
    const outcomes = await publishTogether(
      publish,
      ['acme', 'zeta', 'acme', 'zeta', 'acme'].map((tenantId) => ({ tenantId })),
    )
    assert.deepEqual(outcomes, [
      'accepted',
      'accepted',
      'accepted',
      'accepted',
      'rate' in limits ? 'rate_limited' : 'monthly_events',
    ])
  })

test('who has attempts left in the month may publish together with a tenant that has none', async (t) => {
  const { sql } = await createDatabase(t)
  for (const tenant of ['acme', 'zeta']) await insertEndpoint(sql, { tenant })
  await sql`
    insert into waybill.usage (tenant_id, month, metric, count)
    values ('acme', date_trunc('month', now() at time zone 'utc')::date, 'attempts', 5)`
  const publish = createPublish(sql, { ...NO_LIMITS, monthly_attempts: 5 })
  const outcomes = await publishTogether(
    publish,
    ['acme', 'zeta'].map((tenantId) => ({ tenantId })),
  )
  assert.deepEqual(outcomes, ['monthly_attempts', 'accepted'])
})

test('a repeated event is refused beyond the rate limit also where it arrives together with the first', async (t) => {
  const { sql } = await createDatabase(t)
  await insertEndpoint(sql)
  const publish = createPublish(sql, { ...NO_LIMITS, rate: 2, window_seconds: 86_400 })
  const outcomes = await publishTogether(publish, Array(3).fill({ idempotencyKey: 'same' }))
  assert.deepEqual(outcomes, ['accepted', 'repeated', 'rate_limited'])
})
