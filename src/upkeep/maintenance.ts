import { setTimeout as sleep } from 'node:timers/promises'
import type { PgBoss } from 'pg-boss'
import { PATIENCE_MS, type Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { foldCounts } from './fold-counts.ts'
import { makePartitions } from './partitions.ts'
import { runRetention } from './retention.ts'

/** A missed run does no harm: partitions are made a week ahead. */
const PARTITIONS_CRON = '7 * * * *'
const COUNTS_CRON = '22 * * * *'
const QUEUE_CLOCK_CRON = '37 * * * *'
/** A run may take as long as pg-boss allows, or it would begin another beside it. A lost worker shows by its silence. */
const RUNS = { retryLimit: 3, retryDelay: 60, expireInSeconds: 86_400, heartbeatSeconds: 600 }

/**
 * The scheduled work, on pg-boss's cron: whichever worker process comes first does it, so it goes on when one dies, or stops.
 * Throws when `retentionCron` is not a cron expression. Call the returned function before the connections are closed: failures
 * from then on are not logged.
 */
export async function startMaintenance(deps: {
  upkeep: Pool
  /** Its statements may take as long as a day's rows need, or all counts of many tenants. */
  retention: Pool
  boss: PgBoss
  retentionDays: number
  retentionCron: string
  log: Log
}): Promise<() => void> {
  const { upkeep, retention, boss, log } = deps
  let stopping = false
  const work: [string, string, () => Promise<unknown>][] = [
    ['retention', deps.retentionCron, () => runRetention(retention, { days: deps.retentionDays, apply: true, log })],
    ['partitions', PARTITIONS_CRON, () => makePartitions(upkeep)],
    ['attempt_counts', COUNTS_CRON, () => foldCounts(retention)],
    ['queue_clock', QUEUE_CLOCK_CRON, () => rebaseQueue(upkeep)],
  ]
  for (const [name, cron, run] of work) {
    if ((await boss.getQueue(name)) === null) await boss.createQueue(name, RUNS)
    else await boss.updateQueue(name, RUNS)
    await boss.schedule(name, cron, null, { tz: 'UTC' })
    await boss.work(name, { pollingIntervalSeconds: 10 }, async () => {
      try {
        await run()
      } catch (error) {
        // pg-boss tries again, and tells nobody.
        if (!stopping) log.error({ err: error }, `${name}.failed`)
        throw error
      }
    })
  }
  return () => {
    stopping = true
  }
}

/** Lowers the queue's clock, and all places by it, when it is time; then moves what others have meanwhile placed by it as it was. */
async function rebaseQueue(upkeep: Pool): Promise<void> {
  const [rebased] = await upkeep<[{ done: boolean }]>`select waybill.rebase_queue() as done`
  // By then, whoever had read the clock before has committed, or was cancelled.
  if (rebased.done) await sleep(2 * PATIENCE_MS)
  await upkeep`select waybill.gather_strays()`
}
