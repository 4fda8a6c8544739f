import { type Db, type Pool, transact } from '../db.ts'
import { DELIVERIES } from '../queue.ts'

type State = { endpoint_id: string; status: string; held: boolean; hold: boolean; ordered: boolean }

/**
 * The returned function makes a delivery due now. A finished one becomes pending again with a full set of retries, and its attempt
 * numbers go on; one that waits for a retry waits no longer; one that is being attempted, or is held, stays as it is; one whose
 * job is lost gets another. The delivery's row is locked, so any number of replays at once queue it once. Those that come
 * while one runs share the next run, or they would keep all connections waiting for the lock. False if the tenant has no
 * such delivery.
 */
export function createReplay(pool: Pool): (tenantId: string, deliveryId: string) => Promise<boolean> {
  const last = new Map<string, Promise<boolean>>()
  /** Runs that have not begun. */
  const next = new Map<string, Promise<boolean>>()

  async function runAfter(before: Promise<unknown> | undefined, key: string, tenantId: string, deliveryId: string) {
    await before?.catch(() => {})
    next.delete(key)
    // The dead-letter worker locks the job before the delivery, so the two can deadlock.
    return await transact(pool, (sql) => replay(sql, tenantId, deliveryId))
  }

  return async (tenantId, deliveryId) => {
    const key = `${tenantId} ${deliveryId}`
    const shared = next.get(key)
    if (shared !== undefined) return await shared
    const mine = runAfter(last.get(key), key, tenantId, deliveryId)
    next.set(key, mine)
    last.set(key, mine)
    try {
      return await mine
    } finally {
      if (last.get(key) === mine) last.delete(key)
    }
  }
}

async function replay(sql: Db, tenantId: string, deliveryId: string): Promise<boolean> {
  // Retention also locks the event first, so whoever comes second sees what the first has done.
  const [delivery] = await sql<State[]>`
    with kept as materialized (
      select event_id from waybill.events where tenant_id = ${tenantId}
        and event_id = (select event_id from waybill.deliveries where tenant_id = ${tenantId} and delivery_id = ${deliveryId}) for key share
    )
    select d.endpoint_id, d.status, d.held, p.ordered,
      not p.is_active or p.ordered or p.max_per_second is not null or coalesce(s.breaker <> 'closed', false) as hold
    from kept join waybill.deliveries d using (event_id) join waybill.endpoints p using (tenant_id, endpoint_id)
    left join waybill.endpoint_stats s using (tenant_id, endpoint_id)
    where d.tenant_id = ${tenantId} and d.delivery_id = ${deliveryId} for update of d`
  if (delivery === undefined) return false
  const isFinished = delivery.status === 'delivered' || delivery.status === 'dead_lettered'
  if (isFinished) {
    await reopen(sql, tenantId, deliveryId, delivery)
    // If not everything may be sent at once, it stands in line like any other.
    if (delivery.hold) return await probeNow(sql, tenantId, delivery)
  } else if (delivery.held) return await probeNow(sql, tenantId, delivery)
  const hurried = await sql`
    update pgboss.job set start_after = now(), priority = greatest(priority, waybill.retry_priority(now())) where name = ${DELIVERIES} and id = ${deliveryId} and state < 'active' and start_after > now()
    returning id`
  if (hurried.length > 0) {
    await sql`update waybill.deliveries set next_attempt_at = now(), updated_at = now() where tenant_id = ${tenantId} and delivery_id = ${deliveryId}`
    await sql`select pg_notify('waybill_due', 'retry')`
    // To a failing endpoint it is not sent at once: it is held when it is claimed, and may be the next probe.
    if (delivery.hold) await probeNow(sql, tenantId, delivery)
  }
  // A job that failed for good would swallow the new one of the same id.
  await sql`delete from pgboss.job where name = ${DELIVERIES} and id = ${deliveryId} and state > 'active'`
  // Queueing it again would wait for whoever settles the job, and that waits for this delivery.
  const queued = await sql`select from pgboss.job where name = ${DELIVERIES} and id = ${deliveryId}`
  if (queued.length > 0) return true
  if (!isFinished) {
    // Its job is lost. Held, it comes back with the retries that it has left, and its attempt numbers go on.
    await sql`
      update waybill.deliveries set held = true, spent_retries = greatest(0, attempt_count - earlier_attempts), next_attempt_at = null, updated_at = now()
      where tenant_id = ${tenantId} and delivery_id = ${deliveryId}`
    await countHeld(sql, tenantId, delivery.endpoint_id)
    return true
  }
  await sql`
    select waybill.enqueue(json_build_array(json_build_object('id', ${deliveryId}::text, 'priority', -floor(tag)::int,
      'data', json_build_object('tenant_id', ${tenantId}::text)))::text), pg_notify('waybill_due', '') from waybill.queue_clock`
  return true
}

/** A finished delivery becomes pending, with a full set of retries. */
async function reopen(
  sql: Db,
  tenantId: string,
  deliveryId: string,
  { endpoint_id, status, hold }: State,
): Promise<void> {
  await sql`
    update waybill.deliveries set status = 'pending', held = ${hold}, earlier_attempts = attempt_count, spent_retries = 0, dead_letter_reason = null,
      completed_at = null, next_attempt_at = ${hold ? null : sql`now()`}, updated_at = now()
    where tenant_id = ${tenantId} and delivery_id = ${deliveryId}`
  await sql`
    select waybill.count_deliveries(${[tenantId, tenantId]}, ${[endpoint_id, endpoint_id]}::uuid[],
      ${[status, 'pending']}::waybill.delivery_status[], ${[-1, 1]})`
  if (hold) await countHeld(sql, tenantId, endpoint_id)
}

/**
 * Whoever asks for a replay believes that the endpoint answers again, so its next probe is due now, and if it is ordered also the
 * retry that all others wait for.
 */
async function probeNow(sql: Db, tenantId: string, { endpoint_id, ordered }: State): Promise<true> {
  if (ordered) await sql`select waybill.hurry_ordered(${tenantId}, ${endpoint_id})`
  await sql`
    with hurried as (
      update waybill.endpoint_stats set next_probe_at = now()
      where tenant_id = ${tenantId} and endpoint_id = ${endpoint_id} and breaker = 'open' and probing is null and next_probe_at > now() returning 1
    )
    select pg_notify('waybill_held', '') from hurried`
  return true
}

const countHeld = (sql: Db, tenantId: string, endpointId: string) =>
  sql`select waybill.count_held(${[tenantId]}, ${[endpointId]}::uuid[], ${[1]}), pg_notify('waybill_held', '')`
