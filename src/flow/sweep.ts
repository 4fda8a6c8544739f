import type { Pool } from '../db.ts'
import type { Log } from '../log.ts'
import { DELIVERIES } from '../queue.ts'
import { type Loop, startLoop } from './loop.ts'

const SWEEP_MS = 20_000
/** What changed a moment ago may be in the middle of a step; what has been due for this long is not. */
const OVERDUE_SECONDS = 15
const MAX_BATCH = 1000

/**
 * The net under the queue: a delivery that is due, not held, and has no job (rows were deleted behind our back, a
 * backup was put together from two moments) is held, and so comes back with the retries it had. One process at a time.
 * And rate windows that have not begun, since the database's clock was ahead, would refuse their tenants until they have.
 */
export function startSweep({ pool, log }: { pool: Pool; log: Log }): Loop {
  return startLoop({
    name: 'sweep',
    idleMs: SWEEP_MS,
    log,
    async run() {
      await pool`delete from waybill.rate_windows where window_start > now() + interval '1 second'`
      const [swept] = await pool<{ count: number }[]>`
        with mine as (
          select pg_try_advisory_xact_lock(hashtext('waybill.sweep')) as alone
        ), lost as (
          select d.tenant_id, d.delivery_id, d.endpoint_id
          from mine, waybill.endpoint_stats s
          join waybill.deliveries d on d.tenant_id = s.tenant_id and d.endpoint_id = s.endpoint_id
            and d.status in ('pending', 'retrying') and not d.held
          where mine.alone and s.pending + s.retrying > s.held
            and greatest(d.next_attempt_at, d.updated_at) < now() - ${OVERDUE_SECONDS} * interval '1 second'
            and not exists (select from pgboss.job j where j.name = ${DELIVERIES} and j.id = d.delivery_id)
          limit ${MAX_BATCH} for update of d skip locked
        ), held as (
          update waybill.deliveries d set held = true, spent_retries = greatest(0, d.attempt_count - d.earlier_attempts), next_attempt_at = null, updated_at = now()
          from lost l where d.tenant_id = l.tenant_id and d.delivery_id = l.delivery_id
        )
        select count(*)::int, waybill.count_held(array_agg(tenant_id), array_agg(endpoint_id), array_fill(1, array[count(*)::int])), pg_notify('waybill_held', '')
        from lost having count(*) > 0`
      if (swept === undefined) return false
      log.warn({ deliveries: swept.count }, 'sweep.jobs_recreated')
      return swept.count === MAX_BATCH
    },
  })
}
