import type { Db } from '../db/open.ts'
import { announce } from './announce.ts'
import { type Breaker, type BreakerRules, nextBreaker } from './breaker.ts'
import type { EndpointStats, Stored } from './store.ts'

export type EndpointRules = BreakerRules & {
  /** An endpoint that has done nothing but fail for this long is set inactive; 0: never. */
  disableAfterSeconds: number
}

/** The endpoints for which attempts that were stored have consequences, as things stand: none that is well. */
export const concerned = (stored: Stored, rules: EndpointRules): EndpointStats[] => [
  ...new Set([...moves(stored, rules), ...doomed(stored, rules)].map(({ endpoint }) => endpoint)),
]

/**
 * Draws these consequences: moves the endpoints' breakers, and sets those inactive that are gone (410) or have failed for too long. To
 * be called in a transaction.
 */
export async function observe(sql: Db, stored: Stored, rules: EndpointRules): Promise<StateChange[]> {
  const now = { results: stored.results, endpoints: await lock(sql, concerned(stored, rules)) }
  return [...(await moveBreakers(sql, moves(now, rules))), ...(await deactivate(sql, doomed(now, rules)))]
}

/** How these endpoints stand by now; their rows stay locked until the transaction ends. */
const lock = (sql: Db, known: EndpointStats[]) => sql<EndpointStats[]>`
  select tenant_id, endpoint_id, held::float8, failure_streak, coalesce(extract(epoch from least(now(), last_failure_at) - failing_since), 0)::float8 as failing_seconds,
    breaker, ramp, failed_probes, probing
  from waybill.endpoint_stats
  where (tenant_id, endpoint_id) in (select * from unnest(${known.map((row) => row.tenant_id)}::text[], ${known.map((row) => row.endpoint_id)}::uuid[]))
  order by tenant_id, endpoint_id for update`

type Move = { endpoint: EndpointStats; next: Breaker }

/** The breakers that these attempts move, as things stand. */
function moves({ results, endpoints }: Stored, rules: EndpointRules): Move[] {
  const suspects = endpoints.filter(
    (endpoint) => endpoint.breaker !== 'closed' || endpoint.failure_streak >= rules.failures,
  )
  return suspects.flatMap((endpoint) => {
    const own = results.filter(({ claim }) => claim.endpointId === endpoint.endpoint_id)
    const probe = own.find(({ claim }) => claim.deliveryId === endpoint.probing)
    const now: Breaker = {
      state: endpoint.breaker,
      ramp: endpoint.ramp,
      failedProbes: endpoint.failed_probes,
      probeInSeconds: null,
    }
    const next = nextBreaker(
      now,
      {
        successes: own.filter(({ verdict }) => verdict.kind === 'delivered').length,
        probeFailed: probe !== undefined && probe.outcome !== null && probe.verdict.kind !== 'delivered',
        probeUnmade: probe?.outcome === null,
        failureStreak: endpoint.failure_streak,
        // To the end of the last: what hangs fails for as long as that takes.
        failingSeconds:
          endpoint.failing_seconds + Math.max(0, ...own.map(({ outcome }) => outcome?.durationMs ?? 0)) / 1000,
        held: endpoint.held,
      },
      rules,
    )
    return next === now ? [] : [{ endpoint, next }]
  })
}

async function moveBreakers(sql: Db, moved: Move[]): Promise<StateChange[]> {
  if (moved.length === 0) return []
  await sql`
    update waybill.endpoint_stats s set breaker = m.breaker, ramp = m.ramp, failed_probes = m.failed_probes, probing = null,
      breaker_since = case when s.breaker = m.breaker then s.breaker_since when m.breaker <> 'closed' then now() end,
      next_probe_at = case when m.breaker = 'open' then now() + m.probe_in * interval '1 second' end
    from unnest(${moved.map(({ endpoint }) => endpoint.tenant_id)}::text[], ${moved.map(({ endpoint }) => endpoint.endpoint_id)}::uuid[],
      ${moved.map(({ next }) => next.state)}::waybill.breaker[], ${moved.map(({ next }) => next.ramp)}::int[],
      ${moved.map(({ next }) => next.failedProbes)}::int[], ${moved.map(({ next }) => next.probeInSeconds)}::float8[])
      as m (tenant_id, endpoint_id, breaker, ramp, failed_probes, probe_in)
    where s.tenant_id = m.tenant_id and s.endpoint_id = m.endpoint_id`
  const changes = moved
    .filter(({ endpoint, next }) => next.state !== endpoint.breaker)
    .map(({ endpoint, next }) => change(endpoint, next.state))
  const recovered = changes
    .filter(({ to }) => to === 'closed')
    .map(({ tenant_id, endpoint_id }) => ({ tenant_id, endpoint_id }))
  await announce(sql, 'endpoint.recovered', recovered)
  return changes
}

/** `url`: if not null, only as long as this is the endpoint's URL. */
type Doomed = { endpoint: EndpointStats; reason: 'gone' | 'failing'; url: string | null }

/** The endpoints that these attempts make inactive, as things stand. */
function doomed({ results, endpoints }: Stored, rules: EndpointRules): Doomed[] {
  const gone = results.filter(({ verdict }) => verdict.kind === 'gone').map(({ claim }) => claim)
  return endpoints.flatMap((endpoint): Doomed[] => {
    const goneAt = gone.filter(({ endpointId }) => endpointId === endpoint.endpoint_id).map(({ url }) => url)
    if (goneAt.length > 0) return [...new Set(goneAt)].map((url) => ({ endpoint, reason: 'gone', url }))
    // Not by time alone: in a pause without attempts, or when the clock leaps, days pass between two failures.
    const failed =
      rules.disableAfterSeconds > 0 &&
      endpoint.failure_streak >= rules.failures &&
      endpoint.failing_seconds >= rules.disableAfterSeconds
    return failed ? [{ endpoint, reason: 'failing', url: null }] : []
  })
}

async function deactivate(sql: Db, endpoints: Doomed[]): Promise<StateChange[]> {
  if (endpoints.length === 0) return []
  const rows = await sql<{ tenant_id: string; endpoint_id: string; url: string; reason: string; since: Date }[]>`
    update waybill.endpoints p set is_active = false, inactive_reason = d.reason, inactive_since = now(), updated_at = clock_timestamp()
    from unnest(${endpoints.map(({ endpoint }) => endpoint.tenant_id)}::text[], ${endpoints.map(({ endpoint }) => endpoint.endpoint_id)}::uuid[],
      ${endpoints.map(({ reason }) => reason)}::text[], ${endpoints.map(({ url }) => url)}::text[]) as d (tenant_id, endpoint_id, reason, url)
    where p.tenant_id = d.tenant_id and p.endpoint_id = d.endpoint_id and p.is_active and (d.url is null or p.url = d.url)
    returning p.tenant_id, p.endpoint_id, p.url, d.reason, p.inactive_since as since`
  await announce(sql, 'endpoint.disabled', rows)
  const disabled = new Set(rows.map((row) => row.endpoint_id))
  const stats = new Set(endpoints.map(({ endpoint }) => endpoint))
  return [...stats]
    .filter(({ endpoint_id }) => disabled.has(endpoint_id))
    .map((endpoint) => change(endpoint, 'inactive'))
}

/** A change that is worth a log line. */
const change = (endpoint: EndpointStats, to: string) => ({
  tenant_id: endpoint.tenant_id,
  endpoint_id: endpoint.endpoint_id,
  from: endpoint.breaker,
  to,
  failure_streak: endpoint.failure_streak,
  held: endpoint.held,
})

export type StateChange = ReturnType<typeof change>
