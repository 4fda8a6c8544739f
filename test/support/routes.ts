import type { Call, Reply } from './service.ts'
import { API } from './validate.ts'

export type Route = {
  /** Method and path template, as in the API's description. */
  name: string
  kind: 'admin' | 'tenant' | 'open'
  /** The name of the id in its path. */
  id: string | undefined
  /** Asks it in a way that succeeds with the right key, for the tenant's own record or that of another id. */
  ask: (key: string | undefined, id?: string) => Promise<Reply>
}

/** Every route of the API's description. `own` are the tenant's records by the names that ids have in paths. */
export function routesOf(service: { call: Call }, own: Record<string, string>, tenantId: string): Route[] {
  const bodies: Record<string, object> = {
    'POST /v1/admin/tenants': { tenant_id: tenantId, tenant_slug: tenantId },
    'POST /v1/admin/api-keys': { tenant_id: tenantId, name: 'another' },
    'POST /v1/admin/retention/run': { apply: false },
    'POST /v1/events': { event_type: 'thing.happened', payload: {} },
    'POST /v1/endpoints': { url: 'http://127.0.0.1:9/other', subscribed_events: ['nothing.ever'] },
    'PATCH /v1/endpoints/{endpoint_id}': { description: 'changed' },
  }
  return Object.entries<Record<string, object>>(API.paths).flatMap(([template, item]) =>
    Object.keys(item).map((verb): Route => {
      const method = verb.toUpperCase()
      const [, id] = /\{(\w+)\}/.exec(template) ?? []
      const body = bodies[`${method} ${template}`]
      return {
        name: `${method} ${template}`,
        kind: template.startsWith('/v1/admin/') ? 'admin' : template.startsWith('/v1/') ? 'tenant' : 'open',
        id,
        ask: (key, value = own[id ?? ''] ?? '') =>
          service.call(method, template.replace(/\{\w+\}/, encodeURIComponent(value)), {
            ...(key !== undefined && { key }),
            ...(body && { body }),
          }),
      }
    }),
  )
}
