import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createLanes } from '../../src/flow/lanes.ts'
import { startReleaser } from '../../src/flow/release.ts'
import { createLog } from '../../src/log.ts'
import { cleanUp } from '../support/cleanup.ts'
import { createDatabase } from '../support/database.ts'
import { waitFor } from '../support/wait.ts'

test('what is held counts as failing where its endpoint did not answer last, or has failed three times in a row', async (t) => {
  const { sql } = await createDatabase(t)
  await sql`insert into waybill.tenants (tenant_id, tenant_slug) values ('acme', 'acme')`
  for (const [url, streak, last] of [
    ['answered 500 twice', 2, 500],
    ['answered 500 three times', 3, 500],
    ['did not answer last', 1, null],
    ['answered', 0, 200],
  ] as const)
    await sql`
      with e as (
        insert into waybill.endpoints (tenant_id, endpoint_id, url, subscribed_events, signing_secret)
        values ('acme', gen_random_uuid(), ${url}, array['*'], '') returning tenant_id, endpoint_id
      )
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, pending, held, failure_streak, last_success_at, recent_status_codes)
      select tenant_id, endpoint_id, 1, 1, ${streak}, now(), array[${last}]::smallint[] from e`
  const endpoints = await sql<{ id: string; url: string }[]>`select endpoint_id as id, url from waybill.endpoints`
  const standings = new Map<string, string>()
  const lanes = {
    ...createLanes({ cap: 50, slots: 200 }),
    reserve(endpoint: { endpointId: string; standing: string }) {
      standings.set(endpoints.find(({ id }) => id === endpoint.endpointId)!.url, endpoint.standing)
      return 0
    },
  }
  const releaser = startReleaser({ pool: sql, lanes, leaseSeconds: 25, log: createLog('silent') })
  cleanUp(t, releaser.stop)
  await waitFor(() => standings.size === 4, { what: 'all to be asked for' })
  assert.deepEqual(Object.fromEntries(standings), {
    'answered 500 twice': 'good',
    'answered 500 three times': 'failing',
    'did not answer last': 'failing',
    answered: 'good',
  })
})
