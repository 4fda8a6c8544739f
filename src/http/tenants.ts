import { createRoute, z } from '@hono/zod-openapi'
import { isDuplicate } from '../db/errors.ts'
import type { Pool } from '../db/open.ts'
import { transact } from '../db/retried.ts'
import { AppError } from '../errors.ts'
import { madeAt } from '../ids.ts'
import type { Log } from '../log.ts'
import { hashApiKey, makeApiKey } from '../secrets.ts'
import type { Auth } from './auth.ts'
import { ADMIN_ERRORS, BODY_ERRORS, errorAnswers } from './error-answers.ts'
import type { Mount } from './route.ts'
import { answers, id, jsonBody, ok, ownTenant, tenantId, text, timestamp } from './schemas.ts'
import { tenantLimits } from './tenant-limits.ts'

const tenantBody = z.strictObject({
  tenant_id: tenantId,
  tenant_slug: z
    .string()
    .max(64, 'must be at most 64 characters')
    .regex(/^[a-z0-9]+(-[a-z0-9]+)*$/, 'must be lower-case words of a-z 0-9 joined by -')
    .openapi({ description: 'A short name of your own for the tenant; no two have the same.', example: 'acme-inc' }),
  // A description here would make the generated schema an intersection with one that allows anything.
  limits: tenantLimits.optional(),
})

const putTenant = createRoute({
  method: 'post',
  path: '/v1/admin/tenants',
  operationId: 'putTenant',
  tags: ['Admin'],
  summary: 'Create or update a tenant',
  description:
    'By `tenant_id`: a new one is created, a known one gets the slug and, if given, the limits, which replace all of its earlier ones.',
  request: { body: jsonBody(tenantBody) },
  responses: {
    200: answers(
      'The tenant as it is now',
      z.object({
        ok,
        tenant_id: ownTenant,
        tenant_slug: z.string().openapi({ example: 'acme-inc' }),
        limits: tenantLimits,
        created: z.boolean().openapi({ description: 'True when the tenant is new.' }),
        created_at: timestamp,
        updated_at: timestamp,
      }),
    ),
    ...errorAnswers(...ADMIN_ERRORS, ...BODY_ERRORS, 'slug_taken'),
  },
})

const createApiKey = createRoute({
  method: 'post',
  path: '/v1/admin/api-keys',
  operationId: 'createApiKey',
  tags: ['Admin'],
  summary: 'Create an API key for a tenant',
  description: 'The key itself is in this answer and nowhere else: it cannot be read again.',
  request: {
    body: jsonBody(
      z.strictObject({
        tenant_id: tenantId,
        name: text(1, 100).openapi({ description: 'A label for the key.', example: 'Billing service' }),
      }),
    ),
  },
  responses: {
    201: answers(
      'The key, shown once',
      z.object({
        ok,
        api_key_id: id('API key'),
        tenant_id: ownTenant,
        name: z.string().openapi({ example: 'Billing service' }),
        api_key: z.string().openapi({
          description: '`wb_live_` and 43 base64url characters.',
          example: 'wb_live_EXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAMPLE0',
        }),
        created_at: timestamp,
      }),
    ),
    ...errorAnswers(...ADMIN_ERRORS, ...BODY_ERRORS, 'tenant_not_found'),
  },
})

/** The operator's routes for tenants and their keys. The log tells what they changed. */
export function mountTenants(mount: Mount, { pool, auth, log }: { pool: Pool; auth: Auth; log: Log }): void {
  mount.admin(putTenant, async (c, { body }) => {
    const limits = body.limits ? JSON.stringify(body.limits) : null
    const [tenant] = await transact(pool, async (sql) => {
      // One at a time: two that exchange their slugs would wait for each other.
      await sql`select pg_advisory_xact_lock(hashtext('waybill.tenants'))`
      return await sql<[{ tenant_id: string; created: boolean; limits: object }]>`
        with put as (
          insert into waybill.tenants as t (tenant_id, tenant_slug, limits)
          values (${body.tenant_id}, ${body.tenant_slug}, coalesce(${limits}::jsonb, '{}'))
          on conflict (tenant_id) do update set
            tenant_slug = excluded.tenant_slug, limits = coalesce(${limits}::jsonb, t.limits), updated_at = clock_timestamp()
          returning *, xmax = 0 as created
        )
        select tenant_id, tenant_slug, limits, created, created_at, updated_at from put, pg_notify('waybill_tenants', '')`
    }).catch((error: unknown) => {
      throw isDuplicate(error, 'tenants_tenant_slug_key') ? new AppError('slug_taken') : error
    })
    // Other processes are notified; this one forgets at once.
    auth.forget()
    log.info({ tenant_id: tenant.tenant_id, created: tenant.created, limits: tenant.limits }, 'tenant.stored')
    return c.json({ ok: true, ...tenant }, 200)
  })

  mount.admin(createApiKey, async (c, { body }) => {
    const apiKey = makeApiKey()
    const [row] = await pool<{ api_key_id: string; tenant_id: string; name: string }[]>`
      insert into waybill.api_keys (tenant_id, api_key_id, name, key_hash)
      select tenant_id, waybill.make_id(clock_timestamp()), ${body.name}, ${hashApiKey(apiKey)}
      from waybill.tenants where tenant_id = ${body.tenant_id}
      returning api_key_id, tenant_id, name`
    if (row === undefined) throw new AppError('tenant_not_found')
    log.info(row, 'api_key.created')
    return c.json({ ok: true, ...row, api_key: apiKey, created_at: madeAt(row.api_key_id) }, 201)
  })
}
