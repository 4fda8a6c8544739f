import type { OpenAPIHono, RouteConfig, z } from '@hono/zod-openapi'
import type { Context } from 'hono'
import { AppError } from '../errors.ts'
import { createRequestRoom } from '../room.ts'
import type { Env } from './answer.ts'
import type { Auth, Tenant } from './auth.ts'
import { createBodyRoom, expectedBytes, readJson, unaskedBytes } from './body.ts'
import { startDeadline } from './deadline.ts'
import type { CountedAction, RateLimit } from './rate-limit.ts'

export type App = OpenAPIHono<Env>

/** The parts of a request that a route may declare schemas for. */
type Parsed<Schema> = Schema extends z.ZodType ? z.output<Schema> : undefined
type BodySchema<R extends RouteConfig> = NonNullable<R['request']>['body'] extends {
  content: { 'application/json': { schema: infer Schema } }
}
  ? Schema
  : undefined
type Input<R extends RouteConfig> = {
  params: Parsed<NonNullable<R['request']>['params']>
  query: Parsed<NonNullable<R['request']>['query']>
  headers: Parsed<NonNullable<R['request']>['headers']>
  body: Parsed<BodySchema<R>>
  /** The body's payload, as it was sent; empty if there is none, or it is neither an object nor a list. */
  payload: string
}

/** Room for bodies of the operator's requests; they get half of it, as any tenant does that is alone. */
const ADMIN_BYTES = 4 * 1024 * 1024
/** How many changes and replays are made at once: those of one tenant wait for each other's locks, each with a connection. */
const MAX_CHANGES = 6
const CHANGE_WAIT_MS = 2000

/**
 * What is wrong with one field of a request. `path` is dotted, as in `subscribed_events.0`. A schema can ask for an `error` of its own
 * with `params: { error }` (the URL rules do); any other problem is an invalid request.
 */
type Problem = { path: string; message: string; error?: 'invalid_url' }

/** How many mistakes are reported: a body can have a hundred thousand, and reporting them costs more than reading it. */
const MAX_PROBLEMS = 20

/** Behind a body that took longer than this, the key is looked at again: a body may take 30 seconds. */
const SLOW_BODY_MS = 1000

type TenantOptions = {
  /** The rate limit that the request counts against, or null when the handler counts it itself. */
  action: CountedAction | null
  /** How large a payload the body may carry; without one, bodies are small. */
  maxPayloadBytes?: (tenant: Tenant) => number
  /** If it throws, that answers the request, and its body is not read. */
  beforeBody?: (c: Context<Env>, tenant: Tenant) => Promise<void>
  /** Called when the request is refused as invalid, before the refusal is thrown. */
  onRefused?: (c: Context<Env>, tenant: Tenant) => Promise<void>
}

/**
 * Mounts routes on the app and in the OpenAPI document. For every request, in this order: bearer token, rate limit,
 * then params, query, headers and body together, so that all mistakes are reported at once, then the handler.
 */
export function createMount(deps: { app: App; auth: Auth; rateLimit: RateLimit }) {
  const { app, auth, rateLimit } = deps
  /** One for all tenants together, and one for the operator, so that no tenant can keep the operator out. */
  const room = createBodyRoom()
  const adminRoom = createRequestRoom(ADMIN_BYTES)
  const changes = createRequestRoom(MAX_CHANGES, { maxWaitMs: CHANGE_WAIT_MS })

  /** `key`: what the OpenAPI document calls the key that the route needs. */
  function mount(
    route: RouteConfig,
    key: 'apiKey' | 'adminKey' | null,
    handle: (c: Context<Env>) => Promise<Response> | Response,
  ) {
    app.openAPIRegistry.registerPath({ ...route, security: key ? [{ [key]: [] }] : [] })
    app.on([route.method], [route.path.replaceAll(/{(.+?)}/g, ':$1')], handle)
  }

  return {
    /** A route that needs no key. */
    open: (route: RouteConfig, handle: (c: Context<Env>) => Promise<Response> | Response) => mount(route, null, handle),

    /** A route for the operator's key. `takesLong`: it has no deadline, since it does as much work as there is. */
    admin<R extends RouteConfig>(
      route: R,
      handler: (c: Context<Env>, input: Input<R>) => Promise<Response>,
      { takesLong = false } = {},
    ) {
      mount(route, 'adminKey', async (c) => {
        auth.admin(c.env.incoming.headers.authorization)
        const answer = async () => {
          const input = await readInput(c, route)
          return takesLong ? await handler(c, input) : await startDeadline()(() => handler(c, input))
        }
        return route.request?.body ? await adminRoom.run('', expectedBytes(c, 0), answer) : await answer()
      })
    },

    /** A route for a tenant's key. */
    tenant<R extends RouteConfig>(
      route: R,
      options: TenantOptions,
      handler: (c: Context<Env>, tenant: Tenant, input: Input<R>) => Promise<Response>,
    ) {
      mount(route, 'apiKey', async (c) => {
        const inTime = startDeadline()
        const { authorization } = c.env.incoming.headers
        let keyTakenAt = 0
        const tenant = await inTime(async () => {
          const known = await auth.tenant(authorization, unaskedBytes(c))
          keyTakenAt = performance.now()
          c.set('tenantId', known.tenantId)
          if (options.action) await rateLimit.count(c, known, options.action)
          await options.beforeBody?.(c, known)
          return known
        })
        const maxPayloadBytes = options.maxPayloadBytes?.(tenant) ?? 0
        const isChange = options.action !== null && options.action !== 'read'
        const answer = async () => {
          let input: Input<R>
          try {
            input = await readInput(c, route, maxPayloadBytes)
          } catch (error) {
            if (error instanceof AppError) await inTime(async () => await options.onRefused?.(c, tenant))
            throw error
          }
          // It may have been revoked meanwhile.
          if (performance.now() - keyTakenAt > SLOW_BODY_MS) await inTime(() => auth.tenant(authorization, 0))
          const work = () => handler(c, tenant, input)
          return await inTime(() => (isChange ? changes.run(tenant.tenantId, 1, work) : work()))
        }
        // Only requests with a body take room.
        if (!route.request?.body) return await answer()
        return await room.run(c, tenant.tenantId, maxPayloadBytes, answer)
      })
    },
  }
}

export type Mount = ReturnType<typeof createMount>

async function readInput<R extends RouteConfig>(c: Context<Env>, route: R, maxPayloadBytes = 0): Promise<Input<R>> {
  const { params, query, headers, body } = route.request ?? {}
  const problems: Problem[] = []
  const parse = (schema: unknown, value: unknown) => {
    if (schema === undefined) return undefined
    const parsed = (schema as z.ZodType).safeParse(value)
    if (parsed.success) return parsed.data
    for (const issue of parsed.error.issues.slice(0, MAX_PROBLEMS)) problems.push(...fieldProblems(issue))
    return undefined
  }
  const input = {
    params: parse(params, params && c.req.param()),
    query: parse(query, query && readQuery(c)),
    headers: parse(headers, headers && readHeaders(c, headers as z.ZodObject)),
  }
  const content = body?.content['application/json']
  const schema = content && 'schema' in content ? content.schema : undefined
  const json = schema && (await readJson(c, maxPayloadBytes).catch((error) => void problems.push(...problemsOf(error))))
  const parsedBody = json && parse(schema, json.value)
  if (problems.length > 0) throw invalidRequest(problems)
  return { ...input, body: parsedBody, payload: json?.payload ?? '' } as Input<R>
}

/** The mistakes of an unreadable body, to be reported with the others. Rethrows what is not a mistake of the request. */
function problemsOf(error: unknown): Problem[] {
  if (error instanceof AppError && error.code === 'invalid_request') return error.details as Problem[]
  throw error
}

/** How many parameters are read, each time that they are given: no route has as many, so some are not known or given twice. */
const MAX_PARAMETERS = 50

/** A parameter that is given twice becomes a list, which none of our schemas accepts. */
function readQuery(c: Context<Env>): Record<string, unknown> {
  const given = new URL(c.req.url).searchParams.entries().take(MAX_PARAMETERS)
  // In one pass: looking up each name takes time that grows with the square of their number.
  const byName = Map.groupBy(given, ([name]) => name)
  // fromEntries makes an own property of any name, `__proto__` too.
  return Object.fromEntries(byName.entries().map(([name, all]) => [name, all.length > 1 ? all : all[0]?.[1]]))
}

/** Only the headers that the schema names: reading all of them takes time. */
const readHeaders = (c: Context<Env>, schema: z.ZodObject) =>
  Object.fromEntries(Object.keys(schema.shape).map((name) => [name, c.env.incoming.headers[name]]))

/** An error that a schema asks for stands for itself if it is the only one. */
function invalidRequest(problems: Problem[]): AppError {
  const [only] = problems
  if (problems.length === 1 && only?.error) return new AppError(only.error, only.message)
  return new AppError(
    'invalid_request',
    problems.slice(0, MAX_PROBLEMS).map(({ path, message }) => ({ path, message })),
  )
}

function fieldProblems(issue: z.core.$ZodIssue): Problem[] {
  const pathOf = (...names: PropertyKey[]) => names.map(String).filter(Boolean).join('.')
  if (issue.code === 'unrecognized_keys')
    return issue.keys
      .slice(0, MAX_PROBLEMS)
      .map((key) => ({ path: pathOf(...issue.path, key), message: 'is not a known field' }))
  const error = issue.code === 'custom' ? (issue.params as Pick<Problem, 'error'> | undefined)?.error : undefined
  return [{ path: pathOf(...issue.path), message: issue.message, ...(error && { error }) }]
}
