import type { Pool } from '../../src/db/open.ts'
import { connect } from '../../test/support/database.ts'
import { createClient } from '../demo/client.ts'
import type { Cost } from './cost.ts'
import { type Bench, measureDrain, measurePublish } from './parts.ts'

// Whether deliveries that are held cost anybody anything: the same endpoint's events are published and fetched with none
// held and with a million, in turns.

const HELD = 1_000_000
const TURNS = 2

/** What Postgres takes for one event, and for claiming one delivery, in microseconds. */
type Micros = { publish: number; claim: number }
export type HeldRun = { held: number; without: Micros; withThem: Micros }

export async function measureHeld(bench: Bench): Promise<HeldRun> {
  const sql = connect(bench.database.url)
  const tenant = createClient(`http://127.0.0.1:${bench.services.ports()[0]}`, bench.apiKey)
  const { endpoint_id } = await tenant<{ endpoint_id: string }>('POST', '/v1/endpoints', {
    url: `${bench.receiverOrigin}/held`,
    subscribed_events: ['bench.held'],
  })
  await tenant('PATCH', `/v1/endpoints/${endpoint_id}`, { is_active: false })
  const without: Micros[] = []
  const withThem: Micros[] = []
  for (let turn = 0; turn < TURNS; turn++) {
    without.push(await measure(bench))
    await holdMany(sql, 'bench', endpoint_id, HELD)
    withThem.push(await measure(bench))
    await forget(sql, endpoint_id)
  }
  await sql.end()
  return { held: HELD, without: mean(without), withThem: mean(withThem) }
}

async function measure(bench: Bench): Promise<Micros> {
  const published = await measurePublish(bench, 64)
  const drained = await measureDrain(bench)
  return {
    // Plain events go by a function of their own.
    publish: microsEach(published.cost, /waybill\.publish(_plain)?\(/, published.events),
    claim: microsEach(drained.cost, /waybill\.claim_due\(/, drained.deliveries),
  }
}

function microsEach({ topStatements }: Cost, name: RegExp, items: number): number {
  const found = topStatements?.filter(({ query }) => name.test(query))
  return found?.length ? (found.reduce((sum, { total_ms }) => sum + total_ms, 0) * 1000) / items : Number.NaN
}

const mean = (all: Micros[]): Micros => ({
  publish: all.reduce((sum, { publish }) => sum + publish, 0) / all.length,
  claim: all.reduce((sum, { claim }) => sum + claim, 0) / all.length,
})

/** Held deliveries as publishing would have left them. */
export async function holdMany(sql: Pool, tenantId: string, endpointId: string, count: number): Promise<void> {
  await sql`
    with made as materialized (
      select waybill.make_id(now() - n * interval '10 microseconds') as id from generate_series(1, ${count}) n
    ), events as (
      insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
      select ${tenantId}, id, 'bench.held', '{}', 1 from made
    )
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select ${tenantId}, waybill.make_delivery_id(id), id, ${endpointId}, 'bench.held', true, now() from made`
  await sql`
    insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held) values (${tenantId}, ${endpointId}, ${count}, ${count})
    on conflict (tenant_id, endpoint_id) do update set pending = s.pending + excluded.pending, held = s.held + excluded.held`
}

async function forget(sql: Pool, endpointId: string): Promise<void> {
  await sql`delete from waybill.deliveries where endpoint_id = ${endpointId}`
  await sql`delete from waybill.events where event_type = 'bench.held'`
  await sql`update waybill.endpoint_stats set pending = 0, held = 0 where endpoint_id = ${endpointId}`
  await sql`vacuum analyze waybill.deliveries`
  await sql`vacuum analyze waybill.events`
}
