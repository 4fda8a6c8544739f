import type { Db, Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { DELIVERIES } from '../queue.ts'
import { LAPSE_MS } from './claim.ts'
import { followLeaps } from './database-clock.ts'
import { type Loop, startLoop } from './loop.ts'
import { createThoroughness } from './thorough.ts'

const LOOK_MS = 1000
/**
 * How long nothing is taken back after the database was away, locked or read-only, or this process has started: longer than workers
 * take to touch their claims, which they could not do meanwhile.
 */
const AFTER_ABSENCE_MS = 5000
/**
 * After a leap of the database's clock, as by a failover to a machine whose clock is ahead, every claim seems untouched for that long.
 * If it is no more than this, a worker that touches its claims every 3 seconds still does so in time.
 */
const MAX_LEAP_MS = 3000
/** A delivery that loses this many workers in a row may be the cause: it waits as after a failure, apart from the others. */
const SUSPECT = 3
/** After this many it is taken for the cause, and dead-lettered. */
const POISON = 5
const MAX_BATCH = 500

/**
 * Puts the jobs of lost workers back in the queue, due at once, before all others. Their next claim counts as a retry. That is
 * pg-boss's fence against a worker that was only thought lost, and the gap that it leaves in the attempt numbers is filled when
 * the next attempt is recorded. A delivery with no retry left, or one that loses its worker again and again, fails by way of
 * pg-boss's dead letter queue.
 */
export function startTakingBack(deps: { pool: Pool; wake: () => void; log: Log }): Loop {
  const { pool, log } = deps
  let lookFrom = 0
  const wait = () => {
    lookFrom = performance.now() + AFTER_ABSENCE_MS
  }
  wait()
  const leapt = followLeaps(pool)
  const look = createThoroughness()
  return startLoop({
    name: 'take-back',
    idleMs: LOOK_MS,
    log,
    async run() {
      const found = await look(async (thorough) => {
        // Also while this waits: the absence may go on, and workers need their time from its end on.
        await reach(pool)
        if ((await leapt()) > MAX_LEAP_MS) wait()
        return performance.now() < lookFrom ? [] : await takeBack(pool, thorough)
      }).catch((error: unknown) => {
        wait()
        throw error
      })
      if (found.length === 0) return false
      deps.wake()
      for (const lost of found) log.warn(lost, 'delivery.worker_lost')
      // Where bundles are small, there may be more though these are not `MAX_BATCH`.
      return true
    },
  })
}

/**
 * Throws unless claims can be touched at this moment. It does not wait for a lock for which touching them may be waiting, too, but
 * for the moment for which vacuum takes one to cut off the table's empty end.
 */
const reach = (pool: Pool) =>
  pool.text(`do $$ begin
    perform set_config('lock_timeout', '500ms', true);
    lock table pgboss.job in row exclusive mode;
    if current_setting('transaction_read_only')::boolean then raise read_only_sql_transaction; end if;
  end $$`)

type Lapsed = {
  tenant_id: string
  delivery_id: string
  retry_count: number
  /** How many attempts in a row lost their worker, this one included. Some of them may have been recorded. */
  crashes: number
  due_now: boolean
}

async function takeBack(pool: Pool, thorough: boolean): Promise<Lapsed[]> {
  return await pool.begin(async (sql) => {
    const lapsed = await sql<Lapsed[]>`
      select * from waybill.take_back(${LAPSE_MS} * interval '1 millisecond', ${SUSPECT}, ${POISON}, ${MAX_BATCH}, ${thorough})`
    const failing = lapsed.filter((job) => !job.due_now)
    if (failing.length > 0) {
      const ids = failing.map((job) => job.delivery_id)
      const fences = failing.map((job) => `${job.delivery_id}:${job.retry_count}`)
      await sql`select from waybill.fail_jobs(${DELIVERIES}, ${ids}::uuid[], null, ${fences}::text[])`
      // This pool keeps plans, as it mostly calls our functions (db/open.ts); what follows is to be planned for the ids at hand.
      await sql`set local plan_cache_mode = 'force_custom_plan'`
      await waitForRetry(sql, failing)
    }
    return lapsed
  })
}

/**
 * Gives deliveries that got a retry a retry's place in the queue, and shows when it is due. The attempts that lost their worker are
 * recorded now: the next one, with which they otherwise are, may be hours away.
 */
async function waitForRetry(sql: Db, failed: Lapsed[]): Promise<void> {
  const ids = failed.map((job) => job.delivery_id).sort()
  await sql`
    select waybill.record_lost(array_agg(tenant_id), array_agg(delivery_id), array_agg(endpoint_id), array_agg(url), array_agg(made),
      array_agg(attempt_count), array_agg(status), false, array_agg(start_after))
    from (
      select d.tenant_id, d.delivery_id, d.endpoint_id, p.url, d.earlier_attempts + j.retry_count + 1 as made, d.attempt_count, d.status,
        j.start_after
      from pgboss.job j
      join waybill.deliveries d on d.tenant_id = j.data ->> 'tenant_id' and d.delivery_id = j.id
      join waybill.endpoints p on p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id
      where j.name = ${DELIVERIES} and j.id = any(${ids}::uuid[]) and j.state = 'retry' and d.status in ('pending', 'retrying')
        and d.delivery_id = any(${ids}::uuid[]) and d.delivery_id between ${ids[0] as string} and ${ids.at(-1) as string}
      order by d.delivery_id for update of d
    ) lost having count(*) > 0`
  await sql`
    update pgboss.job set priority = waybill.retry_priority(start_after)
    where name = ${DELIVERIES} and id = any(${ids}::uuid[]) and state = 'retry'`
}
