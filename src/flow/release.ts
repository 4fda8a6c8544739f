import { type Pool, retried } from '../db/open.ts'
import type { Log } from '../log.ts'
import type { Lanes } from './lanes.ts'
import { type Loop, startLoop } from './loop.ts'

/** Held deliveries are looked at this often, and whenever more may go out. */
const LOOK_MS = 250
/** The least time between looks, so that one serves many settled attempts. */
const PAUSE_MS = 10
const MAX_LANES = 500

/**
 * Puts held deliveries back in the queue as their endpoints can take them: probes when they are due, the rest in chunks
 * for which this worker's lanes have room. `leaseSeconds`: how long a probe may be under way before another takes its place.
 */
export function startReleaser(deps: { pool: Pool; lanes: Lanes; leaseSeconds: number; log: Log }): Loop {
  const { pool, lanes } = deps
  return startLoop({
    name: 'release',
    idleMs: LOOK_MS,
    pauseMs: PAUSE_MS,
    log: deps.log,
    async run() {
      // If there are more endpoints than one look can take, chance decides whose turn it is. Where one delivery of an ordered endpoint is
      // under way, or waits for its retry, none has a turn.
      const candidates = await pool<{ tenant_id: string; endpoint_id: string; wanted: number }[]>`
        select s.tenant_id, s.endpoint_id,
          least(s.held, case when e.ordered or s.breaker = 'open' then 1 when s.breaker = 'half_open' then 2 * s.ramp end)::float8 as wanted
        from waybill.endpoint_stats s join waybill.endpoints e using (tenant_id, endpoint_id)
        where s.held > 0 and e.is_active and (s.breaker <> 'open' or s.next_probe_at <= now())
          and not (e.ordered and s.pending + s.retrying > s.held) order by random() limit ${MAX_LANES}`
      lanes.noteHeld(new Set(candidates.map((lane) => lane.endpoint_id)), { all: candidates.length < MAX_LANES })
      const granted = candidates
        .map(({ tenant_id, endpoint_id, wanted }) => {
          const busy = lanes.busy(endpoint_id)
          return { tenant_id, endpoint_id, busy, most: busy + lanes.reserve(tenant_id, endpoint_id, wanted) }
        })
        .filter(({ busy, most }) => most > busy)
      if (granted.length === 0) return false
      // A replay that becomes the next probe locks the delivery before the endpoint's counters, so the two can deadlock.
      const released = await retried(
        () => pool<{ endpoint_id: string; released: number }[]>`
          select endpoint_id, released from waybill.release_held(
            ${granted.map((lane) => lane.tenant_id)}::text[], ${granted.map((lane) => lane.endpoint_id)}::uuid[],
            ${granted.map((lane) => lane.busy)}::int[], ${granted.map((lane) => lane.most)}::int[], make_interval(secs => ${deps.leaseSeconds}))`,
      )
      const counts = new Map(released.map((lane) => [lane.endpoint_id, lane.released]))
      for (const { endpoint_id, busy, most } of granted)
        lanes.giveBack(endpoint_id, most - busy - (counts.get(endpoint_id) ?? 0))
      return false
    },
  })
}
