import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase, insertEndpoint } from './support/database.ts'
import { NO_LIMITS } from './support/deliveries.ts'

const LIST = 100

test('a batch of a hundred event types reads no more of the endpoints than one of a single type', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  // Lists as long as they may be, none of them with a type that is published.
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    select 'acme', gen_random_uuid(), 'http://x', array(select md5(e::text || n) || repeat(md5(n::text || e), 3) from generate_series(1, ${LIST}) n), ''
    from generate_series(1, ${LIST}) e`
  const pagesRead = async (types: string[]) => {
    const [row] = await sql<{ 'QUERY PLAN': [{ Plan: Record<string, number> }] }[]>`
      explain (analyze, buffers, format json)
      select from waybill.publish(array_fill('acme'::text, array[${LIST}::int]), ${types}::text[], array_fill('{}'::text, array[${LIST}::int]),
        array_fill(null::text, array[${LIST}::int]), ${JSON.stringify(NO_LIMITS)})`
    const plan = row?.['QUERY PLAN'][0].Plan
    return (plan?.['Shared Hit Blocks'] ?? 0) + (plan?.['Shared Read Blocks'] ?? 0)
  }
  const same = Array<string>(LIST).fill('a')
  const different = Array.from({ length: LIST }, (_, nth) => `a${nth}`)
  // The first makes the plans.
  await pagesRead(same)
  const one = await pagesRead(same)
  const many = await pagesRead(different)
  // Where each endpoint's list is fetched once for each type, they are many times as many.
  assert.ok(one > LIST && many < 1.5 * one, `${one} pages for one, ${many} for a hundred`)
})

test('a tenant’s queue is looked at once, and not for each of its endpoints, before anything has been analyzed', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme'), ('other', 'other')`
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
    select case when e > 1 then 'acme' else 'other' end, gen_random_uuid(), 'http://x', '{*}', '' from generate_series(1, 1000) e`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id) select tenant_id, endpoint_id from waybill.endpoints`
  const pagesRead = async () => {
    const [row] = await sql<{ 'QUERY PLAN': [{ Plan: Record<string, number> }] }[]>`
      explain (analyze, buffers, format json)
      select from waybill.publish('{acme,other}', '{a,a}', array['{}', '{}'], '{null,null}', ${JSON.stringify({ ...NO_LIMITS, fanout: 10_000 })})`
    const plan = row?.['QUERY PLAN'][0].Plan
    return (plan?.['Shared Hit Blocks'] ?? 0) + (plan?.['Shared Read Blocks'] ?? 0)
  }
  await pagesRead()
  const pages = await pagesRead()
  assert.ok(pages < 50_000, `${pages} pages for 1,000 endpoints`)
})

test('an event goes to each endpoint that names its type, or all, once', async (t) => {
  const { sql } = await createDatabase(t)
  for (const [tenant, url, types] of [
    ['acme', 'a', ['a']],
    ['acme', 'ab', ['b', 'a']],
    ['acme', 'all', ['*']],
    ['acme', 'all and a', ['a', '*']],
    ['acme', 'c', ['c']],
    ['other', 'b of the other', ['b']],
  ] as const)
    await insertEndpoint(sql, { tenant, url, types })
  await sql`
    select from waybill.publish(array['acme', 'other', 'acme', 'other', 'acme'], array['a', 'b', 'b', 'a', 'a'], array_fill('{}'::text, array[5]),
      array_fill(null::text, array[5]), ${JSON.stringify(NO_LIMITS)})`
  const made = await sql`
    select event_type, url, count(*)::int as times from waybill.deliveries join waybill.endpoints using (tenant_id, endpoint_id)
    group by 1, 2 order by 1, 2`
  assert.deepEqual(
    made.map(({ event_type, url, times }) => [event_type, url, times]),
    [
      ['a', 'a', 2],
      ['a', 'ab', 2],
      ['a', 'all', 2],
      ['a', 'all and a', 2],
      ['b', 'ab', 1],
      ['b', 'all', 1],
      ['b', 'all and a', 1],
      ['b', 'b of the other', 1],
    ],
  )
})
