import type { PgBoss } from 'pg-boss'
import { isRefusal } from '../db/errors.ts'
import type { Db, Pool } from '../db/open.ts'
import { transact } from '../db/retried.ts'
import { fragment } from '../db/statement.ts'
import type { Log } from '../log.ts'
import { bossDb, DEAD_LETTERS, DELIVERIES, type DeliveryJob } from '../queue.ts'
import { announce } from './announce.ts'
import { createPortion } from './portion.ts'

const MAX_BATCH = 100

/**
 * The service's own events: a dead letter of one of these is not announced, or announcing would never end. Nor is one for which
 * the month had no attempt left: there is none for the announcement either, so it would become a dead letter for each endpoint.
 */
const OPERATIONAL = new Set(['endpoint.disabled', 'endpoint.recovered', 'delivery.dead_lettered'])

type DeadLetter = {
  tenant_id: string
  delivery_id: string
  event_id: string
  endpoint_id: string
  event_type: string
  dead_letter_reason: string
  attempt_count: number
}

/** Only a job that was put there by hand has no data. */
type Job = { id: string; sourceId?: string | null; data: (DeliveryJob & { delivery_id?: string }) | null }

/**
 * The returned function takes one batch from the dead letter queue, a smaller one after one that took too long, and returns how many jobs
 * it had. All in one transaction, since jobs that are fetched and then not finished are left alone for a minute.
 */
export function createDeadLetterTaker(pool: Pool, boss: PgBoss, log: Log): () => Promise<number> {
  const portion = createPortion(MAX_BATCH)
  return async () => {
    const batchSize = portion.most()
    const fetch = (sql: Db): Promise<Job[]> =>
      boss.fetch<Job['data']>(DEAD_LETTERS, { batchSize, includeMetadata: true, db: bossDb(sql) })
    const take = () =>
      transact(pool, async (sql) => {
        const jobs = await fetch(sql)
        return { taken: jobs.length, letters: jobs.length === 0 ? [] : await settle(sql, boss, jobs) }
      })
    const { taken, letters } = await portion.try(batchSize, take).catch(async (error: unknown) => {
      // Here that minute is wanted: it lets others through, should one of these be at fault.
      if (isRefusal(error)) await fetch(pool)
      throw error
    })
    for (const letter of letters) log.warn(letter, 'delivery.dead_lettered')
    return taken
  }
}

/**
 * Most of the deliveries were dead-lettered with their last attempt; the others lost their worker in it and are marked
 * `worker_lost` here. Only whoever removes the failed job may mark the delivery, so a replay that came first wins.
 */
async function settle(sql: Db, boss: PgBoss, jobs: Job[]): Promise<DeadLetter[]> {
  const tenants = jobs.map((job) => job.data?.tenant_id ?? null)
  const deliveries = jobs.map((job) => job.data?.delivery_id ?? job.sourceId ?? job.id)
  const sorted = deliveries.toSorted()
  // By statistics of an emptier queue, all of it would be gone through for those whose failed job is left.
  await sql`set local enable_seqscan = off`
  // Listed, not only bounded: with statistics from before a backlog, all deliveries within the bounds would be gone through.
  const within = fragment`d.delivery_id = any(${sorted}::uuid[]) and d.delivery_id between ${sorted[0] as string} and ${sorted.at(-1) as string}`
  await sql`
    with failed as (
      delete from pgboss.job where name = ${DELIVERIES} and id = any(${deliveries}::uuid[]) and state = 'failed'
      returning id, data ->> 'tenant_id' as tenant_id, retry_count + 1 as tries
    ), lost as (
      select d.tenant_id, d.delivery_id, d.endpoint_id, p.url, d.status, d.attempt_count, d.earlier_attempts + f.tries as made
      from failed f
      join waybill.deliveries d on d.tenant_id = f.tenant_id and d.delivery_id = f.id
      join waybill.endpoints p on p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id
      where d.status in ('pending', 'retrying') and ${within} for update of d
    )
    select waybill.record_lost(array_agg(tenant_id), array_agg(delivery_id), array_agg(endpoint_id), array_agg(url), array_agg(made),
      array_agg(attempt_count), array_agg(status), true)
    from lost having count(*) > 0`
  await boss.deleteJob(
    DEAD_LETTERS,
    jobs.map((job) => job.id),
    { db: bossDb(sql) },
  )
  const letters = await sql<DeadLetter[]>`
    select d.tenant_id, d.delivery_id, d.event_id, d.endpoint_id, d.event_type, d.dead_letter_reason, d.attempt_count
    -- One that was replayed may have come twice.
    from (select distinct * from unnest(${tenants}::text[], ${deliveries}::uuid[]) as j (tenant_id, delivery_id)) j
    join waybill.deliveries d using (tenant_id, delivery_id)
    where d.status = 'dead_lettered' and ${within}`
  const told = letters.filter(
    (letter) => !OPERATIONAL.has(letter.event_type) && letter.dead_letter_reason !== 'monthly_attempt_limit',
  )
  await announce(sql, 'delivery.dead_lettered', told)
  return letters
}
