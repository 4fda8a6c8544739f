import type { Db } from '../db/open.ts'
import { fragment, textList } from '../db/statement.ts'
import type { Outcome } from '../egress/send.ts'
import { createIsoTime } from '../iso-time.ts'
import type { Breaker } from './breaker.ts'
import { type Claim, fenceOf } from './claim.ts'
import type { Verdict } from './verdict.ts'

/** What an attempt came to. `over_quota` has no outcome: nothing was sent. */
export type AttemptRecord =
  | { claim: Claim; outcome: Outcome; verdict: Verdict }
  | { claim: Claim; outcome: null; verdict: { kind: 'over_quota' } }

/** An attempt that was stored, and when its delivery is tried again. */
export type Result = AttemptRecord & { nextAttemptAt: Date | null }

/** An endpoint's statistics as its attempts have left them. */
export type EndpointStats = {
  tenant_id: string
  endpoint_id: string
  held: number
  failure_streak: number
  /** From the start of the streak's first attempt to that of the last failed one: after an outage they are recorded much later. */
  failing_seconds: number
  breaker: Breaker['state']
  ramp: number | null
  failed_probes: number
  probing: string | null
}

/** `left_out`: by their places, from 1. `retried`: those that are tried again at `next_attempts`. */
type Row = EndpointStats & { settled: string[]; left_out?: number[]; retried?: string[]; next_attempts?: Date[] }

const isoTime = createIsoTime()

/** Attempts that were stored, as their claims were still valid, and how their endpoints stand afterwards. */
export type Stored = { results: Result[]; endpoints: EndpointStats[] }

/** Stores attempts and settles their jobs, in one statement. */
export async function store(sql: Db, attempts: AttemptRecord[]): Promise<Stored> {
  const column = <T>(read: (attempt: AttemptRecord) => T) => attempts.map(read)
  /** For values that are usually all null: then the list itself is null. */
  const columnOrNull = <T>(read: (attempt: AttemptRecord) => T | null) =>
    attempts.every((attempt) => read(attempt) === null) ? null : column(read)
  const startedAt = ({ claim, outcome }: AttemptRecord) =>
    outcome ? isoTime(Math.floor(outcome.startedAt + claim.clockOffsetMs)) : null
  const notBefore = ({ verdict }: AttemptRecord) => (verdict.kind === 'failed' ? verdict.notBeforeSeconds : 0)

  const ids = fragment`
    ${column(({ claim }) => claim.tenantId)}::text[], ${column(({ claim }) => claim.deliveryId)}::uuid[]`
  const claims = fragment`
    ${column(({ claim }) => claim.endpointId)}::uuid[], ${column(({ claim }) => claim.url)}::text[],
    ${column(({ claim }) => claim.attemptNumber)}::int[], ${column(({ claim }) => claim.recordedAttempts)}::int[],
    ${column(({ claim }) => claim.status)}::waybill.delivery_status[]`
  const outcomes = fragment`
    ${column(startedAt)}::timestamptz[],
    ${column(({ outcome }) => outcome?.durationMs ?? 0)}::int[], ${column(({ outcome }) => outcome?.statusCode ?? null)}::smallint[],
    ${columnOrNull(({ outcome }) => outcome?.error ?? null)}::text[], ${columnOrNull(({ outcome }) => outcome?.errorMessage ?? null)}::text[],
    ${textList(column(({ outcome }) => outcome?.responseBody ?? null))}::text[],
    ${column(({ outcome }) => outcome?.responseTruncated ?? false)}::boolean[]`
  const allDelivered = attempts.every(({ verdict }) => verdict.kind === 'delivered')
  // This process may have claimed a delivery again when its first claim had lapsed.
  const isEachOnce = new Set(column(({ claim }) => claim.deliveryId)).size === attempts.length
  const endpoints =
    allDelivered && isEachOnce
      ? await sql<Row[]>`
        select * from waybill.record(${ids}, ${column(({ claim }) => fenceOf(claim))}::text[], ${claims},
          ${column(() => 'delivered')}::waybill.delivery_status[], null, null, ${outcomes})`
      : await sql<Row[]>`
        select * from waybill.settle(${ids}, ${column(({ claim }) => claim.bundle)}::uuid[], ${column(({ claim }) => claim.retryCount)}::int[],
          ${column(({ claim }) => claim.claimedAtMs)}::float8[], ${column(({ verdict }) => verdict.kind)}::text[],
          ${column(notBefore)}::int[], ${claims}, ${outcomes})`
  return { results: resultsOf(attempts, endpoints), endpoints }
}

function resultsOf(attempts: AttemptRecord[], endpoints: Row[]): Result[] {
  const settled = new Set(endpoints.flatMap((endpoint) => endpoint.settled))
  const nextAttempts = new Map(
    endpoints.flatMap(({ retried = [], next_attempts: dates = [] }) => retried.map((id, nth) => [id, dates[nth]])),
  )
  const leftOut = new Set(endpoints[0]?.left_out)
  return attempts
    .filter(({ claim }, place) => settled.has(claim.deliveryId) && !leftOut.has(place + 1))
    .map((attempt) => ({ ...attempt, nextAttemptAt: nextAttempts.get(attempt.claim.deliveryId) ?? null }))
}
