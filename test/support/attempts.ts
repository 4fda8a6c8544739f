import type { Pool } from '../../src/db/open.ts'
import type { Outcome } from '../../src/egress/send.ts'
import type { Claim } from '../../src/flow/claim.ts'
import type { EndpointRules } from '../../src/flow/observe.ts'
import { createRecord, type Recorded } from '../../src/flow/record.ts'
import { judge } from '../../src/flow/verdict.ts'
import { createLog } from '../../src/log.ts'

const log = createLog('warn')
const PATIENT: EndpointRules = {
  cap: 5,
  failures: 100,
  seconds: 100,
  probeSeconds: 1,
  probeMaxSeconds: 1,
  disableAfterSeconds: 0,
}

/**
 * Records attempts as a worker does, as if they had been answered with the given status, or with null as if the month had not allowed
 * them; what is called in one turn is one batch, and with one slot is recorded at once.
 */
export function createAttempt(
  pool: Pool,
  { rules = PATIENT, slots = 1 } = {},
): (claim: Claim, statusCode: number | null, more?: Partial<Outcome>) => Promise<Recorded> {
  const record = createRecord({ pool, log, rules, slots })
  return (claim, statusCode, more) => {
    if (statusCode === null) return record({ claim, outcome: null, verdict: { kind: 'over_quota' } })
    const outcome: Outcome = {
      startedAt: performance.now(),
      durationMs: 1,
      statusCode,
      error: statusCode === 200 ? null : 'http_status',
      errorMessage: null,
      responseBody: '',
      responseTruncated: false,
      retryAfter: null,
      ...more,
    }
    return record({ claim, outcome, verdict: judge(outcome, new Date()) })
  }
}
