import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import { observe } from '../../src/flow/observe.ts'
import type { EndpointStats, Result } from '../../src/flow/store.ts'
import { createDatabase } from '../support/database.ts'

const RULES = { failures: 10, seconds: 60, probeSeconds: 5, probeMaxSeconds: 300, cap: 50, disableAfterSeconds: 0 }
const ENDPOINT = '019ac0de-0000-7000-8000-000000000001'
const PROBE = '019ac0de-0000-7000-8000-000000000002'
const OTHER = '019ac0de-0000-7000-8000-000000000003'

type Kind = Result['verdict']['kind']

/** An endpoint that has failed for an hour and whose probe is under way. */
async function startFailing(t: TestContext) {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', ${ENDPOINT}, 'http://new', array['*'], '')`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, failing_since, last_failure_at, breaker, breaker_since, failed_probes, probing)
    values ('acme', ${ENDPOINT}, 5, 5, 50, now() - interval '1 hour', now(), 'open', now() - interval '1 hour', 1, ${PROBE})`
  const standing = async () => {
    const [row] = await sql`
      select breaker, failed_probes, ramp, probing, breaker_since < now() - interval '30 minutes' as is_old,
        round(extract(epoch from next_probe_at - now()) / 20)::int as probe_in from waybill.endpoint_stats`
    return { ...row }
  }
  /** What one attempt to each of the `urls` tells. */
  const see = async (kind: Kind, { id = PROBE, endpointId = ENDPOINT, urls = ['http://new'] } = {}) => {
    const endpoints = await sql<EndpointStats[]>`
      select tenant_id, endpoint_id, held::float8, failure_streak, 3600 as failing_seconds, breaker, ramp, failed_probes, probing
      from waybill.endpoint_stats`
    const results = urls.map(
      (url) =>
        ({
          claim: { tenantId: 'acme', deliveryId: id, endpointId, url },
          outcome: kind === 'over_quota' ? null : {},
          verdict: { kind },
        }) as Result,
    )
    return await observe(sql, { results, endpoints }, RULES)
  }
  return { sql, see, standing }
}

const FAILING = { breaker: 'open', failed_probes: 1, ramp: null, probing: PROBE, is_old: true, probe_in: null }

for (const [what, kind, more, expected] of [
  ['a probe that fails puts off the next one', 'failed', {}, { failed_probes: 2, probing: null, probe_in: 1 }],
  ['an older delivery that fails puts no probe off', 'failed', { id: OTHER }, {}],
  [
    'an older delivery that arrives opens the breaker half way',
    'delivered',
    { id: OTHER },
    { breaker: 'half_open', ramp: 2, probing: null, is_old: false },
  ],
  ['what arrives at another endpoint moves nothing', 'delivered', { endpointId: OTHER }, {}],
  [
    'a probe that has not been made, as the month is used up, is due again',
    'over_quota',
    {},
    { probing: null, probe_in: 0 },
  ],
  ['another delivery that has not been made is no probe', 'over_quota', { id: OTHER }, {}],
] as const)
  test(`while a breaker is open, ${what}`, async (t) => {
    const { see, standing } = await startFailing(t)
    await see(kind, more)
    assert.deepEqual(await standing(), { ...FAILING, ...expected })
  })

test('an endpoint is failing since its breaker opened, however many probes fail, and recovering since one succeeded', async (t) => {
  const { sql, see, standing } = await startFailing(t)
  await see('failed')
  const failing = { ...FAILING, failed_probes: 2, probing: null, probe_in: 1 }
  assert.deepEqual(await standing(), failing)
  await see('delivered')
  const recovering = { ...failing, breaker: 'half_open', ramp: 2, is_old: false, probe_in: null }
  assert.deepEqual(await standing(), recovering)
  await sql`update waybill.endpoint_stats set failure_streak = 0, breaker_since = now() - interval '1 hour'`
  await see('delivered')
  assert.deepEqual(await standing(), { ...recovering, ramp: 3, is_old: true })
  await sql`update waybill.endpoint_stats set held = 0`
  await see('delivered')
  assert.deepEqual(await standing(), { ...recovering, breaker: 'closed', failed_probes: 0, ramp: null, is_old: null })
})

test('a 410 makes an endpoint inactive where it has that URL still, whichever others it had', async (t) => {
  const { sql, see } = await startFailing(t)
  await sql`update waybill.endpoint_stats set breaker = 'closed', failure_streak = 1`
  const inactive = async () => (await sql`select from waybill.endpoints where not is_active`).length
  assert.deepEqual(await see('gone', { urls: ['http://old'] }), [])
  assert.equal(await inactive(), 0)
  const changes = await see('gone', { urls: ['http://old', 'http://new'] })
  assert.deepEqual(
    changes.map(({ from, to }) => [from, to]),
    [['closed', 'inactive']],
  )
  assert.equal(await inactive(), 1)
})
