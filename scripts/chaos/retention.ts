import { Fragment } from '../../src/db/statement.ts'
import { ADMIN_KEY, caller } from '../../test/support/service.ts'
import type { Experiment } from './experiment.ts'
import { failed, round, slowest, triesIn, triesMs, watch } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const KINDS = ['events', 'deliveries', 'attempts', 'idempotency_keys'] as const
type Counts = Record<(typeof KINDS)[number], number>

const LIVE = 100
const CALM_MS = 10_000
/** Below this nobody notices, however much faster it was before. */
const UNNOTICED_MS = 50

const swept: Experiment = {
  id: 'F36',
  title: 'retention, twice at once, of what is old: under load, by two APIs',
  setup: { apis: 2 },
  async run(world) {
    const old = world.quick ? 20_000 : 200_000
    await makeOld(world, old)
    const load = world.load({ rate: 100 })
    await sleep(3000)
    const calm = Date.now()
    await sleep(CALM_MS)
    const run = async (url: string, apply: boolean): Promise<Counts> => {
      const { status, body, text } = await caller(url, ADMIN_KEY)('POST', '/v1/admin/retention/run', {
        body: { apply },
      })
      if (status !== 200) throw new Error(`retention was answered ${status}: ${text}`)
      return body
    }
    const [one, other] = world.fleet.urls()
    const counted = await run(one!, false)
    const begun = Date.now()
    const statements = watchStatements(world)
    const deleted = await Promise.all([run(one!, true), run(other!, true)])
    const ended = Date.now()
    const longestMs = slowest(await statements.stop())
    const again = await run(one!, true)
    await sleep(1000)
    await load.stop()
    const inactive = world.endpoints.find(({ url }) => url.endsWith('/inactive'))!
    const kept = () => world.ledger.at(inactive).length
    await world.call('PATCH', `/v1/endpoints/${inactive.endpointId}`, { body: { is_active: true } })
    await world.quiesce()
    const [before, during] = [triesMs(world, calm, begun), triesMs(world, begun, ended)]
    return {
      figures: {
        rows: KINDS.map((kind) => counted[kind]).join(' + '),
        deleted_by_one: KINDS.map((kind) => deleted[0]![kind]).join(' + '),
        took_s: round((ended - begun) / 1000),
        rows_per_s: Math.round(KINDS.reduce((sum, kind) => sum + counted[kind], 0) / ((ended - begun) / 1000)),
        longest_statement_ms: longestMs,
        publish_p99_ms: during,
        publish_p99_ms_before: before,
        live_kept: kept(),
      },
      conditions: {
        'what is old and finished is counted': KINDS.every((kind) => counted[kind] === old),
        'what was counted is deleted, once': KINDS.every((kind) => deleted[0]![kind] + deleted[1]![kind] === old),
        'nothing is left for another run': KINDS.every((kind) => again[kind] === 0),
        'what still waits is kept, and sent': kept() === LIVE,
        'no statement takes longer than a second': longestMs > 0 && longestMs <= 1000,
        'no publish fails meanwhile': failed(triesIn(world, begun, ended)) === 0,
        'publishing takes at most half as long again, or 50 ms': during <= Math.max(1.5 * before, UNNOTICED_MS),
      },
    }
  },
}

/**
 * Rows as they were left 40 days ago and more, `count` of each kind: half in a day that has no others, a quarter in one
 * with deliveries that still wait for an endpoint that is inactive, a quarter where no day's table is.
 */
async function makeOld({ database: { sql }, tenant, active, endpoints }: World, count: number): Promise<void> {
  await sql.text(`do $$ declare kind text; day timestamptz; part text; begin
    foreach kind in array array['events', 'deliveries', 'attempts'] loop
      foreach day in array array[${day(40)}, ${day(41)}] loop
        part := kind || to_char(day, '_YYYYMMDD');
        execute format('create table waybill.%I (like waybill.%I including all)', part, kind);
        execute format('alter table waybill.%I attach partition waybill.%I for values from (%L) to (%L)', kind, part,
          waybill.first_id(day), waybill.first_id(day + interval '1 day'));
      end loop;
    end loop;
  end $$`)
  const inactive = endpoints.find((endpoint) => !endpoint.active)!
  for (const [ago, share] of [
    [40, 2],
    [41, 4],
    [42, 4],
  ] as const)
    await sql`
      with ids as materialized (
        select waybill.make_id(at) as event_id, at from generate_series(1, ${count / share}) n,
          lateral (select ${new Fragment([day(ago)], [])} + n * interval '20 hours' / ${count / share}::int as at) times
      ), made as materialized (select *, waybill.make_delivery_id(event_id) as delivery_id, 'old-' || event_id as key from ids),
      e as (insert into waybill.events select ${tenant.tenantId}, event_id, 'order.old', '{"old":true}', key, 1 from made),
      k as (insert into waybill.idempotency_keys select ${tenant.tenantId}, key, event_id from made),
      a as (insert into waybill.attempts (tenant_id, delivery_id, attempt_number, endpoint_id, url, status_code, response_truncated, duration_ms, retry_state, started_at)
        select ${tenant.tenantId}, delivery_id, 1, ${active[0]!.endpointId}::uuid, ${active[0]!.url}, 200, false, 9, 'succeeded', at from made)
      insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, attempt_count, updated_at, completed_at)
      select ${tenant.tenantId}, delivery_id, event_id, ${active[0]!.endpointId}::uuid, 'order.old', 'delivered', 1, at, at from made`
  await sql`
    with made as materialized (select waybill.make_id(${new Fragment([day(41)], [])} + n * interval '1 minute') as event_id from generate_series(1, ${LIVE}) n),
    e as (insert into waybill.events select ${tenant.tenantId}, event_id, 'order.old', '{"old":true}', null, 1 from made)
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(event_id), event_id, ${inactive.endpointId}::uuid, 'order.old', true, now() from made`
  await sql`
    insert into waybill.endpoint_stats (tenant_id, endpoint_id, delivered, pending, held)
    values (${tenant.tenantId}, ${active[0]!.endpointId}, ${count}, 0, 0), (${tenant.tenantId}, ${inactive.endpointId}, 0, ${LIVE}, ${LIVE})`
  await sql`analyze`
}

/** The midnight of a day, so many days ago, as SQL. */
const day = (ago: number) => `(date_trunc('day', now(), 'UTC') - interval '${ago} days')`

/** How long the statements of retention take, in milliseconds, without those that wait for the other run. */
const watchStatements = ({ scope, database: { sql } }: World) =>
  watch(scope, 20, async () => {
    const [longest] = await sql<{ ms: number }[]>`
      select coalesce(max(extract(epoch from clock_timestamp() - query_start) * 1000), 0)::int as ms from pg_stat_activity
      where datname = current_database() and application_name like 'waybill % retention' and state = 'active' and wait_event is distinct from 'advisory'`
    return longest
  })

export const retentionExperiments = [swept]
