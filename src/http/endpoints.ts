import type { Db, Pool } from '../db/open.ts'
import { transact } from '../db/retried.ts'
import { assignments, type Fragment, fragment } from '../db/statement.ts'
import type { AddressRange } from '../egress/address.ts'
import { AppError } from '../errors.ts'
import { madeAt } from '../ids.ts'
import { makeSigningSecret, ownerOf, type SecretBox } from '../secrets.ts'
import { endpointRoutes } from './endpoint-routes.ts'
import { renderState, type StateRow, stateColumns } from './endpoint-state.ts'
import { listBody, pageRows } from './pages.ts'
import type { Reads } from './reads.ts'
import { recordId } from './record-id.ts'
import type { Mount } from './route.ts'

type EndpointRow = StateRow & {
  endpoint_id: string
  tenant_id: string
  url: string
  description: string | null
  subscribed_events: string[]
  max_per_second: number | null
  ordered: boolean
  updated_at: Date
}

const columns = fragment`
  endpoint_id, tenant_id, url, description, to_json(subscribed_events) as subscribed_events, is_active, max_per_second, ordered, updated_at, ${stateColumns}`

const render = ({ inactive_reason, inactive_since, stats, updated_at, ...row }: EndpointRow) => ({
  ...row,
  ...renderState({ is_active: row.is_active, inactive_reason, inactive_since, stats }),
  created_at: madeAt(row.endpoint_id),
  updated_at,
})

/** Endpoints: where a tenant's events go, and the secrets that sign them. */
export function mountEndpoints(
  mount: Mount,
  deps: {
    pool: Pool
    reads: Reads
    lookUps: Reads
    secretBox: SecretBox
    allow: readonly AddressRange[]
    rotationOverlapSeconds: number
  },
): void {
  const { pool, reads, lookUps, secretBox } = deps
  const route = endpointRoutes(deps.allow)
  const notFound = () => new AppError('endpoint_not_found')

  const endpointId = (params: { endpoint_id: string }) => recordId(params.endpoint_id, 'endpoint_not_found')

  mount.tenant(route.create, { action: 'endpoints:write' }, async (c, tenant, { body }) => {
    const limit = tenant.limits.max_endpoints
    const secret = makeSigningSecret()
    const row = await pool.begin(async (sql) => {
      // The tenant's row is locked, so that endpoints created at once count each other.
      const [{ new_id }] = await sql<[{ new_id: string }]>`
        select waybill.make_id(clock_timestamp()) as new_id from waybill.tenants where tenant_id = ${tenant.tenantId} for no key update`
      const [{ current }] = await sql<[{ current: number }]>`
        select count(*)::int as current from waybill.endpoints where tenant_id = ${tenant.tenantId}`
      if (current >= limit) throw new AppError('endpoint_count', { limit, current })
      const [created] = await sql<[EndpointRow]>`
        insert into waybill.endpoints (tenant_id, endpoint_id, url, description, subscribed_events, max_per_second, ordered, signing_secret, updated_at)
        values (${tenant.tenantId}, ${new_id}, ${body.url}, ${body.description ?? null}, ${body.subscribed_events},
          ${body.max_per_second ?? null}, ${body.ordered ?? false},
          ${secretBox.seal(secret, ownerOf(tenant.tenantId, new_id))}, waybill.made_at(${new_id}))
        returning ${columns}`
      return created
    })
    return c.json({ ok: true, ...render(row), signing_secret: secret }, 201)
  })

  mount.tenant(route.list, { action: 'read' }, (c, tenant, { query }) =>
    reads(c, tenant.tenantId, async (sql) => {
      const rows = await sql<EndpointRow[]>`
        select ${columns} from waybill.endpoints
        where tenant_id = ${tenant.tenantId} ${query.active_only ? fragment`and is_active` : fragment``}
          ${query.cursor ? fragment`and endpoint_id < ${query.cursor}` : fragment``}
        order by endpoint_id desc ${pageRows(query)}`
      return listBody(query, rows, render, (row) => row.endpoint_id)
    }),
  )

  mount.tenant(route.get, { action: 'read' }, (c, tenant, { params }) =>
    lookUps(c, tenant.tenantId, async (sql) => {
      const [row] = await sql<EndpointRow[]>`
        select ${columns} from waybill.endpoints where tenant_id = ${tenant.tenantId} and endpoint_id = ${endpointId(params)}`
      if (row === undefined) throw notFound()
      return { ok: true, ...render(row) }
    }),
  )

  mount.tenant(route.patch, { action: 'endpoints:write' }, async (c, tenant, { params, body }) => {
    const target = endpointId(params)
    // Recording locks the counters before the endpoint, so the two can deadlock.
    const row = await transact(pool, async (sql) => {
      const [before] = await sql<{ is_active: boolean; url: string; ordered: boolean; failing: boolean }[]>`
        select p.is_active, p.url, p.ordered, coalesce(s.failure_streak > 0, false) as failing
        from waybill.endpoints p left join waybill.endpoint_stats s using (tenant_id, endpoint_id)
        where p.tenant_id = ${tenant.tenantId} and p.endpoint_id = ${target} for update of p`
      if (before === undefined) throw notFound()
      const isMoved = body.url !== undefined && body.url !== before.url && before.failing
      const startsAgain = (body.is_active === true && !before.is_active) || isMoved
      // The one retry that comes first, for which all other deliveries wait. Deliveries are locked before the counters.
      if ((body.ordered ?? before.ordered) && (startsAgain || !before.ordered))
        await sql`select waybill.hurry_ordered(${tenant.tenantId}, ${target})`
      if (startsAgain) await startAgain(sql, tenant.tenantId, target)
      const [updated] = await sql<[EndpointRow]>`
        update waybill.endpoints set ${assignments(body)}, updated_at = clock_timestamp() ${inactivity(before.is_active, body.is_active)}
        where tenant_id = ${tenant.tenantId} and endpoint_id = ${target} returning ${columns}`
      // Whatever has changed, held deliveries may be allowed now.
      await sql`select pg_notify('waybill_held', '')`
      return updated
    })
    return c.json({ ok: true, ...render(row) }, 200)
  })

  mount.tenant(route.rotate, { action: 'endpoints:write' }, async (c, tenant, { params }) => {
    const target = endpointId(params)
    const secret = makeSigningSecret()
    const [row] = await pool<(EndpointRow & { previous_secret_expires_at: Date })[]>`
      update waybill.endpoints set previous_secret = signing_secret, signing_secret = ${secretBox.seal(secret, ownerOf(tenant.tenantId, target))},
        previous_secret_expires_at = clock_timestamp() + ${deps.rotationOverlapSeconds} * interval '1 second', updated_at = clock_timestamp()
      where tenant_id = ${tenant.tenantId} and endpoint_id = ${target}
      returning ${columns}, previous_secret_expires_at`
    if (row === undefined) throw notFound()
    const { previous_secret_expires_at, ...endpoint } = row
    return c.json({ ok: true, ...render(endpoint), signing_secret: secret, previous_secret_expires_at }, 200)
  })
}

/** Why and since when an endpoint is inactive, if that changes. */
function inactivity(wasActive: boolean, isActive: boolean | undefined): Fragment {
  if (isActive === false && wasActive) return fragment`, inactive_reason = 'tenant', inactive_since = now()`
  return isActive ? fragment`, inactive_reason = null, inactive_since = null` : fragment``
}

/**
 * Gives an endpoint that was inactive, or failed at another URL, the benefit of the doubt: what was held goes out in growing
 * chunks or, if the endpoint is ordered, after the one retry that the others wait for.
 */
async function startAgain(sql: Db, tenantId: string, endpointId: string): Promise<void> {
  await sql`
    update waybill.endpoint_stats set failure_streak = 0, failing_since = null, probing = null, next_probe_at = null, failed_probes = 0,
      breaker = case when held > 0 then 'half_open' else 'closed' end::waybill.breaker,
      breaker_since = case when held > 0 then now() end, ramp = case when held > 0 then 2 end
    where tenant_id = ${tenantId} and endpoint_id = ${endpointId}`
}
