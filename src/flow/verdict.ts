import type { Outcome } from '../egress/send.ts'

/**
 * What an attempt leads to. `notBeforeSeconds`: the least wait from the end of the attempt, if its receiver asked for one
 * (Retry-After) or the tenant's failures are spread out (flow/spread.ts); else 0.
 */
export type Verdict = { kind: 'delivered' } | { kind: 'failed'; notBeforeSeconds: number } | { kind: 'gone' }

/** The longest wait that a receiver's Retry-After is granted. */
export const MAX_RETRY_AFTER_SECONDS = 86_400

/**
 * 2xx is success; 410 says that the endpoint will never want this again (Standard Webhooks); all else is tried again. `now`, with which a
 * Retry-After that is a date is compared, is by the database's clock.
 */
export function judge(outcome: Pick<Outcome, 'statusCode' | 'error' | 'retryAfter'>, now: Date): Verdict {
  const { statusCode } = outcome
  if (outcome.error === null) return { kind: 'delivered' }
  if (statusCode === 410) return { kind: 'gone' }
  const asked = statusCode === 429 || statusCode === 503
  return { kind: 'failed', notBeforeSeconds: asked ? retryAfterSeconds(outcome.retryAfter, now) : 0 }
}

/** A Retry-After header as seconds from `now`: 0 to 24 hours, 0 when absent or unreadable (RFC 9110, 10.2.3). */
function retryAfterSeconds(header: string | null, now: Date): number {
  if (header === null) return 0
  const text = header.trim()
  const isNumber = /^\d+(\.\d+)?$/.test(text)
  // Date.parse makes a date of nearly anything ("-1", "Soon 2099"). HTTP dates begin with a weekday and are in GMT, though one
  // of their three forms does not say so.
  if (!isNumber && !/^(Mon|Tue|Wed|Thu|Fri|Sat|Sun)/.test(text)) return 0
  const seconds = isNumber
    ? Number(text)
    : (Date.parse(/GMT$/.test(text) ? text : `${text} GMT`) - now.getTime()) / 1000
  return Number.isNaN(seconds) ? 0 : Math.min(Math.max(0, Math.ceil(seconds)), MAX_RETRY_AFTER_SECONDS)
}
