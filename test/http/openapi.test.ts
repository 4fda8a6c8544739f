import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { after, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { ERRORS } from '../../src/errors.ts'
import { createDatabase } from '../support/database.ts'
import { startService } from '../support/service.ts'
import { API, problemsWith } from '../support/validate.ts'

const FILE = new URL('openapi.json', import.meta.url)
const REFRESH = 'node scripts/openapi.ts refreshes it'
const database = await createDatabase({ after })
const service = await startService({ after }, { databaseUrl: database.url, mode: 'api' })

type Header = { $ref?: string; description?: string; schema?: { example?: unknown } }
type Operation = {
  operationId?: string
  summary?: string
  description?: string
  tags?: string[]
  security?: object[]
  parameters?: { name: string; schema?: { default?: unknown } }[]
  responses: Record<string, { headers?: Record<string, Header>; content?: Record<string, Media> }>
  requestBody?: { content: Record<string, Media> }
}
type Media = { example?: unknown; examples?: Record<string, { $ref: string }> }
const operations = Object.entries<Record<string, Operation>>(API.paths).flatMap(([path, item]) =>
  Object.entries(item).map(([method, operation]) => ({ path, method, operation })),
)

/** The routes of the contract, and of nothing else. */
const ROUTES = [
  'get /docs',
  'get /health',
  'get /openapi.json',
  'get /v1/deliveries',
  'get /v1/deliveries/{delivery_id}',
  'get /v1/deliveries/{delivery_id}/attempts',
  'get /v1/dlq',
  'get /v1/endpoints',
  'get /v1/endpoints/{endpoint_id}',
  'get /v1/endpoints/{endpoint_id}/health',
  'get /v1/events/{event_id}',
  'get /v1/events/{event_id}/deliveries',
  'get /v1/metrics/summary',
  'get /v1/safety/limits',
  'get /v1/usage/current',
  'get /v1/usage/limits',
  'patch /v1/endpoints/{endpoint_id}',
  'post /v1/admin/api-keys',
  'post /v1/admin/retention/run',
  'post /v1/admin/tenants',
  'post /v1/deliveries/{delivery_id}/replay',
  'post /v1/endpoints',
  'post /v1/endpoints/{endpoint_id}/rotate-secret',
  'post /v1/events',
]

describe('the OpenAPI document', () => {
  test('is the one that is committed', async () => {
    const { body, headers } = await service.call('GET', '/openapi.json')
    assert.equal(headers.get('cache-control'), 'no-cache')
    assert.deepEqual(body.servers, [{ url: `http://localhost:${service.port}` }])
    assert.deepEqual({ ...body, servers: API.servers }, API, REFRESH)
  })

  test('is what the types of the tests’ client were made from', () => {
    const hash = createHash('sha256').update(readFileSync(FILE)).digest('hex')
    const types = readFileSync(new URL('../support/api-types.ts', import.meta.url), 'utf8')
    assert.equal(types.split('\n')[0], `// openapi.json ${hash}`, REFRESH)
  })

  test('has every route, with its own operation id, a tag that is described, and words', () => {
    assert.deepEqual(operations.map(({ path, method }) => `${method} ${path}`).sort(), ROUTES)
    assert.equal(new Set(operations.map(({ operation }) => operation.operationId)).size, ROUTES.length)
    const tags = new Set(API.tags.map((tag: { name: string; description: string }) => tag.description && tag.name))
    for (const { path, operation } of operations) {
      assert.ok(operation.summary && operation.description, path)
      assert.equal(operation.tags?.length, 1, path)
      assert.ok(tags.has(operation.tags?.[0] ?? ''), path)
      const scheme = path.startsWith('/v1/admin/')
        ? [{ adminKey: [] }]
        : path.startsWith('/v1/')
          ? [{ apiKey: [] }]
          : []
      assert.deepEqual(operation.security, scheme, path)
    }
  })

  test('has no default that may not be given', () => {
    const parameters = operations.flatMap(({ operation: { parameters = [] } }) => parameters)
    assert.deepEqual(
      [...new Set(parameters.filter(({ schema }) => schema?.default !== undefined).map(({ name }) => name))],
      // `offset` excludes `cursor`, and clients would be generated that always send it.
      ['limit'],
    )
  })

  test('has no schema that generators of clients are known to choke on', () => {
    const problems: string[] = []
    const walk = (node: unknown, where: string) => {
      if (typeof node !== 'object' || node === null) return
      const { type, enum: values, const: value, anyOf, allOf } = node as Record<string, unknown>
      // openapi-generator's Python client compares it with the text 'true', and refuses every answer.
      if (type === 'boolean' && (values ?? value) !== undefined) problems.push(`${where}: a boolean of one value`)
      // openapi-zod-client makes code of it that does not compile.
      if (Array.isArray(values) && values.includes(null)) problems.push(`${where}: null in an enum`)
      // Go and Python clients wrap its values in a class, and ogen refuses the whole document.
      if (Array.isArray(anyOf) && anyOf.filter((part) => part.type !== 'null').length > 1)
        problems.push(`${where}: a union without a discriminator`)
      // In oazapfts `& any`, which turns off all checks.
      if (Array.isArray(allOf) && allOf.some((part) => !part.type && !part.$ref)) problems.push(`${where}: anything`)
      for (const [name, child] of Object.entries(node)) if (!name.startsWith('example')) walk(child, `${where}/${name}`)
    }
    walk(API, '')
    assert.deepEqual(problems, [])
  })

  test('has an example of every body, and each is valid', () => {
    const pointer = (...parts: string[]) => `#/${parts.map((part) => part.replaceAll('/', '~1')).join('/')}`
    let checked = 0
    const check = (media: Media | undefined, ...parts: string[]) => {
      const values = media?.examples
        ? Object.values(media.examples).map(({ $ref }) => API.components.examples[$ref.split('/').at(-1) ?? ''].value)
        : [media?.example]
      for (const value of values) {
        assert.notEqual(value, undefined, parts.join(' '))
        assert.equal(
          problemsWith(pointer(...parts, 'content', 'application/json', 'schema'), value),
          null,
          parts.join(' '),
        )
        checked++
      }
    }
    for (const { path, method, operation } of operations) {
      if (path === '/docs') continue
      if (operation.requestBody) {
        check(operation.requestBody.content['application/json'], 'paths', path, method, 'requestBody')
      }
      for (const [status, { content }] of Object.entries(operation.responses)) {
        check(content?.['application/json'], 'paths', path, method, 'responses', status)
      }
    }
    const webhook = API.webhooks.event.post
    check(webhook.requestBody.content['application/json'], 'webhooks', 'event', 'post', 'requestBody')
    assert.ok(checked > 100, `${checked} examples`)
  })

  test('explains every header of an answer, with an example', () => {
    for (const { path, operation } of operations) {
      for (const [status, { headers = {} }] of Object.entries(operation.responses)) {
        for (const [name, own] of Object.entries(headers)) {
          const { description, schema } = own.$ref ? API.components.headers[own.$ref.split('/').at(-1) ?? ''] : own
          assert.ok(description && schema.example !== undefined, `${path} ${status} ${name}`)
        }
      }
    }
  })

  test('has no example that the service would not answer with', () => {
    const example = (path: string, method = 'get', status = '200') =>
      API.paths[path][method].responses[status].content['application/json'].example
    const deliveries = [
      example('/v1/deliveries').data[0],
      example('/v1/dlq').data[0],
      example('/v1/events/{event_id}/deliveries').data[0],
      example('/v1/deliveries/{delivery_id}'),
      example('/v1/deliveries/{delivery_id}/replay', 'post', '202'),
    ]
    assert.deepEqual(
      deliveries.map(({ status }) => status),
      ['delivered', 'dead_lettered', 'delivered', 'delivered', 'pending'],
    )
    for (const { status, ...row } of deliveries) {
      assert.equal(row.completed_at !== null, status !== 'pending', status)
      assert.equal(row.dead_letter_reason !== null, status === 'dead_lettered', status)
      assert.equal(row.next_attempt_at !== null, status === 'pending', status)
      if (status === 'delivered') assert.deepEqual([row.last_status_code, row.last_error], [200, null])
    }
    const [attempt] = example('/v1/deliveries/{delivery_id}/attempts').data
    assert.ok(attempt.next_attempt_at > attempt.started_at)
    for (const path of ['/v1/endpoints/{endpoint_id}', '/v1/endpoints/{endpoint_id}/health']) {
      const { state, state_reason, state_since, next_probe_at } = example(path)
      assert.deepEqual([state, state_reason, state_since, next_probe_at], ['active', null, null, null], path)
    }
    const rotated = example('/v1/endpoints/{endpoint_id}/rotate-secret', 'post')
    assert.ok(rotated.previous_secret_expires_at > rotated.updated_at)
    const { month, period_start, period_end } = example('/v1/usage/current')
    assert.deepEqual(
      [month, period_start, period_end],
      ['2026-11', '2026-11-01T00:00:00.000Z', '2026-12-01T00:00:00.000Z'],
    )
    assert.match(example('/v1/admin/retention/run', 'post').cutoff, /T00:00:00\.000Z$/)
  })

  test('explains every error', () => {
    for (const [status, text] of Object.values(ERRORS)) {
      assert.match(API.info.description, new RegExp(`\\| ${status} \\| \`${text}\` \\| [^|]+ \\| [^|]+ \\|`))
    }
  })

  test('describes the webhook with the header prefix that is set', async (t) => {
    const own = await startService(t, {
      databaseUrl: database.url,
      mode: 'api',
      env: { WEBHOOK_HEADER_PREFIX: 'acme' },
    })
    const { body } = await own.call('GET', '/openapi.json')
    const names = body.webhooks.event.post.parameters.map(({ name }: { name: string }) => name)
    const prefixed = ['acme-event-id', 'acme-delivery-id', 'acme-timestamp', 'acme-signature']
    assert.deepEqual(names, ['user-agent', ...prefixed, 'webhook-id', 'webhook-timestamp', 'webhook-signature'])
  })

  test('passes the linter', () => {
    const cli = fileURLToPath(import.meta.resolve('@redocly/cli/bin/cli.js'))
    const env = { PATH: process.env.PATH, REDOCLY_TELEMETRY: 'off', REDOCLY_SUPPRESS_UPDATE_NOTICE: 'true' }
    const args = [cli, 'lint', fileURLToPath(FILE), '--format', 'summary']
    execFileSync(process.execPath, args, { env, stdio: 'pipe', encoding: 'utf8' })
  })
})

describe('the reference page', () => {
  test('is served with all that it loads, under a policy that allows nothing else', async () => {
    const page = await service.call('GET', '/docs')
    assert.equal(page.status, 200)
    const policy = page.headers.get('content-security-policy') ?? ''
    assert.match(policy, /default-src 'none'; script-src 'self'; style-src 'self';/)
    assert.doesNotMatch(policy, /unsafe|http|\*/)
    assert.doesNotMatch(page.text, /https?:|<script>|\son\w+=/)
    // All there is to see if a script or the document does not come.
    assert.match(page.text, /<div id="reference">.+ href="openapi.json"/)
    const files = [...page.text.matchAll(/(?:src|href)="(docs[^"]+)"/g)].map(([, file]) => file)
    assert.equal(files.length, 3)
    for (const file of files) {
      const { status, headers } = await service.call('GET', `/${file}`)
      assert.equal(status, 200)
      assert.match(headers.get('content-type') ?? '', /^text\/(css|javascript); charset=utf-8$/)
      const forGood = 'public, max-age=31536000, immutable'
      assert.equal(headers.get('cache-control'), file === 'docs/start.js' ? 'no-cache' : forGood)
    }
  })

  test('gives out no other file', async () => {
    for (const path of [
      '/docs/package.json',
      '/docs/5.35.0/package.json',
      '/docs/5.35.0/..%2fpackage.json',
      '/docs/x/y',
      '/docs/5.35.0/constructor',
    ]) {
      assert.equal((await service.call('GET', path)).status, 404, path)
    }
  })
})
