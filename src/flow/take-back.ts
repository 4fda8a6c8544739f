import type { PgBoss } from 'pg-boss'
import type { Db, Pool } from '../db.ts'
import type { Log } from '../log.ts'
import { bossDb, DELIVERIES } from '../queue.ts'
import { type Loop, startLoop } from './loop.ts'
import { createThoroughness } from './thorough.ts'

const LOOK_MS = 1000
/** A claim that nobody has touched for this long has lost its worker, or its worker has lost the database. */
const LAPSE_SECONDS = 10
/**
 * Longer than workers take to touch what they hold: while the database was away none could, and those that are alive must
 * not lose their claims for it. Nor when this process starts, which may have waited for the database.
 */
const AFTER_ABSENCE_MS = 5000
/** With this, a worker that touches what it holds every 3 seconds still does so in time. */
const MOST_LEAP_MS = 3000
/** A delivery that was lost this often in a row is no bystander: it waits as after a failure, apart from the others. */
const SUSPECT = 3
/** After so many it is taken for what ends its workers, and dead-lettered. */
const POISON = 5
const MAX_BATCH = 500

/**
 * Takes the jobs of workers that were lost back into the queue, due at once, before all that waits. Their next claim
 * counts as a retry, which is pg-boss's fence against the worker that was only thought lost, and the gap that it leaves in
 * the attempts is filled when the next one is recorded. A delivery with no retry left, or that goes down with its worker
 * again and again, fails as pg-boss has it, up to the dead letter queue.
 */
export function startTakingBack(deps: { pool: Pool; boss: PgBoss; wake: () => void; log: Log }): Loop {
  const { pool, boss, log } = deps
  let lookFrom = 0
  const wait = () => {
    lookFrom = performance.now() + AFTER_ABSENCE_MS
  }
  wait()
  const hasLeapt = createLeapWatch()
  const look = createThoroughness()
  return startLoop({
    name: 'take-back',
    idleMs: LOOK_MS,
    log,
    async run() {
      if (performance.now() < lookFrom) return false
      const found = await look(async (thorough) => {
        if (!hasLeapt(await clockOf(pool))) return await takeBack(pool, boss, thorough)
        wait()
        return []
      }).catch((error: unknown) => {
        wait()
        throw error
      })
      if (found.length === 0) return false
      deps.wake()
      for (const { due_now, crashes, ...ids } of found) log.warn({ ...ids, crashes, due_now }, 'delivery.worker_lost')
      return found.length === MAX_BATCH
    },
  })
}

async function clockOf(pool: Pool): Promise<number> {
  const [clock] = await pool<{ now: Date }[]>`select clock_timestamp() as now`
  return (clock as { now: Date }).now.getTime()
}

/**
 * Says whether the database's clock has gone further since the last call than time has, as after a failover to a machine
 * whose clock is ahead: every claim seems to have been left alone for as long.
 */
function createLeapWatch(): (clockMs: number) => boolean {
  let ahead: number | undefined
  return (clockMs) => {
    const before = ahead
    // A late answer seems to set the clock back, and the next one to set it forward again.
    ahead = Math.max(before ?? -Infinity, clockMs - performance.now())
    return before !== undefined && ahead - before > MOST_LEAP_MS
  }
}

type Lapsed = {
  tenant_id: string
  delivery_id: string
  retry_count: number
  /** Attempts in a row that ended so: those that have no record. */
  crashes: number
  due_now: boolean
}

async function takeBack(pool: Pool, boss: PgBoss, thorough: boolean): Promise<Lapsed[]> {
  return await pool.begin(async (sql) => {
    const lapsed = await sql<Lapsed[]>`
      select * from waybill.take_back(${LAPSE_SECONDS} * interval '1 second', ${SUSPECT}, ${POISON}, ${MAX_BATCH}, ${thorough})`
    const failing = lapsed.filter((job) => !job.due_now)
    const jobs = failing.map((job) => ({ id: job.delivery_id, retryCount: job.retry_count }))
    if (jobs.length > 0) {
      await boss.fail(DELIVERIES, jobs, null, { db: bossDb(sql) })
      await waitForRetry(sql, failing)
    }
    return lapsed
  })
}

/** Those that were given a retry get a retry's place in the queue, and show when it is due. */
async function waitForRetry(sql: Db, failed: Lapsed[]): Promise<void> {
  const ids = failed.map((job) => job.delivery_id).sort()
  await sql`
    with waiting as (
      update pgboss.job j set priority = waybill.retry_priority(start_after)
      where j.name = ${DELIVERIES} and j.id = any(${ids}::uuid[]) and j.state = 'retry'
      returning j.id, j.data ->> 'tenant_id' as tenant_id, j.start_after
    )
    update waybill.deliveries d set next_attempt_at = w.start_after, updated_at = now() from waiting w
    where d.tenant_id = w.tenant_id and d.delivery_id = w.id
      and d.delivery_id between waybill.first_delivery_id(${ids[0] as string}) and waybill.last_delivery_id(${ids.at(-1) as string})`
}
