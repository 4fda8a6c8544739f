import { OpenAPIHono } from '@hono/zod-openapi'
import type { Context } from 'hono'
import type { Mode } from '../config.ts'
import type { Pool } from '../db/open.ts'
import type { AddressRange } from '../egress/address.ts'
import { AppError } from '../errors.ts'
import type { Publish } from '../flow/publish.ts'
import type { Log } from '../log.ts'
import type { SecretBox } from '../secrets.ts'
import { type Env, errorBody } from './answer.ts'
import type { Auth } from './auth.ts'
import { mountDeliveries } from './deliveries.ts'
import { mountDocs } from './docs/docs.ts'
import { mountEndpointHealth } from './endpoint-health.ts'
import { mountEndpoints } from './endpoints.ts'
import { mountEvents } from './events.ts'
import { mountHealth } from './health.ts'
import { mountLimits } from './limits.ts'
import { mountMetrics } from './metrics.ts'
import { mountPublish } from './publish.ts'
import { createRateLimit, type RateLimits } from './rate-limit.ts'
import type { Reads } from './reads.ts'
import { mountReplay } from './replay.ts'
import { mountRetention } from './retention.ts'
import { type App, createMount } from './route.ts'
import { mountTenants } from './tenants.ts'

export type AppDeps = {
  pool: Pool
  /** Of what may be many rows, or large. */
  reads: Reads
  /** Of single rows, which do not wait for those. */
  lookUps: Reads
  /** For /health alone. */
  pulse: Pool
  /** For retention on demand, which may take long. */
  retention: Pool
  auth: Auth
  publish: Publish
  secretBox: SecretBox
  allow: readonly AddressRange[]
  log: Log
  mode: Mode
  baseUrl: () => string
  /** For the description of the outbound requests. */
  headerPrefix: string
  rateLimits: RateLimits
  rotationOverlapSeconds: number
  retentionDays: number
}

/** The HTTP application: every route in modes `all` and `api`, only health in mode `worker`. */
export function createApp(deps: AppDeps): App {
  const { log } = deps
  const app: App = new OpenAPIHono<Env>({ getPath: pathOf })
  const rateLimit = createRateLimit(deps.pool, deps.rateLimits)
  const mount = createMount({ app, auth: deps.auth, rateLimit })

  // Only at this level: routes without middleware cost less.
  if (log.isLevelEnabled('debug')) {
    app.use(async (c, next) => {
      const started = performance.now()
      await next()
      log.debug(
        {
          request_id: c.env.outgoing.requestId,
          method: c.req.method,
          path: c.req.path,
          status: c.res.status,
          duration_ms: Math.round(performance.now() - started),
          tenant_id: c.get('tenantId'),
        },
        'request.answered',
      )
    })
  }
  app.notFound((c) => errorResponse(c, new AppError('not_found')))
  app.onError((error, c) => {
    if (error instanceof AppError) {
      if (error.code === 'overloaded') c.header('retry-after', '1')
      if (error.status === 401) c.header('www-authenticate', 'Bearer')
      // The rest of the body would be read as the next request.
      if (error.code === 'request_timeout') c.header('connection', 'close')
      return errorResponse(c, error)
    }
    log.error(
      {
        err: error,
        request_id: c.env.outgoing.requestId,
        tenant_id: c.get('tenantId'),
        method: c.req.method,
        path: c.req.path,
      },
      'request.failed',
    )
    return errorResponse(c, new AppError('internal'))
  })

  mountHealth(mount, deps)
  if (deps.mode !== 'worker') {
    mountPublish(mount, { ...deps, rateLimit })
    mountEvents(mount, deps)
    mountEndpoints(mount, deps)
    mountEndpointHealth(mount, deps)
    mountDeliveries(mount, deps)
    mountReplay(mount, deps)
    mountMetrics(mount, deps)
    mountLimits(mount, deps)
    mountTenants(mount, deps)
    mountRetention(mount, deps)
    mountDocs(mount, app, deps)
  }
  return app
}

/**
 * The path, decoded as a whole or not at all. Whatever escapes are left are spoiled, as no route or id has any: Hono would try each by
 * itself, here and again for a parameter, and thousands that are not UTF-8 would take 40 ms.
 */
function pathOf({ url }: Request): string {
  const [path = ''] = url.slice(url.indexOf('/', url.indexOf('://') + 3)).split(/[?#]/, 1)
  if (!path.includes('%')) return path
  return decoded(path).replaceAll('%', '\ufffd')
}

function decoded(path: string): string {
  try {
    return decodeURI(path)
  } catch {
    return path
  }
}

function errorResponse(c: Context<Env>, error: AppError): Response {
  return c.json(errorBody(error), error.status)
}
