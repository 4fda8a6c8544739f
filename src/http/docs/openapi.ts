import { ERRORS } from '../../errors.ts'
import { VERSION } from '../../version.ts'
import { ERROR_BODIES, ERROR_EXAMPLES } from '../error-answers.ts'
import type { App } from '../route.ts'
import { exampleOf, type Schema, withChanges } from './openapi-example.ts'
import { guide, TAGS } from './openapi-guide.ts'
import { registerWebhook } from './openapi-webhook.ts'

const header = (type: 'string' | 'integer', description: string, example: string | number) => ({
  description,
  schema: { type, example },
})

/** Response headers that no route sets by itself. */
const HEADERS = {
  RequestId: header('string', 'The id of this request, as it is in the service’s log.', 'req-7f3a'),
  RateLimitLimit: header(
    'integer',
    'Requests of this action that the window allows; absent where none are counted.',
    6000,
  ),
  RateLimitRemaining: header('integer', 'How many of them are left.', 5999),
  RateLimitReset: header('integer', 'Seconds until the next window begins.', 42),
  WwwAuthenticate: header('string', 'The scheme that is asked for.', 'Bearer'),
  RetryAfter: header('integer', 'Seconds to wait; with `rate limit exceeded` and `service overloaded` only.', 42),
}

const ref = (kind: string, name: string) => ({ $ref: `#/components/${kind}/${name}` })

/** The parts of the generated document that are completed here. */
type Media = { schema?: Schema; example?: unknown; examples?: object }
type Response = { headers?: Record<string, unknown>; content?: Record<string, Media> }
type Operation = {
  security?: Record<string, unknown>[]
  parameters?: unknown[]
  requestBody?: { content: Record<string, Media> }
  responses: Record<string, Response>
}

/** `baseUrl` is asked once a port is known. */
export type DocumentOptions = { baseUrl: () => string; headerPrefix: string }

/** The OpenAPI 3.1 document of everything mounted on `app`, and of the requests that endpoints receive. */
export function openApiDocument(app: App, { baseUrl, headerPrefix }: DocumentOptions) {
  const { openAPIRegistry: registry } = app
  registry.registerComponent('securitySchemes', 'apiKey', {
    type: 'http',
    scheme: 'bearer',
    description: 'A tenant’s API key, `wb_live_…`; it says which tenant a request is for. For servers only.',
  })
  registry.registerComponent('securitySchemes', 'adminKey', {
    type: 'http',
    scheme: 'bearer',
    description: 'The operator’s key: the service’s `ADMIN_API_KEY`.',
  })
  registry.registerComponent('parameters', 'RequestId', {
    name: 'X-Request-Id',
    in: 'header',
    required: false,
    description: 'An id of your own for this request, 1 to 128 of `A-Za-z0-9._:-`; any other is replaced.',
    schema: { type: 'string', example: 'req-7f3a' },
  })
  for (const [name, definition] of Object.entries(HEADERS)) registry.registerComponent('headers', name, definition)
  for (const [code, value] of ERROR_EXAMPLES) registry.registerComponent('examples', code, { value })
  // No route answers with it; requests for which there is no route are answered with it.
  registry.register('NotFoundError', ERROR_BODIES.not_found)
  registerWebhook(registry, headerPrefix)
  const document = app.getOpenAPI31Document({
    openapi: '3.1.0',
    info: {
      title: 'Waybill',
      version: VERSION,
      description: guide(headerPrefix),
    },
    servers: [{ url: baseUrl() }],
    tags: TAGS,
  })
  const schemas = (document.components?.schemas ?? {}) as Record<string, Schema>
  for (const item of Object.values(document.paths ?? {})) {
    for (const operation of Object.values(item) as Operation[]) complete(operation, schemas)
  }
  for (const item of Object.values(document.webhooks ?? {})) {
    addExamples((item as { post: Operation }).post.requestBody?.content, schemas)
  }
  return document
}

/** Adds what every operation has: the request id, the headers of its responses, an example of every body. */
function complete(operation: Operation, schemas: Record<string, Schema>): void {
  operation.parameters = [...(operation.parameters ?? []), ref('parameters', 'RequestId')]
  addExamples(operation.requestBody?.content, schemas)
  const isCounted = operation.security?.some((scheme) => 'apiKey' in scheme)
  for (const [status, response] of Object.entries(operation.responses)) {
    // By code, as `errorAnswers` has named them.
    const errors = response.content?.['application/json']?.examples ?? {}
    response.headers = {
      ...response.headers,
      'X-Request-Id': ref('headers', 'RequestId'),
      ...(isCounted &&
        Number(status) !== ERRORS.missing_token[0] && {
          'X-RateLimit-Limit': ref('headers', 'RateLimitLimit'),
          'X-RateLimit-Remaining': ref('headers', 'RateLimitRemaining'),
          'X-RateLimit-Reset': ref('headers', 'RateLimitReset'),
        }),
      ...('missing_token' in errors && { 'WWW-Authenticate': ref('headers', 'WwwAuthenticate') }),
      ...(('rate_limited' in errors || 'overloaded' in errors) && { 'Retry-After': ref('headers', 'RetryAfter') }),
    }
    addExamples(response.content, schemas)
  }
}

function addExamples(content: Record<string, Media> | undefined, schemas: Record<string, Schema>): void {
  const media = content?.['application/json']
  if (media?.schema && media.examples === undefined)
    media.example = withChanges(exampleOf(media.schema, schemas), media.example)
}
