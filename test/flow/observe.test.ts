import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import { type EndpointStats, observeEndpoints, wouldMove } from '../../src/flow/observe.ts'
import type { Result } from '../../src/flow/settle.ts'
import { createDatabase } from '../support/database.ts'

const RULES = { failures: 10, seconds: 60, probeSeconds: 5, probeMaxSeconds: 300, cap: 50, disableAfterSeconds: 0 }
const OPEN: EndpointStats = {
  tenant_id: 'acme',
  endpoint_id: 'one',
  held: 5,
  failure_streak: 50,
  failing_seconds: 600,
  breaker: 'open',
  ramp: null,
  failed_probes: 1,
  probing: 'the probe',
}

const moves = (deliveryId: string, ending: Result['ending'], endpointId = 'one') =>
  wouldMove(
    [OPEN],
    [
      {
        claim: { deliveryId, endpointId },
        outcome: ending === 'monthly_attempt_limit' ? null : {},
        ending,
        nextAttemptAt: null,
      } as Result,
    ],
    RULES,
  )

test('of what fails while a breaker is open the probe alone puts off the next one; whatever succeeds opens it half way', () => {
  assert.equal(moves('the probe', 'retrying'), true)
  assert.equal(moves('an older one', 'retrying'), false)
  assert.equal(moves('an older one', 'delivered'), true)
  assert.equal(moves('an older one', 'delivered', 'another'), false)
})

test('a probe that has not been made, as the month is used up, is due again; another delivery is none', () => {
  assert.equal(moves('the probe', 'monthly_attempt_limit'), true)
  assert.equal(moves('an older one', 'monthly_attempt_limit'), false)
})

const ENDPOINT = '019ac0de-0000-7000-8000-000000000001'
const PROBE = '019ac0de-0000-7000-8000-000000000002'

/** An endpoint that has failed for an hour, and what an attempt of its probe would tell about it. */
async function startFailing(sql: Pool) {
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  await sql`
    insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret) values ('acme', ${ENDPOINT}, 'http://new', array['*'], '')`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, failing_since, breaker, breaker_since, failed_probes, probing)
    values ('acme', ${ENDPOINT}, 5, 5, 50, now() - interval '1 hour', 'open', now() - interval '1 hour', 1, ${PROBE})`
  return async (urls: string[], ending: Result['ending'], stats: Partial<EndpointStats> = {}) =>
    await observeEndpoints(
      sql,
      [{ ...OPEN, endpoint_id: ENDPOINT, probing: PROBE, ...stats }],
      urls.map(
        (url) =>
          ({
            claim: { tenantId: 'acme', deliveryId: PROBE, endpointId: ENDPOINT, url },
            outcome: {},
            ending,
            nextAttemptAt: null,
          }) as Result,
      ),
      RULES,
    )
}

test('an endpoint is failing since its breaker opened, however many probes fail, and recovering since one succeeded', async (t) => {
  const { sql } = await createDatabase(t)
  const observe = await startFailing(sql)
  const standing = async () => {
    const [row] = await sql`
      select breaker, failed_probes, ramp, probing, breaker_since < now() - interval '30 minutes' as is_old,
        round(extract(epoch from next_probe_at - now()) / 20)::int as probe_in from waybill.endpoint_stats`
    return { ...row }
  }
  await observe(['http://new'], 'retrying')
  const failing = { breaker: 'open', failed_probes: 2, ramp: null, probing: null, is_old: true, probe_in: 1 }
  assert.deepEqual(await standing(), failing)
  await observe(['http://new'], 'delivered', { failed_probes: 2 })
  const recovering = { ...failing, breaker: 'half_open', ramp: 2, is_old: false, probe_in: null }
  assert.deepEqual(await standing(), recovering)
  await sql`update waybill.endpoint_stats set breaker_since = now() - interval '1 hour'`
  await observe(['http://new'], 'delivered', { breaker: 'half_open', ramp: 2, failed_probes: 2 })
  assert.deepEqual(await standing(), { ...recovering, ramp: 3, is_old: true })
  await observe(['http://new'], 'delivered', { breaker: 'half_open', ramp: 3, failed_probes: 2, held: 0 })
  assert.deepEqual(await standing(), { ...recovering, breaker: 'closed', failed_probes: 0, ramp: null, is_old: null })
})

test('a 410 makes an endpoint inactive where it has that URL still, whichever others it had', async (t) => {
  const { sql } = await createDatabase(t)
  const observe = await startFailing(sql)
  const inactive = async () => (await sql`select from waybill.endpoints where not is_active`).length
  assert.deepEqual(await observe(['http://old'], 'endpoint_gone', { breaker: 'closed', failure_streak: 1 }), [])
  assert.equal(await inactive(), 0)
  const changes = await observe(['http://old', 'http://new'], 'endpoint_gone', { breaker: 'closed', failure_streak: 1 })
  assert.deepEqual(
    changes.map(({ from, to }) => [from, to]),
    [['closed', 'inactive']],
  )
  assert.equal(await inactive(), 1)
})
