import { createRoute, z } from '@hono/zod-openapi'
import type { Db, Pool } from '../db.ts'
import { AppError } from '../errors.ts'
import type { AddressRange } from '../flow/address.ts'
import { checkUrl } from '../flow/destination.ts'
import { releaseDeliveries } from '../flow/hold.ts'
import { madeAt, UUID } from '../ids.ts'
import { makeSigningSecret, type SecretBox } from '../secrets.ts'
import type { Mount } from './route.ts'
import {
  answers,
  endpointsQuery,
  errorAnswers,
  eventType,
  id,
  jsonBody,
  listBody,
  listOf,
  TENANT_ERRORS,
  timestamp,
} from './schemas.ts'

const security = [{ apiKey: [] }]

const endpointRecord = z
  .object({
    endpoint_id: id('endpoint'),
    tenant_id: z.string(),
    url: z.string(),
    description: z.string().nullable(),
    subscribed_events: z.array(z.string()),
    is_active: z
      .boolean()
      .openapi({ description: 'An inactive endpoint gets no new events; what waits for it waits.' }),
    created_at: timestamp,
    updated_at: timestamp,
  })
  .openapi('Endpoint')

const ok = z.object({ ok: z.literal(true) })
const signingSecret = z.string().openapi({
  description: '`whsec_` and 32 bytes in base64. Shown here and never again.',
  example: 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw',
})

/** The fields of an endpoint that a client writes; the URL rules need to know what the operator has exempted. */
const writableFields = (allow: readonly AddressRange[]) => ({
  url: z
    .string()
    .min(1, 'must not be empty')
    .max(2048, 'must be at most 2048 characters')
    .superRefine((url, ctx) => {
      const problem = checkUrl(url, allow)
      if (problem !== null) ctx.addIssue({ code: 'custom', message: problem, params: { error: 'invalid_url' } })
    })
    .openapi({ example: 'https://hooks.example.com/waybill' }),
  description: z.string().max(500, 'must be at most 500 characters').nullable().optional(),
  subscribed_events: z
    .array(
      z.union(
        [z.literal('*'), eventType],
        'must be * or words of A-Z a-z 0-9 _ - joined by dots, at most 128 characters',
      ),
    )
    .min(1, 'must name at least 1 event type')
    .max(100, 'must name at most 100 event types')
    .openapi({ description: 'Event types, or `*` for all of them.', example: ['invoice.paid', 'invoice.voided'] }),
})

const endpointPath = z.object({ endpoint_id: id('endpoint') })

const routes = (allow: readonly AddressRange[]) => ({
  create: createRoute({
    method: 'post',
    path: '/v1/endpoints',
    operationId: 'createEndpoint',
    tags: ['Endpoints'],
    summary: 'Register an endpoint',
    security,
    request: { body: jsonBody(z.strictObject(writableFields(allow))) },
    responses: {
      201: answers(
        'The endpoint, with the only sight of its signing secret',
        ok.extend(endpointRecord.shape).extend({ signing_secret: signingSecret }),
      ),
      ...errorAnswers(...TENANT_ERRORS, 'invalid_json', 'invalid_url', 'endpoint_count'),
    },
  }),
  list: createRoute({
    method: 'get',
    path: '/v1/endpoints',
    operationId: 'listEndpoints',
    tags: ['Endpoints'],
    summary: 'List endpoints',
    security,
    request: { query: endpointsQuery },
    responses: { 200: answers('Newest first', listOf(endpointRecord)), ...errorAnswers(...TENANT_ERRORS) },
  }),
  get: createRoute({
    method: 'get',
    path: '/v1/endpoints/{endpoint_id}',
    operationId: 'getEndpoint',
    tags: ['Endpoints'],
    summary: 'Read an endpoint',
    security,
    request: { params: endpointPath },
    responses: {
      200: answers('The endpoint', ok.extend(endpointRecord.shape)),
      ...errorAnswers(...TENANT_ERRORS, 'endpoint_not_found'),
    },
  }),
  patch: createRoute({
    method: 'patch',
    path: '/v1/endpoints/{endpoint_id}',
    operationId: 'updateEndpoint',
    tags: ['Endpoints'],
    summary: 'Change an endpoint',
    description: 'What waits for the endpoint is sent as it is then: to its new URL, and only while it is active.',
    security,
    request: {
      params: endpointPath,
      body: jsonBody(
        z
          .strictObject({ ...writableFields(allow), is_active: z.boolean() })
          .partial()
          .refine(
            (fields) => Object.values(fields).some((value) => value !== undefined),
            'must change at least one field',
          ),
      ),
    },
    responses: {
      200: answers('The endpoint as it is now', ok.extend(endpointRecord.shape)),
      ...errorAnswers(...TENANT_ERRORS, 'invalid_json', 'invalid_url', 'endpoint_not_found'),
    },
  }),
  rotate: createRoute({
    method: 'post',
    path: '/v1/endpoints/{endpoint_id}/rotate-secret',
    operationId: 'rotateSecret',
    tags: ['Endpoints'],
    summary: 'Rotate the signing secret',
    description:
      'Until `previous_secret_expires_at` every request carries two signatures, of the new and of the old secret.',
    security,
    request: { params: endpointPath },
    responses: {
      200: answers(
        'The endpoint, with the only sight of its new signing secret',
        ok
          .extend(endpointRecord.shape)
          .extend({ signing_secret: signingSecret, previous_secret_expires_at: timestamp }),
      ),
      ...errorAnswers(...TENANT_ERRORS, 'endpoint_not_found'),
    },
  }),
})

type EndpointRow = {
  endpoint_id: string
  tenant_id: string
  url: string
  description: string | null
  subscribed_events: string[]
  is_active: boolean
  updated_at: Date
}

const columns = (sql: Db) => sql`endpoint_id, tenant_id, url, description, subscribed_events, is_active, updated_at`

const render = ({ updated_at, ...row }: EndpointRow) => ({ ...row, created_at: madeAt(row.endpoint_id), updated_at })

/** Endpoints: where a tenant's events go, and the secrets that sign them. */
export function mountEndpoints(
  mount: Mount,
  deps: {
    pool: Pool
    secretBox: SecretBox
    allow: readonly AddressRange[]
    maxEndpoints: number
    rotationOverlapSeconds: number
  },
): void {
  const { pool, secretBox } = deps
  const route = routes(deps.allow)
  const notFound = () => new AppError('endpoint_not_found')

  /** The id as it is stored, or 404: an id that is no UUID belongs to nothing. */
  const endpointId = (params: { endpoint_id: string }) => {
    const lower = params.endpoint_id.toLowerCase()
    if (!UUID.test(lower)) throw notFound()
    return lower
  }

  mount.tenant(route.create, { action: 'endpoints:write' }, async (c, tenant, { body }) => {
    const limit = tenant.limits.max_endpoints ?? deps.maxEndpoints
    const secret = makeSigningSecret()
    const row = await pool.begin(async (sql) => {
      // The tenant's row is locked, so that endpoints created at once count each other.
      const [tenantRow] = await sql<{ id: string }[]>`
        select waybill.make_id(clock_timestamp()) as id from waybill.tenants where tenant_id = ${tenant.tenantId} for no key update`
      const [used] = await sql<{ count: number }[]>`
        select count(*)::int from waybill.endpoints where tenant_id = ${tenant.tenantId}`
      const current = used?.count ?? 0
      if (current >= limit) throw new AppError('endpoint_count', { limit, current })
      const newId = (tenantRow as { id: string }).id
      const [created] = await sql<EndpointRow[]>`
        insert into waybill.endpoints (tenant_id, endpoint_id, url, description, subscribed_events, signing_secret, updated_at)
        values (${tenant.tenantId}, ${newId}, ${body.url}, ${body.description ?? null}, ${body.subscribed_events},
          ${secretBox.seal(secret, `${tenant.tenantId}/${newId}`)}, waybill.made_at(${newId}))
        returning ${columns(sql)}`
      return created as EndpointRow
    })
    return c.json({ ok: true, ...render(row), signing_secret: secret }, 201)
  })

  mount.tenant(route.list, { action: 'read' }, async (c, tenant, { query }) => {
    const rows = await pool<EndpointRow[]>`
      select ${columns(pool)} from waybill.endpoints
      where tenant_id = ${tenant.tenantId} ${query.active_only ? pool`and is_active` : pool``}
        ${query.cursor ? pool`and endpoint_id < ${query.cursor}` : pool``}
      order by endpoint_id desc limit ${query.limit + 1} offset ${query.offset}`
    return c.json(
      listBody(query, rows, render, (row) => row.endpoint_id),
      200,
    )
  })

  mount.tenant(route.get, { action: 'read' }, async (c, tenant, { params }) => {
    const [row] = await pool<EndpointRow[]>`
      select ${columns(pool)} from waybill.endpoints where tenant_id = ${tenant.tenantId} and endpoint_id = ${endpointId(params)}`
    if (row === undefined) throw notFound()
    return c.json({ ok: true, ...render(row) }, 200)
  })

  mount.tenant(route.patch, { action: 'endpoints:write' }, async (c, tenant, { params, body }) => {
    const target = endpointId(params)
    const changes = Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined))
    const row = await pool.begin(async (sql) => {
      const [updated] = await sql<EndpointRow[]>`
        update waybill.endpoints set ${sql(changes)}, updated_at = now()
        where tenant_id = ${tenant.tenantId} and endpoint_id = ${target} returning ${columns(sql)}`
      if (updated === undefined) throw notFound()
      if (body.is_active) await releaseDeliveries(sql, tenant.tenantId, target)
      return updated
    })
    return c.json({ ok: true, ...render(row) }, 200)
  })

  mount.tenant(route.rotate, { action: 'endpoints:write' }, async (c, tenant, { params }) => {
    const target = endpointId(params)
    const secret = makeSigningSecret()
    const [row] = await pool<(EndpointRow & { previous_secret_expires_at: Date })[]>`
      update waybill.endpoints set previous_secret = signing_secret, signing_secret = ${secretBox.seal(secret, `${tenant.tenantId}/${target}`)},
        previous_secret_expires_at = now() + ${deps.rotationOverlapSeconds} * interval '1 second', updated_at = now()
      where tenant_id = ${tenant.tenantId} and endpoint_id = ${target}
      returning ${columns(pool)}, previous_secret_expires_at`
    if (row === undefined) throw notFound()
    const { previous_secret_expires_at, ...endpoint } = row
    return c.json({ ok: true, ...render(endpoint), signing_secret: secret, previous_secret_expires_at }, 200)
  })
}
