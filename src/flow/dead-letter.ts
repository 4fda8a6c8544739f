import type { PgBoss } from 'pg-boss'
import { type Db, type Pool, transact } from '../db/open.ts'
import { fragment } from '../db/statement.ts'
import type { Log } from '../log.ts'
import { bossDb, DEAD_LETTERS, DELIVERIES, type DeliveryJob } from '../queue.ts'

const MAX_BATCH = 100

/**
 * The service's own events: a dead letter of one of these is not announced, or announcing would never end. Nor is one for which the
 * month had no attempt left, as there is none for the announcement either, which would be a dead letter for each endpoint.
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

/**
 * Takes one batch from the dead letter queue, in one transaction, and returns how many jobs it held. Most of their deliveries
 * were dead-lettered with their last attempt; the others lost their worker in it and are marked `worker_lost` here. Only who
 * removes the failed job may mark the delivery, so a replay that was faster wins.
 */
export async function takeDeadLetters(pool: Pool, boss: PgBoss, log: Log): Promise<number> {
  const jobs = await boss.fetch<DeliveryJob & { delivery_id?: string }>(DEAD_LETTERS, {
    batchSize: MAX_BATCH,
    includeMetadata: true,
    db: bossDb(pool),
  })
  if (jobs.length === 0) return 0
  const tenants = jobs.map((job) => job.data.tenant_id)
  const deliveries = jobs.map((job) => job.data.delivery_id ?? job.sourceId ?? job.id)
  const sorted = deliveries.toSorted()
  const within = fragment`d.delivery_id between waybill.first_delivery_id(${sorted[0] as string}) and waybill.last_delivery_id(${sorted.at(-1) as string})`
  const lines = await transact(pool, async (sql) => {
    await sql`
      with failed as (
        delete from pgboss.job where name = ${DELIVERIES} and id = any(${deliveries}::uuid[]) and state = 'failed'
        returning id, data ->> 'tenant_id' as tenant_id, retry_count + 1 as tries
      ), lost as (
        select d.tenant_id, d.delivery_id, d.endpoint_id, d.status, d.attempt_count, d.earlier_attempts + f.tries as made
        from failed f join waybill.deliveries d on d.tenant_id = f.tenant_id and d.delivery_id = f.id
        where d.status in ('pending', 'retrying') and ${within} for update of d
      ), marked as (
        update waybill.deliveries d set status = 'dead_lettered', dead_letter_reason = 'worker_lost', attempt_count = l.made,
          last_attempt_at = now(), last_status_code = null, last_error = 'worker_lost', next_attempt_at = null, updated_at = now(), completed_at = now()
        from lost l where d.tenant_id = l.tenant_id and d.delivery_id = l.delivery_id
      ), attempted as (
        insert into waybill.attempts (tenant_id, delivery_id, endpoint_id, url, attempt_number, started_at, duration_ms, error, error_message,
          response_truncated, retry_state)
        select l.tenant_id, l.delivery_id, l.endpoint_id, p.url, n, now(), 0, 'worker_lost',
          'the worker was lost during this attempt; the request may have arrived', false,
          case when n = l.made then 'exhausted' else 'will_retry' end::waybill.retry_state
        from lost l join waybill.endpoints p using (tenant_id, endpoint_id), generate_series(l.attempt_count + 1, l.made) n
        returning tenant_id, endpoint_id, attempt_number
      ), counted as (
        insert into waybill.attempt_counts as c (tenant_id, endpoint_id, hour, status_code, attempts, retries, duration_ms)
        select tenant_id, endpoint_id, date_trunc('hour', now(), 'utc'), 0, count(*), count(*) filter (where attempt_number > 1), 0
        from attempted group by tenant_id, endpoint_id order by tenant_id, endpoint_id
        on conflict (tenant_id, endpoint_id, hour, status_code) do update set
          attempts = c.attempts + excluded.attempts, retries = c.retries + excluded.retries
      )
      select waybill.count_deliveries(
        array_agg(tenant_id) || array_agg(tenant_id), array_agg(endpoint_id) || array_agg(endpoint_id),
        array_agg(status) || array_fill('dead_lettered'::waybill.delivery_status, array[count(*)::int]),
        array_fill(-1, array[count(*)::int]) || array_fill(1, array[count(*)::int]))
      from lost having count(*) > 0`
    await boss.deleteJob(
      DEAD_LETTERS,
      jobs.map((job) => job.id),
      { db: bossDb(sql) },
    )
    const letters = await sql<DeadLetter[]>`
      select d.tenant_id, d.delivery_id, d.event_id, d.endpoint_id, d.event_type, d.dead_letter_reason, d.attempt_count
      from unnest(${tenants}::text[], ${deliveries}::uuid[]) as j (tenant_id, delivery_id) join waybill.deliveries d using (tenant_id, delivery_id)
      where d.status = 'dead_lettered' and ${within}`
    await announce(
      sql,
      letters.filter(
        (letter) => !OPERATIONAL.has(letter.event_type) && letter.dead_letter_reason !== 'monthly_attempt_limit',
      ),
    )
    return letters
  })
  for (const line of lines) log.warn({ ...line }, 'delivery.dead_lettered')
  return jobs.length
}

async function announce(sql: Db, letters: DeadLetter[]): Promise<void> {
  if (letters.length === 0) return
  const payloads = letters.map(({ tenant_id, ...letter }) => JSON.stringify(letter))
  await sql`
    select waybill.announce(tenant_id, endpoint_id, 'delivery.dead_lettered', payload)
    from unnest(${letters.map(({ tenant_id }) => tenant_id)}::text[], ${letters.map(({ endpoint_id }) => endpoint_id)}::uuid[], ${payloads}::text[])
      as l (tenant_id, endpoint_id, payload)`
}
