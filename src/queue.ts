import { PgBoss, systemClock } from 'pg-boss'
import type { Config } from './config.ts'
import type { Db } from './db/open.ts'
import { startOptions } from './db/settings.ts'
import { readDatabaseUrl } from './db/url.ts'
import type { Log } from './log.ts'

/**
 * One job per delivery that is due or waits for a retry, with the delivery's id, so that a delivery can never be queued twice; none
 * while it is held; or one for several that were published or released together (sql/functions/bundles.sql).
 */
export const DELIVERIES = 'deliveries'
/** Deliveries that were given up on, until the dead-letter worker has announced them and, if they lost their worker, marked them. */
export const DEAD_LETTERS = 'dead_letters'

/** What a job carries. */
export type DeliveryJob = {
  tenant_id: string
  /** Its place in fair order (waybill.queue_clock). The job's priority is this, negated and rounded, until it returns from a claim. */
  tag?: number
  /** For a paced endpoint: when the attempt may start, in milliseconds since 1970 by the database's clock. */
  slot?: number
  /** Of a bundle: the deliveries that it stands for and that are not settled yet. */
  ids?: string[]
}

/** How deliveries are retried. */
export type QueueSettings = Pick<Config, 'RETRY_LIMIT' | 'RETRY_DELAY_SECONDS' | 'RETRY_DELAY_MAX_SECONDS'>

const FOREVER_SECONDS = 10 * 365 * 86_400
/**
 * As long as pg-boss allows, until `updateQueues` has made it longer: lost workers are found by their silence (flow/take-back.ts),
 * allowing for a clock that leaps ahead, as pg-boss does not. A job keeps the value it was queued with.
 */
const LONGEST_CLAIM_SECONDS = 86_400
/** Options for the driver, which pg-boss passes on without documenting them. */
const NEVER_HANGING = {
  connectionTimeoutMillis: 5000,
  query_timeout: 14_000,
  statement_timeout: 13_000,
  idle_in_transaction_session_timeout: 10_000,
  keepAlive: true,
  keepAliveInitialDelayMillis: 5000,
}

/**
 * By the wall clock, pg-boss would put off what is scheduled by as much as that was set back. It corrects any clock by the
 * database's, every ten minutes.
 */
const STEADY_CLOCK = { ...systemClock, now: () => performance.timeOrigin + performance.now() }

/** Where pg-boss connects to, with `settings` and those that its statements need, whatever server, database or role are set to. */
export function bossAddress(url: string, settings: Record<string, string> = {}) {
  const address = readDatabaseUrl(url)
  return { ...address, options: startOptions(address.options, settings) }
}

/**
 * pg-boss on connections of its own. Once started it supervises its queues, for which it reads all jobs once a minute, and runs what is
 * scheduled. What must be quick is done elsewhere (flow/take-back.ts).
 */
export function createBoss(url: string, log: Log): PgBoss {
  const boss = new PgBoss({
    ...bossAddress(url),
    ...NEVER_HANGING,
    application_name: 'waybill queue',
    max: 2,
    migrate: false,
    // Never warns: our own metrics say it better.
    warningQueueSize: 1_000_000_000,
    clock: STEADY_CLOCK,
  })
  boss.on('error', (error) => log.error({ err: error }, 'queue.error'))
  boss.on('warning', (warning) => log.warn({ warning: warning.message }, 'queue.warning'))
  return boss
}

/** Ends what it is doing; others do it again. */
export async function stopBoss(boss: PgBoss): Promise<void> {
  // It would complain that what it has just ended cannot be finished.
  boss.removeAllListeners('error').on('error', () => {})
  await boss.stop({ graceful: false })
}

/** The two queues and their settings, as pg-boss makes and updates them. */
export const queues = (settings: QueueSettings) => {
  // No job is ever dropped for being old.
  const keep = { retentionSeconds: FOREVER_SECONDS, deleteAfterSeconds: 3600 }
  return [
    { name: DEAD_LETTERS, options: { ...keep, retryLimit: 1000, retryDelay: 1, expireInSeconds: 60 } },
    {
      name: DELIVERIES,
      options: {
        ...keep,
        deadLetter: DEAD_LETTERS,
        retryLimit: settings.RETRY_LIMIT,
        retryDelay: settings.RETRY_DELAY_SECONDS,
        retryDelayMax: settings.RETRY_DELAY_MAX_SECONDS,
        retryBackoff: true,
        expireInSeconds: LONGEST_CLAIM_SECONDS,
        // Without a heartbeat, claims would not be dated.
        heartbeatSeconds: LONGEST_CLAIM_SECONDS,
      },
    },
  ]
}

/**
 * Sets how jobs that are queued from now on are retried. And for how long they may be claimed: pg-boss, which allows a day at
 * most, would fail all that is under way when the database's clock leaps ahead by more.
 */
export async function updateQueues(boss: PgBoss, settings: QueueSettings): Promise<void> {
  for (const { name, options } of queues(settings)) await boss.updateQueue(name, options)
  const claimed = 'update pgboss.queue set expire_seconds = $1, heartbeat_seconds = $1 where name = $2'
  await boss.getDb().executeSql(claimed, [FOREVER_SECONDS, DELIVERIES])
}

/** Lets pg-boss run a statement on our transaction, so that a job and what it stands for commit together. */
export const bossDb = (sql: Db) => ({
  executeSql: async (text: string, values: unknown[] = []) => ({
    rows: await sql.text(text, values),
  }),
})
