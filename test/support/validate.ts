import { readFileSync } from 'node:fs'
import { Ajv2020 } from 'ajv/dist/2020.js'
import formats from 'ajv-formats'

// biome-ignore lint/suspicious/noExplicitAny: a JSON document, walked as such
type Json = any

/** The committed description of the API, which a test compares with the running service's. */
export const API: Json = JSON.parse(readFileSync(new URL('../http/openapi.json', import.meta.url), 'utf8'))

/** For the check, answers hold what the document says and not a field more. */
const closed = structuredClone(API)
const ajv = new Ajv2020({ strict: false, allErrors: true })
formats.default(ajv)
close(closed)
ajv.addSchema(closed, 'api')

function close(node: Json): void {
  if (typeof node !== 'object' || node === null) return
  if (node.type === 'object' && node.properties && node.additionalProperties === undefined) {
    node.additionalProperties = false
  }
  for (const [key, child] of Object.entries(node)) if (key !== 'example' && key !== 'examples') close(child)
}

const ROUTES = Object.keys(API.paths).map((template) => ({
  template,
  // An exact path goes before one with a parameter; none of ours compete otherwise.
  pattern: new RegExp(`^${template.replaceAll('.', '\\.').replaceAll(/\{\w+\}/g, '[^/]+')}$`),
}))

export type Answer = { status: number; headers: Headers; text: string }

const HEADERS = [
  'x-request-id',
  'x-content-type-options',
  'content-security-policy',
  'referrer-policy',
  'cache-control',
]

/**
 * Throws unless an answer is one that the API's description allows: its status, headers and every field of its body. What
 * the description does not know must be answered with `not found`.
 */
export function checkAnswer(method: string, path: string, { status, headers, text }: Answer): void {
  const pathname = path.split('?')[0] as string
  const complain = (problem: string) => {
    throw new Error(`${method} ${path} answered ${status} ${text.slice(0, 500)}, but ${problem}`)
  }
  for (const name of HEADERS) if (!headers.get(name)) complain(`without ${name}`)
  const template = ROUTES.find(({ pattern }) => pattern.test(pathname))?.template
  const verb = method === 'HEAD' ? 'get' : method.toLowerCase()
  const operation = template && API.paths[template][verb]
  if (operation === undefined) {
    if (pathname.startsWith('/docs/') && status === 200) return
    if (status !== 404) complain('no such route is described')
    if (method !== 'HEAD') checkBody('#/components/schemas/NotFoundError', text, complain)
    return
  }
  const response = operation.responses[status]
  if (response === undefined) complain('this status is not described')
  for (const [name, header] of Object.entries<Json>(response.headers ?? {})) {
    if (header.required && !headers.get(name)) complain(`without ${name}`)
  }
  if (method === 'HEAD') return
  const [mediaType] = Object.keys(response.content)
  if (headers.get('content-type')?.split(';')[0] !== mediaType) complain(`not as ${mediaType}`)
  if (mediaType !== 'application/json') return
  const pointer = ['paths', template, verb, 'responses', status, 'content', mediaType, 'schema']
  if (template?.startsWith('/v1/') && JSON.parse(text).ok !== status < 400) complain('`ok` is wrong')
  checkBody(`#/${pointer.map((part) => String(part).replaceAll('/', '~1')).join('/')}`, text, complain)
}

function checkBody(pointer: string, text: string, complain: (problem: string) => void): void {
  let body: unknown
  try {
    body = JSON.parse(text)
  } catch {
    complain('the body is not JSON')
  }
  const problems = problemsWith(pointer, body)
  if (problems !== null) complain(`the body breaks the schema: ${problems}`)
}

/** Problems of a value against a schema of the description (a JSON pointer), or null. */
export function problemsWith(pointer: string, value: unknown): string | null {
  // In a fragment braces are percent-encoded.
  const validate = ajv.getSchema(`api${encodeURI(pointer)}`)
  if (validate === undefined) throw new Error(`no schema at ${pointer}`)
  return validate(value) ? null : ajv.errorsText(validate.errors)
}
