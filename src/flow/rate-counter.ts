import { PATIENCE_MS, type Pool } from '../db/open.ts'
import { createRequestRoom } from '../room.ts'
import { createBatcher } from './batch.ts'

/** The actions that have limits of their own. `events:write` is counted by the publish transaction itself. */
export const RATE_ACTIONS = ['events:write', 'endpoints:write', 'deliveries:replay', 'read'] as const
export type RateAction = (typeof RATE_ACTIONS)[number]

/** Where a request stands in its tenant's rate window; a limit of 0 means there is no limit. */
export type RatePlace = { limit: number; count: number; windowStart: Date; secondsLeft: number }

/** How many requests may be in the course of being counted; as many more may wait for that. */
const MAX_WAITING = 2000

/**
 * Counts requests in fixed windows by the database's clock, exactly, however many processes count: one statement for all
 * requests that arrived while the last one ran. Refused requests count as well. Of a flood, only a tenant's share is counted, and
 * the rest is refused as `service overloaded`.
 */
export function createRateCounter(pool: Pool, windowSeconds: number) {
  type Asked = { tenantId: string; action: RateAction }
  type Counted = Omit<RatePlace, 'limit'>
  const count = createBatcher<Asked, Counted>({
    max: 500,
    owner: ({ tenantId }) => tenantId,
    patienceMs: PATIENCE_MS,
    run: async (asked) => {
      const rows = await pool<{ place: number; window_start: Date; window_left: number }[]>`
        with asked as (
          select * from unnest(${asked.map((a) => a.tenantId)}::text[], ${asked.map((a) => a.action)}::text[]) with ordinality as a (tenant_id, action, i)
        ), counted as (
          insert into waybill.rate_windows as w (tenant_id, action, window_start, count)
          select tenant_id, action, date_bin(make_interval(secs => ${windowSeconds}), clock_timestamp(), 'epoch'), count(*)
          from asked group by tenant_id, action order by tenant_id, action
          on conflict (tenant_id, action) do update set
            count = case when w.window_start < excluded.window_start then excluded.count else w.count + excluded.count end,
            window_start = greatest(w.window_start, excluded.window_start)
          returning tenant_id, action, window_start, count
        )
        select window_start, ceil(extract(epoch from window_start + make_interval(secs => ${windowSeconds}) - clock_timestamp()))::int as window_left,
          (count - count(*) over (partition by tenant_id, action)
          + row_number() over (partition by tenant_id, action order by i))::int as place
        from asked join counted using (tenant_id, action) order by i`
      return rows.map((row) => ({ count: row.place, windowStart: row.window_start, secondsLeft: row.window_left }))
    },
  })
  const room = createRequestRoom(MAX_WAITING, { maxWaiting: MAX_WAITING })
  return (asked: Asked): Promise<Counted> => room.run(asked.tenantId, 1, () => count(asked))
}
