import type { KeyObject } from 'node:crypto'
import type { Outcome, Sender } from '../egress/send.ts'
import { madeAt } from '../ids.ts'
import { createIsoTime } from '../iso-time.ts'
import type { Log } from '../log.ts'
import { ownerOf } from '../secrets.ts'
import { type Claim, isLate } from './claim.ts'
import type { WithPayload } from './payload.ts'
import type { Recorded } from './record.ts'
import { createSigner } from './sign.ts'
import { createSpread } from './spread.ts'
import type { AttemptRecord } from './store.ts'
import { judge } from './verdict.ts'

const ASKED_TO_WAIT = ', and asked to be tried later (Retry-After)'

/**
 * One attempt: build the body, sign it, send it, judge the outcome, record it. The returned function calls `answered` when the
 * request is over and resolves, with what followed, once the attempt is recorded. It rejects if nothing was sent or the request was
 * interrupted: then the claim is to be handed back, or put off (flow/in-hand.ts). It also rejects if the record cannot be stored:
 * then the claim lapses.
 */
export function createDeliver(deps: {
  sender: Sender
  withPayload: WithPayload
  record: (attempt: AttemptRecord) => Promise<Recorded>
  keyOf: (sealed: string, owner: string) => KeyObject
  headerPrefix: string
  userAgent: string
  log: Log
}): (claim: Claim, answered: () => void) => Promise<Recorded> {
  const signedHeaders = createSigner(deps.headerPrefix)
  const spread = createSpread()

  /** `kept`: the claim as it is in hand, and touched. `claim` may be a copy that was brought up to date (flow/payload.ts). */
  async function send(claim: Claim, payload: string, kept: Claim): Promise<Outcome> {
    const body = requestBody(claim, payload)
    const headers = {
      'content-type': 'application/json',
      'user-agent': deps.userAgent,
      ...signedHeaders({
        eventId: claim.eventId,
        deliveryId: claim.deliveryId,
        timestampSeconds: Math.floor((performance.now() + claim.clockOffsetMs) / 1000),
        body,
        keys: claim.secrets.map((sealed) => deps.keyOf(sealed, ownerOf(claim.tenantId, claim.endpointId))),
      }),
    }
    // It may be late where the process was stopped meanwhile, or its event loop was.
    return await deps.sender.send({ url: claim.url, headers, body, isLate: () => isLate(kept) })
  }

  return async function deliver(claim, answered) {
    if (!claim.withinQuota) {
      return await deps.record({ claim, outcome: null, verdict: { kind: 'over_quota' } })
    }
    const { sent, outcome } = await deps.withPayload(claim, async (sent, payload) => ({
      sent,
      outcome: await send(sent, payload, claim),
    }))
    answered()
    const verdict = judge(outcome, new Date(performance.now() + claim.clockOffsetMs))
    if (verdict.kind === 'failed') {
      // Else nothing would tell why the next attempt may be a day off: headers are not kept.
      if (verdict.notBeforeSeconds > 0) outcome.errorMessage += ASKED_TO_WAIT
      verdict.notBeforeSeconds = spread(claim.tenantId, verdict.notBeforeSeconds)
    }
    const recorded = await deps.record({ claim: sent, outcome, verdict })
    deps.log.info(attemptLine(claim, outcome, recorded), 'delivery.attempted')
    return recorded
  }
}

const isoTime = createIsoTime()

/** The same bytes at every attempt: the payload goes in as its publisher wrote it. */
function requestBody(claim: Claim, payload: string): string {
  const timestamp = isoTime(madeAt(claim.eventId).getTime())
  return `{"id":"${claim.eventId}","type":"${claim.eventType}","timestamp":"${timestamp}","data":${payload}}`
}

function attemptLine(claim: Claim, outcome: Outcome, { settled, nextAttemptAt }: Recorded) {
  return {
    tenant_id: claim.tenantId,
    event_id: claim.eventId,
    delivery_id: claim.deliveryId,
    endpoint_id: claim.endpointId,
    event_type: claim.eventType,
    attempt_number: claim.attemptNumber,
    status_code: outcome.statusCode,
    error: outcome.error,
    duration_ms: outcome.durationMs,
    next_attempt_at: nextAttemptAt,
    // False: the claim had lapsed and another worker has the delivery, so this attempt does not count. Null: unknown, since an
    // earlier try to record it, which was not answered, may have succeeded.
    settled,
  }
}
