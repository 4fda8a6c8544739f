import type { PgBoss } from 'pg-boss'
import type { Db, Pool } from '../db.ts'
import { bossDb, DELIVERIES, type DeliveryJob, RETRY_PRIORITY } from '../queue.ts'

/** A claimed job with all that its attempt needs. */
export type Claim = {
  tenantId: string
  deliveryId: string
  /** pg-boss's fence: it names this claim and no later one of the same job. */
  job: { id: string; retryCount: number }
  /** The number that this attempt gets, counted over all replays from 1. */
  attemptNumber: number
  /** Attempts that have a record; more than one behind `attemptNumber` when a worker was lost. */
  recordedAttempts: number
  status: 'pending' | 'retrying'
  eventId: string
  eventType: string
  payload: string
  endpointId: string
  url: string
  /** Sealed signing secrets, newest first. */
  secrets: Uint8Array[]
  /** False when the month's attempts are used up: the delivery must not be sent. */
  withinQuota: boolean
  /** How many attempts the endpoint takes at once; null when only the worker's own cap holds. */
  atOnce: number | null
  /** For a paced endpoint: when the attempt may start, in milliseconds of this process's clock; else null. */
  startAt: number | null
  /** The database's clock minus this process's, in milliseconds. */
  clockOffsetMs: number
}

/** What it takes to put a claimed job away. */
export type ClaimedJob = Pick<Claim, 'tenantId' | 'deliveryId' | 'endpointId' | 'job'>

/** `hold`: the endpoint takes nothing now. `obsolete`: the delivery is finished, or gone. */
export type Claimed = { send: Claim[]; hold: ClaimedJob[]; obsolete: ClaimedJob[] }

type Row = {
  tenant_id: string
  delivery_id: string
  retry_count: number
  earlier_attempts: number
  status: Claim['status'] | 'delivered' | 'dead_lettered' | null
  attempt_count: number
  event_id: string
  event_type: string
  payload: string
  endpoint_id: string
  url: string
  signing_secret: Uint8Array
  previous_secret: Uint8Array | null
  sendable: boolean | null
  within_quota: boolean
  at_once: number | null
  slot: number | null
  now: Date
}

/**
 * Claims at most `max` due jobs, first attempts or retries, and reads what they need, in two statements. Every one that
 * may be sent is counted against its tenant's month here, before it is sent, so that the quota holds however many workers
 * claim at once; what goes beyond it is not an attempt and is taken out again when it is recorded.
 */
export async function claimDeliveries(
  pool: Pool,
  boss: PgBoss,
  options: { kind: 'first' | 'retry'; max: number; monthlyAttempts: number },
): Promise<Claimed> {
  const priorities =
    options.kind === 'first'
      ? { minPriority: RETRY_PRIORITY + 1 }
      : { minPriority: await duePriority(pool), maxPriority: RETRY_PRIORITY }
  const jobs = await boss.fetch<DeliveryJob>(DELIVERIES, {
    batchSize: options.max,
    ...priorities,
    db: bossDb(pool),
  })
  if (jobs.length === 0) return { send: [], hold: [], obsolete: [] }
  const ids = jobs.map((job) => job.id).sort()
  const [first, last] = [ids[0] as string, ids.at(-1) as string]
  const tag = Math.max(0, ...jobs.map((job) => job.data.tag ?? 0))
  const asked = Date.now()
  const rows = await pool<Row[]>`
    with jobs as (
      select * from unnest(
        ${jobs.map((job) => job.data.tenant_id)}::text[], ${jobs.map((job) => job.id)}::uuid[],
        ${jobs.map((job) => job.retryCount)}::int[], ${jobs.map((job) => job.data.slot ?? null)}::float8[]
      ) as j (tenant_id, delivery_id, retry_count, slot)
    ), ticked as (
      -- A tag from before the clock was set back (waybill.rebase_queue) is far ahead, and must not undo it.
      update waybill.queue_clock set tag = ${tag} where tag < ${tag} and tag > ${tag} - 1e7
    ), found as (
      select j.*, d.status, d.attempt_count, d.earlier_attempts, d.event_id, d.event_type, d.endpoint_id, e.payload,
        p.url, p.signing_secret,
        case when p.previous_secret_expires_at > now() then p.previous_secret end as previous_secret,
        case when p.ordered then 1 when s.breaker = 'open' then 1 when s.breaker = 'half_open' then s.ramp end as at_once,
        d.status in ('pending', 'retrying') and p.is_active
          and (s.breaker is distinct from 'open' or s.probing = d.delivery_id)
          -- A slot is good for one attempt, and a worker that comes late to it must not crowd those of the next ones.
          and (p.max_per_second is null or coalesce(j.slot > extract(epoch from now()) * 1000 - 250, false)) as sendable
      from jobs j
      left join waybill.deliveries d on d.tenant_id = j.tenant_id and d.delivery_id = j.delivery_id
        and d.delivery_id between waybill.first_delivery_id(${first}) and waybill.last_delivery_id(${last})
      left join waybill.events e on e.tenant_id = d.tenant_id and e.event_id = d.event_id
        and e.event_id between waybill.first_delivery_id(${first}) and waybill.last_delivery_id(${last})
      left join waybill.endpoints p on p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id
      left join waybill.endpoint_stats s on s.tenant_id = d.tenant_id and s.endpoint_id = d.endpoint_id
    ), metered as (
      insert into waybill.usage as u (tenant_id, month, metric, count)
      select tenant_id, date_trunc('month', now() at time zone 'utc')::date, 'attempts', count(*)
      from found where sendable group by tenant_id order by tenant_id
      on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
      returning tenant_id, count
    )
    select f.*, clock_timestamp() as now,
      m.count - count(*) filter (where f.sendable) over (partition by f.tenant_id)
        + count(*) filter (where f.sendable) over (partition by f.tenant_id order by f.delivery_id)
        <= coalesce((t.limits ->> 'monthly_attempts')::bigint, ${options.monthlyAttempts}) as within_quota
    from found f left join waybill.tenants t using (tenant_id) left join metered m using (tenant_id)`
  // Half the round trip went by before the database read its clock.
  const clockOffsetMs = rows[0] ? Math.round(rows[0].now.getTime() - (asked + Date.now()) / 2) : 0
  return sortOut(rows, clockOffsetMs)
}

/** The priority of the retries that are due now: those below it are not. The database's clock decides. */
async function duePriority(pool: Pool): Promise<number> {
  const [due] = await pool<[{ priority: number }]>`select waybill.retry_priority(now()) as priority`
  return due.priority
}

function sortOut(rows: Row[], clockOffsetMs: number): Claimed {
  const claimed: Claimed = { send: [], hold: [], obsolete: [] }
  for (const row of rows) {
    const ids = {
      tenantId: row.tenant_id,
      deliveryId: row.delivery_id,
      endpointId: row.endpoint_id,
      job: { id: row.delivery_id, retryCount: row.retry_count },
    }
    if (row.status !== 'pending' && row.status !== 'retrying') claimed.obsolete.push(ids)
    else if (!row.sendable) claimed.hold.push(ids)
    else {
      claimed.send.push({
        ...ids,
        attemptNumber: row.earlier_attempts + row.retry_count + 1,
        recordedAttempts: row.attempt_count,
        status: row.status,
        eventId: row.event_id,
        eventType: row.event_type,
        payload: row.payload,
        url: row.url,
        secrets: row.previous_secret ? [row.signing_secret, row.previous_secret] : [row.signing_secret],
        withinQuota: row.within_quota,
        atOnce: row.at_once,
        startAt: row.slot === null ? null : row.slot - clockOffsetMs,
        clockOffsetMs,
      })
    }
  }
  return claimed
}

/** Gives places in the month back for attempts that were counted and then not made. */
export async function refundAttempts(sql: Db, tenantIds: string[]): Promise<void> {
  await sql`
    update waybill.usage u set count = u.count - r.n
    from (select tenant_id, count(*) as n from unnest(${tenantIds}::text[]) as t (tenant_id) group by tenant_id order by tenant_id) r
    where u.tenant_id = r.tenant_id and u.month = date_trunc('month', now() at time zone 'utc')::date and u.metric = 'attempts'`
}
