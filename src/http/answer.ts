import { randomUUIDv7 } from 'node:crypto'
import { type IncomingMessage, type OutgoingHttpHeaders, ServerResponse } from 'node:http'
import type { AppError } from '../errors.ts'

/**
 * Headers of every answer. Nothing here is a page, so nothing may be loaded, framed or sniffed. No answer may be cached, because
 * most hold a tenant's data and some a secret. There is no CORS header on purpose: keys are for servers.
 */
export const SECURITY_HEADERS = {
  'cache-control': 'no-store',
  'content-security-policy': "default-src 'none'; frame-ancestors 'none'",
  'referrer-policy': 'no-referrer',
  'x-content-type-options': 'nosniff',
} as const

const SANE_REQUEST_ID = /^[A-Za-z0-9._:-]{1,128}$/

/** The id of a request: the client's own if it is well-formed, else a new one. */
export const requestIdOf = (given: unknown): string =>
  typeof given === 'string' && SANE_REQUEST_ID.test(given) ? given : randomUUIDv7()

/**
 * Node's response, with the headers of every answer and those known before the answer is made, which are written together with
 * its own. Setting them one by one takes Node twice as long, and setting them on the web `Response` costs as much as routing
 * and validating the request.
 */
export class Answer extends ServerResponse {
  readonly requestId: string
  readonly headers: OutgoingHttpHeaders
  /** Asked when the answer begins: whether its client is to leave with it. */
  isLast = () => false
  /** To be called before the body is read: its client may wait for that. */
  askForBody = () => {}

  constructor(request: IncomingMessage, options?: object) {
    // @ts-expect-error Node gives its options too.
    super(request, options)
    this.requestId = requestIdOf(request.headers['x-request-id'])
    this.headers = { ...SECURITY_HEADERS, 'x-request-id': this.requestId }
  }

  override writeHead(status: number, own?: unknown): this {
    const headers = { ...this.headers, ...(own as OutgoingHttpHeaders | undefined) }
    if (this.isLast()) headers.connection = 'close'
    return super.writeHead(status, headers)
  }
}

/** What Hono hands on with every request. */
export type Env = {
  Bindings: { incoming: IncomingMessage; outgoing: Answer }
  Variables: { tenantId: string | undefined }
}

/** An error as the client sees it. */
export const errorBody = (error: AppError) => ({
  ok: false,
  error: error.message,
  ...(error.details !== undefined && { details: error.details }),
})
