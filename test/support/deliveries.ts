import assert from 'node:assert/strict'
import type { Pool } from '../../src/db/open.ts'
import type { Receipt, Receiver, Reply } from './receiver.ts'
import { waitFor } from './wait.ts'

export const NO_LIMITS = { rate: 0, window_seconds: 60, fanout: 100, monthly_events: 1e9, monthly_attempts: 1e9 }

/** Accepts many events at once, as a batch of requests would. */
export async function publishMany(sql: Pool, tenantId: string, count: number, type = 'thing.happened') {
  for (let left = count; left > 0; left -= 500) {
    const n = Math.min(left, 500)
    await sql`
      select from waybill.publish(array_fill(${tenantId}::text, array[${n}::int]), array_fill(${type}::text, array[${n}::int]),
        array_fill('{"n":1}'::text, array[${n}::int]), array_fill(null::text, array[${n}::int]), ${JSON.stringify(NO_LIMITS)})`
  }
}

type Standing = { breaker: string; held: number; failed_probes: number; ramp: number | null; probing: string | null }

/** How an endpoint stands, straight from the database. */
export async function standingOf(sql: Pool, endpointId: string): Promise<Standing> {
  const [row] = await sql<Standing[]>`
    select breaker, held::int, failed_probes, ramp, probing from waybill.endpoint_stats where endpoint_id = ${endpointId}`
  return row ?? { breaker: 'closed', held: 0, failed_probes: 0, ramp: null, probing: null }
}

/** Waits until nothing is left to deliver. */
export const settled = (sql: Pool, timeoutMs = 60_000) =>
  waitFor(
    async () =>
      (await sql`select from waybill.deliveries where status in ('pending', 'retrying') limit 1`).length === 0,
    { timeoutMs, what: 'every delivery to be finished' },
  )

/** Fails unless all counters of endpoints and attempts say what the rows say, and the attempts are numbered 1 to n without a gap. */
export async function assertBooks(sql: Pool): Promise<void> {
  const wrong = await sql`
    select s.endpoint_id, s.pending, s.retrying, s.delivered, s.dead_lettered, s.held, r.*
    from waybill.endpoint_stats s full join (
      select endpoint_id, count(*) filter (where status = 'pending') as p, count(*) filter (where status = 'retrying') as r,
        count(*) filter (where status = 'delivered') as d, count(*) filter (where status = 'dead_lettered') as x, count(*) filter (where held) as h
      from waybill.deliveries group by endpoint_id) r using (endpoint_id)
    where (s.pending, s.retrying, s.delivered, s.dead_lettered, s.held) is distinct from (coalesce(p, 0), coalesce(r, 0), coalesce(d, 0), coalesce(x, 0), coalesce(h, 0))`
  assert.deepEqual([...wrong], [], 'counters agree with the rows')
  const overlooked = await sql`
    select d.delivery_id from waybill.deliveries d join waybill.endpoint_stats s using (tenant_id, endpoint_id) where d.held and d.delivery_id < s.held_from`
  assert.deepEqual([...overlooked], [], 'all that is held is where it is looked for')
  const gaps = await sql`
    select d.delivery_id, d.attempt_count, array_agg(a.attempt_number order by a.attempt_number) as numbers
    from waybill.deliveries d left join waybill.attempts a using (tenant_id, delivery_id) group by 1, 2
    having count(a.attempt_number) <> d.attempt_count or max(a.attempt_number) <> d.attempt_count`
  assert.deepEqual([...gaps], [], 'attempts are numbered without a gap')
  // A 2xx that broke off is counted under its code, negative.
  const miscounted = await sql`
    select * from (
      select endpoint_id, status_code, sum(attempts)::int as attempts, sum(retries)::int as retries from waybill.attempt_counts group by 1, 2
    ) c full join (
      select endpoint_id, case when retry_state <> 'succeeded' and status_code between 200 and 299 then -status_code else coalesce(status_code, 0) end as status_code,
        count(*)::int as attempts, count(*) filter (where attempt_number > 1)::int as retries
      from waybill.attempts group by 1, 2
    ) a using (endpoint_id, status_code) where (c.attempts, c.retries) is distinct from (a.attempts, a.retries)`
  assert.deepEqual([...miscounted], [], 'attempts are counted by status code')
}

/** Counts the requests under way at one path, and looks at every arrival. */
export function watchInFlight(
  receiver: Receiver,
  path: string,
  reply: Reply | ((receipt: Receipt) => Reply | Promise<Reply>),
  { delayMs = 0, look = (_inFlight: number, _done: number) => {} } = {},
) {
  const seen = { inFlight: 0, most: 0, done: 0 }
  receiver.script(path, async (receipt) => {
    seen.inFlight++
    seen.most = Math.max(seen.most, seen.inFlight)
    look(seen.inFlight, seen.done)
    await new Promise((resolve) => setTimeout(resolve, delayMs))
    const answer = typeof reply === 'function' ? await reply(receipt) : reply
    seen.inFlight--
    seen.done++
    return answer
  })
  return seen
}

/** By how many seconds what happened at these moments ran ahead of a pace at most: 1 is a second's worth too many within some stretch of time. */
export function secondsAhead(moments: { at: number }[], perSecond: number): number {
  let most = 0
  let latest = Number.NEGATIVE_INFINITY
  moments.forEach(({ at }, n) => {
    // When the first one would have come, had all up to this one kept the pace.
    const origin = at / 1000 - n / perSecond
    most = Math.max(most, latest - origin)
    latest = Math.max(latest, origin)
  })
  return most
}
