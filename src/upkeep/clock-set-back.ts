import type { Pool } from '../db/open.ts'
import { followLeaps } from '../flow/database-clock.ts'
import { MAX_SPREAD_SECONDS } from '../flow/spread.ts'
import { createThoroughness } from '../flow/thorough.ts'
import { MAX_RETRY_AFTER_SECONDS } from '../flow/verdict.ts'
import { DEAD_LETTERS, DELIVERIES } from '../queue.ts'

/** How far the database's clock must have gone back for jobs to be looked at. */
const SET_BACK_MS = 3000
const MAX_BATCH = 2000

/**
 * The returned function mends what a database clock that was set back leaves in the future. Until the clock gets there again,
 * tenants would be refused by rate windows that have not begun, paced endpoints would have no time slot and failing ones no
 * probe, endpoints would seem to have just succeeded or failed whatever they do, deliveries would not be due, or would seem to
 * be under way, and nothing that is scheduled would run. Jobs, of which there may be a million, are looked at when the clock has
 * gone back since the last call, and otherwise for up to a fiftieth of the time, as a leap and its correction between two calls
 * go unnoticed. `longestWaitSeconds`: how far ahead a probe may be due.
 */
export function createClockMender(pool: Pool, longestWaitSeconds: number): () => Promise<void> {
  const leapt = followLeaps(pool)
  let isMended = true
  const look = createThoroughness()

  return async () => {
    await pool`delete from waybill.rate_windows where window_start > now() + interval '1 second'`
    await mendEndpoints(pool, longestWaitSeconds)
    await mendSchedules(pool)
    await mendDeadLetters(pool)
    if ((await leapt()) < -SET_BACK_MS) isMended = false
    await look(async (thorough) => {
      // A thorough look that fails is not repeated before its time, as no leap is known of.
      for (let isDone = isMended && !thorough; !isDone; ) isDone = (await mendJobs(pool)) < MAX_BATCH
      isMended = true
    })
  }
}

async function mendEndpoints(pool: Pool, longestWaitSeconds: number): Promise<void> {
  await pool`
    with late as (
      select tenant_id, endpoint_id, next_slot > now() + interval '5 seconds' as slot_is, failing_since > now() + interval '5 seconds' as failure_is,
        breaker = 'open' and next_probe_at > now() + ${longestWaitSeconds + 5} * interval '1 second' as probe_is, held_from > least_id as held_is
      from waybill.endpoint_stats, (select waybill.first_id(now()) as least_id offset 0) ids
      where greatest(next_slot, failing_since, last_success_at, last_failure_at) > now() + interval '5 seconds'
        or breaker = 'open' and next_probe_at > now() + ${longestWaitSeconds + 5} * interval '1 second'
        -- What is published now has a lower id.
        or held_from > least_id
      order by tenant_id, endpoint_id for no key update of endpoint_stats skip locked
    )
    update waybill.endpoint_stats s set
      next_slot = case when slot_is then null else s.next_slot end,
      failing_since = case when failure_is then now() else s.failing_since end,
      next_probe_at = case when probe_is then now() else s.next_probe_at end,
      held_from = case when held_is is not true then s.held_from end,
      last_success_at = case when s.last_success_at > now() then now() else s.last_success_at end,
      last_failure_at = case when s.last_failure_at > now() then now() else s.last_failure_at end
    from late where s.tenant_id = late.tenant_id and s.endpoint_id = late.endpoint_id`
}

/** pg-boss goes by how long ago it last ran what is scheduled, and supervised its queues. */
async function mendSchedules(pool: Pool): Promise<void> {
  await pool`update pgboss.version set cron_on = now() where cron_on > now() + interval '5 seconds'`
  await pool`
    update pgboss.queue set monitor_on = least(monitor_on, now()), monitor_claim_on = least(monitor_claim_on, now()),
      maintain_on = least(maintain_on, now())
    where greatest(monitor_on, monitor_claim_on, maintain_on) > now() + interval '5 seconds'`
}

/** Dead letters that were queued while the clock was ahead are due now. */
async function mendDeadLetters(pool: Pool): Promise<void> {
  await pool`
    update pgboss.job set start_after = least(start_after, now()), started_on = case when started_on > now() then now() else started_on end
    where name = ${DEAD_LETTERS} and state <= 'active' and greatest(start_after, started_on) > now() + interval '5 seconds'`
}

/**
 * Makes first attempts due at once, lets the wait of retries that were last claimed in the future begin now, and treats claims as
 * just touched; a retry that is due later than any may be becomes due at once. Returns how many jobs there were, at most
 * `MAX_BATCH`. Columns that are null stay null: by `started_on` pg-boss tells a retry. One that was given back has the time of that
 * in `heartbeat_on` instead (waybill.unclaim).
 */
async function mendJobs(pool: Pool): Promise<number> {
  // In two statements: Postgres 18 crashes when a single one locks rows, finds them changed meanwhile, and then prunes partitions
  // in another of its parts.
  return await pool.begin(async (sql) => {
    const mended = await sql<{ tenant_id: string; delivery_id: string; due: string; count: number }[]>`
    with late as materialized (
      select id, data ->> 'tenant_id' as tenant_id, data -> 'ids' as bundled, state,
        case when state = 'active' then start_after
          when coalesce(started_on, heartbeat_on) > now() + interval '5 seconds'
            then greatest(now(), start_after - (coalesce(started_on, heartbeat_on) - now()))
          else now() end as due
      from pgboss.job where name = ${DELIVERIES} and (
        state = 'created' and start_after > now() + interval '5 seconds'
        or state = 'retry' and (coalesce(started_on, heartbeat_on) > now() + interval '5 seconds'
          or start_after > now() + (greatest(retry_delay_max, ${MAX_RETRY_AFTER_SECONDS + MAX_SPREAD_SECONDS}) + 5) * interval '1 second')
        or state = 'active' and heartbeat_on > now() + interval '5 seconds')
      limit ${MAX_BATCH} for update skip locked
    ), mended as (
      update pgboss.job j set start_after = due,
        started_on = case when j.started_on > now() then now() else j.started_on end,
        heartbeat_on = case when j.heartbeat_on > now() then now() else j.heartbeat_on end,
        priority = case when j.priority > waybill.first_retry() then j.priority else waybill.retry_priority(due) end,
        -- Without its slot a paced delivery is held when it is claimed, and gets another.
        data = j.data - 'slot'
      from late where j.name = ${DELIVERIES} and j.id = late.id
    )
    select tenant_id, coalesce(m.id::uuid, late.id) as delivery_id, case when state <> 'active' then due::text end as due,
      (select count(*)::int from late) as count
    from late left join lateral jsonb_array_elements_text(bundled) as m (id) on true order by 2`
    const shown = mended.filter(({ due }) => due !== null)
    if (shown.length > 0)
      await sql`
        update waybill.deliveries d set next_attempt_at = due, updated_at = now()
        from unnest(${shown.map((one) => one.tenant_id)}::text[], ${shown.map((one) => one.delivery_id)}::uuid[],
          ${shown.map((one) => one.due)}::timestamptz[]) as f (tenant_id, delivery_id, due)
        where d.tenant_id = f.tenant_id and d.delivery_id = f.delivery_id
          and d.delivery_id between ${shown[0]?.delivery_id as string} and ${shown.at(-1)?.delivery_id as string}`
    return mended[0]?.count ?? 0
  })
}
