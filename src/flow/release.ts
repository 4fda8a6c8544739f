import type { Pool } from '../db.ts'
import type { Log } from '../log.ts'
import type { Lanes } from './lanes.ts'
import { type Loop, startLoop } from './loop.ts'

/** What is held is looked at this often, and besides whenever something says that more may go. */
const LOOK_MS = 250
/** Looks that are asked for come no closer than this, so that one serves many settled attempts. */
const PAUSE_MS = 10
const MAX_LANES = 500

/**
 * Puts held deliveries back in the queue as their endpoints can take them: probes when they are due, the rest in chunks
 * that this worker has room for (its lanes tell). `leaseSeconds` is how long a probe may be
 * under way before another is sent in its place.
 */
export function startReleaser(deps: { pool: Pool; lanes: Lanes; leaseSeconds: number; log: Log }): Loop {
  const { pool, lanes } = deps
  return startLoop({
    name: 'release',
    idleMs: LOOK_MS,
    pauseMs: PAUSE_MS,
    log: deps.log,
    async run() {
      // More than one look can hold take turns by chance.
      const candidates = await pool<{ tenant_id: string; endpoint_id: string }[]>`
        select s.tenant_id, s.endpoint_id from waybill.endpoint_stats s join waybill.endpoints e using (tenant_id, endpoint_id)
        where s.held > 0 and e.is_active and (s.breaker <> 'open' or s.next_probe_at <= now()) order by random() limit ${MAX_LANES}`
      // What would find no slot would be held again at once.
      const spare = new Map<string, number>()
      const hasSpare = (lane: { tenant_id: string; endpoint_id: string }) => {
        const left = spare.get(lane.tenant_id) ?? lanes.spare(lane.tenant_id)
        const quick = lanes.busy(lane.endpoint_id) < lanes.pace(lane.endpoint_id)
        if (!quick) spare.set(lane.tenant_id, left - 1)
        return quick || left > 0
      }
      // Half a lane's worth at least: a statement for each settled attempt would cost more than the attempt.
      const roomy = candidates.filter((lane) => lanes.isRoomy(lane.endpoint_id) && hasSpare(lane))
      if (roomy.length === 0) return false
      const released = await pool<{ endpoint_id: string; released: number }[]>`
        select endpoint_id, released from waybill.release_held(
          ${roomy.map((lane) => lane.tenant_id)}::text[], ${roomy.map((lane) => lane.endpoint_id)}::uuid[],
          ${roomy.map((lane) => lanes.busy(lane.endpoint_id))}::int[], ${roomy.map((lane) => lanes.room(lane.endpoint_id))}::int[], make_interval(secs => ${deps.leaseSeconds}))`
      for (const { endpoint_id, released: count } of released) lanes.expect(endpoint_id, count)
      return false
    },
  })
}
