import type { Pool } from '../db/open.ts'
import { catchUpLeftOver } from '../flow/catch-up.ts'
import { type Loop, startLoop } from '../flow/loop.ts'
import { replayLeftOver } from '../flow/replay.ts'
import type { Log } from '../log.ts'
import { DELIVERIES } from '../queue.ts'
import { createClockMender } from './clock-set-back.ts'

const SWEEP_MS = 20_000
/** After a look it rests for so many times as long as that took: where millions wait, they are all looked at, one after another. */
const REST = 9
/** A delivery that changed a moment ago may be in the middle of a step; one due and unchanged for this long is not. */
const OVERDUE_SECONDS = 15
const MAX_BATCH = 1000
/** How many deliveries one statement looks at, which takes a fraction of a second; a single endpoint may have more. */
const MAX_LOOKED = 100_000
const MAX_ENDPOINTS = 10_000

type Endpoint = { tenant_id: string; endpoint_id: string }
/** Smaller than any other. */
const NONE: Endpoint = { tenant_id: '', endpoint_id: '00000000-0000-0000-0000-000000000000' }

/**
 * The safety net under the queue: a delivery that is due, not held, and without a job (because rows were deleted by hand, or a
 * backup combines two moments) is held, and so comes back with the retries that it had left. One process at a time looks for
 * these, from endpoint to endpoint, so that it gets through however long the queue is. Each also does what should have followed failures
 * that are recorded.
 */
export function startSweep(deps: { pool: Pool; log: Log; longestWaitSeconds: number }): Loop {
  const { pool, log } = deps
  let last = NONE
  const mendClock = createClockMender(pool, deps.longestWaitSeconds)
  return startLoop({
    name: 'sweep',
    idleMs: SWEEP_MS,
    log,
    async run() {
      if (last === NONE) {
        await mendClock()
        await replayLeftOver(pool).catch((error: unknown) => log.error({ err: error }, 'sweep.replays_failed'))
      }
      const begun = performance.now()
      const before = last
      const next = await endpointsAfter(pool, before)
      last = next.at(-1) ?? NONE
      if (next.length === 0) return false
      await catchUpLeftOver(pool, next).catch((error: unknown) => log.error({ err: error }, 'sweep.not_caught_up'))
      const swept = await sweep(pool, before, last)
      if (swept > 0) log.warn({ deliveries: swept }, 'sweep.jobs_recreated')
      if (swept < MAX_BATCH) return REST * (performance.now() - begun)
      last = before
      return true
    },
  })
}

/** Endpoints with something in the queue, as many as can be looked at together. */
async function endpointsAfter(pool: Pool, last: Endpoint): Promise<Endpoint[]> {
  return await pool<Endpoint[]>`
    select tenant_id, endpoint_id from (
      select *, sum(queued) over (order by tenant_id, endpoint_id) - queued as before from (
        select tenant_id, endpoint_id, pending + retrying - held as queued from waybill.endpoint_stats
        where pending + retrying > held and (tenant_id, endpoint_id) > (${last.tenant_id}, ${last.endpoint_id})
        order by tenant_id, endpoint_id limit ${MAX_ENDPOINTS}) s) s
    where before < ${MAX_LOOKED} order by tenant_id, endpoint_id`
}

/** Looks at the endpoints after `before`, up to `last`. Returns how many deliveries it found, at most `MAX_BATCH`. */
async function sweep(pool: Pool, before: Endpoint, last: Endpoint): Promise<number> {
  // In two statements: Postgres 18 crashes when a single one locks rows, finds them changed meanwhile (by a replay), and then prunes
  // partitions in another of its parts.
  return await pool.begin(async (sql) => {
    // By the statistics of a shorter queue, all that waits anywhere would be read for these endpoints, or all jobs.
    await sql`
      select set_config(name, 'off', true)
      from unnest('{enable_seqscan,enable_bitmapscan,enable_hashjoin,enable_mergejoin,enable_sort,enable_incremental_sort}'::text[]) as s (name)`
    const lost = await sql<(Endpoint & { delivery_id: string })[]>`
      with mine as (
        select pg_try_advisory_xact_lock(hashtext('waybill.sweeping')) as alone
      )
      select d.tenant_id, d.endpoint_id, d.delivery_id from waybill.deliveries d
      -- A query of its own: nothing is read unless that is so.
      where (select alone from mine) and (d.tenant_id, d.endpoint_id) > (${before.tenant_id}, ${before.endpoint_id})
        and (d.tenant_id, d.endpoint_id) <= (${last.tenant_id}, ${last.endpoint_id})
        and d.status in ('pending', 'retrying') and not d.held
        and greatest(d.next_attempt_at, d.updated_at) < now() - ${OVERDUE_SECONDS} * interval '1 second'
        and not exists (select from pgboss.job j where j.name = ${DELIVERIES} and j.id = coalesce(d.bundle, d.delivery_id))
      -- As deliveries_live has them, with what is held, which is passed over there.
      order by d.tenant_id, d.endpoint_id limit ${MAX_BATCH} for update of d skip locked`
    if (lost.length > 0)
      await sql`
        with lost as (
          select * from unnest(${lost.map((one) => one.tenant_id)}::text[], ${lost.map((one) => one.endpoint_id)}::uuid[],
            ${lost.map((one) => one.delivery_id)}::uuid[]) as l (tenant_id, endpoint_id, delivery_id)
        ), held as (
          update waybill.deliveries d set held = true, bundle = null, spent_retries = greatest(0, d.attempt_count - d.earlier_attempts), next_attempt_at = null, updated_at = now()
          from lost l where d.tenant_id = l.tenant_id and d.delivery_id = l.delivery_id
        )
        select waybill.count_held(array_agg(tenant_id), array_agg(endpoint_id), array_agg(delivery_id)), pg_notify('waybill_held', '')
        from lost`
    return lost.length
  })
}
