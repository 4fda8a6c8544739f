import { timingSafeEqual } from 'node:crypto'
import { LRUCache } from 'lru-cache'
import { PATIENCE_MS, type Pool } from '../db/open.ts'
import { AppError } from '../errors.ts'
import { createBatcher } from '../flow/batch.ts'
import { hashApiKey } from '../secrets.ts'
import { createUnaskedRoom } from './body.ts'
import type { Limits } from './tenant-limits.ts'

/** `limits`: its own, or the service's where it has none. */
export type Tenant = { tenantId: string; limits: Limits }

export type Auth = {
  /**
   * The tenant that the Authorization header's key belongs to. Throws a 401 error if there is none, and `service overloaded` if too
   * much has come of bodies of requests whose keys are being looked up; `bytes`: of this one's (http/body.ts).
   */
  tenant(authorization: string | undefined, bytes: number): Promise<Tenant>
  /** Throws unless the header carries the admin key. */
  admin(authorization: string | undefined): void
  /** Forgets what is cached, after a tenant's limits changed. */
  forget(): void
}

/** How long a deleted key still holds, since nobody is notified of that; and a tenant's old limits, if the notification is lost. */
const CACHE_MS = 5000

/**
 * Bearer keys. Tenant keys are looked up by their SHA-256, so that timing reveals nothing about them, and cached, so that a
 * request needs no query.
 */
export function createAuth(pool: Pool, adminKey: string, serviceLimits: Limits): Auth {
  const adminHash = hashApiKey(adminKey)
  /** Keys that were found when they were last looked up, and when that was asked, however long ago. */
  const found = new LRUCache<string, { tenant: Tenant; askedAt: number }>({ max: 10_000 })
  const asking = new Map<string, Promise<Tenant>>()
  let forgottenAt = 0
  const room = createUnaskedRoom()

  /** In batches: a flood of unknown keys must not keep the connections that everybody else needs. */
  const find = createBatcher<string, Tenant | null>({
    max: 500,
    patienceMs: PATIENCE_MS,
    async run(keyHashes) {
      const rows = await pool<{ tenant_id: string | null; limits: Partial<Limits> }[]>`
        select t.tenant_id, t.limits
        from unnest(${keyHashes}::text[]) with ordinality as asked (key_hash, i)
        left join waybill.api_keys k on k.key_hash = decode(asked.key_hash, 'base64')
        left join waybill.tenants t using (tenant_id)
        order by i`
      return rows.map(({ tenant_id, limits }) =>
        tenant_id === null ? null : { tenantId: tenant_id, limits: { ...serviceLimits, ...limits } },
      )
    },
  })

  async function lookUp(keyHash: string): Promise<Tenant> {
    const askedAt = performance.now()
    const tenant = await find(keyHash)
    if (tenant === null) {
      found.delete(keyHash)
      throw new AppError('invalid_api_key')
    }
    found.set(keyHash, { tenant, askedAt })
    return tenant
  }

  /** Those that need the same key share its look-up. */
  function ask(keyHash: string): Promise<Tenant> {
    const asked = asking.get(keyHash) ?? lookUp(keyHash).finally(() => asking.delete(keyHash))
    asking.set(keyHash, asked)
    return asked
  }

  return {
    async tenant(authorization, bytes) {
      const key = bearerToken(authorization)
      if (!key.startsWith('wb_live_')) throw new AppError('invalid_api_key')
      const keyHash = hashApiKey(key).toString('base64')
      const known = found.get(keyHash)
      if (known && known.askedAt > Math.max(forgottenAt, performance.now() - CACHE_MS)) return known.tenant
      // All keys that nobody knows have one share of the room together: anybody can make up as many as they like.
      return await room.run(known ? keyHash : '', bytes, () => ask(keyHash))
    },
    admin(authorization) {
      if (!timingSafeEqual(hashApiKey(bearerToken(authorization)), adminHash)) throw new AppError('invalid_admin_key')
    },
    forget() {
      forgottenAt = performance.now()
      asking.clear()
    },
  }
}

/** Throws `missing bearer token` without a header of this scheme. Whatever follows `Bearer` is compared as it is. */
function bearerToken(authorization: string | undefined): string {
  const [, token] = /^bearer +(\S.*)$/i.exec(authorization?.trim() ?? '') ?? []
  if (token === undefined) throw new AppError('missing_token')
  return token
}
