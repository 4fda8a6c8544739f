/**
 * Every error that a client can meet, with the exact string of the `error` field and its HTTP status. The strings are
 * part of the API: clients match on them.
 */
export const ERRORS = {
  invalid_json: [400, 'invalid JSON'],
  invalid_request: [400, 'invalid request'],
  invalid_url: [400, 'invalid url'],
  payload_too_large: [400, 'payload too large'],
  missing_token: [401, 'missing bearer token'],
  invalid_api_key: [401, 'invalid API key'],
  invalid_admin_key: [401, 'invalid admin key'],
  event_not_found: [404, 'event not found'],
  endpoint_not_found: [404, 'endpoint not found'],
  delivery_not_found: [404, 'delivery not found'],
  tenant_not_found: [404, 'tenant not found'],
  not_found: [404, 'not found'],
  request_timeout: [408, 'invalid request'],
  key_reused: [409, 'idempotency key already used with a different payload'],
  slug_taken: [409, 'tenant slug already taken'],
  rate_limited: [429, 'rate limit exceeded'],
  monthly_events: [429, 'monthly event limit exceeded'],
  monthly_attempts: [429, 'monthly attempt limit exceeded'],
  endpoint_count: [429, 'maximum endpoint count exceeded'],
  fanout: [429, 'maximum fan-out endpoints exceeded'],
  internal: [500, 'internal error'],
  overloaded: [503, 'service overloaded'],
} as const

export type ErrorCode = keyof typeof ERRORS

/** A failure that the client is told about. `details` goes out as it is, so it holds nothing internal. */
export class AppError extends Error {
  readonly code: ErrorCode
  readonly details: unknown
  constructor(code: ErrorCode, details?: unknown) {
    super(ERRORS[code][1])
    this.name = 'AppError'
    this.code = code
    this.details = details
  }
  get status() {
    return ERRORS[this.code][0]
  }
}
