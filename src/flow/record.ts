import type { PgBoss } from 'pg-boss'
import { isTooSlow } from '../db/errors.ts'
import type { Db, Pool } from '../db/open.ts'
import { transact } from '../db/retried.ts'
import { textList } from '../db/statement.ts'
import { createIsoTime } from '../iso-time.ts'
import type { Log } from '../log.ts'
import { createBatcher } from './batch.ts'
import { createCatchUp } from './catch-up.ts'
import { fenceOf, linesUp, touch } from './claim.ts'
import { insist } from './insist.ts'
import {
  type EndpointRules,
  type EndpointStats,
  lockStats,
  observeEndpoints,
  type StateChange,
  wouldMove,
} from './observe.ts'
import { type AttemptRecord, queueDeadLetters, type Result, settle } from './settle.ts'

export type Recorded = {
  /** False if the claim had lapsed: nothing was stored. Null if an earlier, unanswered try may have stored it. */
  settled: boolean | null
  nextAttemptAt: Date | null
  /** Whether the endpoint has deliveries that are held. */
  held: boolean
  /** For an attempt that has failed: resolves once it is caught up with (flow/catch-up.ts), which may take long. Never rejects. */
  caughtUp?: Promise<void> | undefined
}

const MAX_BATCH = 200
/**
 * A slot is free once its request is over (flow/in-hand.ts), so records can wait for others to share a statement with, which costs as
 * much for one as for several. At 300 deliveries a second that saved a fifth of Postgres's time and a sixth of the worker's.
 */
const GATHER_MS = 10
const ENOUGH = 32

/**
 * Records attempts in batches: finishes or fails their jobs, stores the attempts, deliveries and counters of those whose
 * claim was still valid, then does whatever follows for their endpoints. A worker whose claims were taken back changes nothing.
 * If all were delivered, as is usual, this is one statement; else one transaction. Successes and failures of an endpoint share a batch,
 * since failures count as in a row where no success is recorded with them.
 */
export function createRecord(deps: { pool: Pool; boss: PgBoss; rules: EndpointRules; slots: number; log: Log }) {
  const { pool, boss, rules } = deps
  const catchUp = createCatchUp(pool, deps.log)

  async function recordDelivered(attempts: AttemptRecord[]): Promise<Stored> {
    const stored = await store(
      pool,
      attempts.map((attempt) => ({ ...attempt, ending: 'delivered', nextAttemptAt: null })),
    )
    const moves = wouldMove(stored.endpoints, stored.results, rules)
    return { ...stored, changes: moves ? await observeStored(stored) : [] }
  }

  /** The attempts are stored already. If this fails, or the process ends before it, the next success moves the breaker. */
  async function observeStored(stored: Omit<Stored, 'changes'>): Promise<StateChange[]> {
    try {
      return await transact(pool, async (sql) =>
        observeEndpoints(sql, await lockStats(sql, stored.endpoints), stored.results, rules),
      )
    } catch (error) {
      deps.log.error({ err: error }, 'breaker.not_moved')
      return []
    }
  }

  async function recordAny(attempts: AttemptRecord[]): Promise<Stored> {
    return await pool.begin(async (sql) => {
      const stored = await store(sql, await settle(sql, attempts))
      await queueDeadLetters(sql, boss, stored.results)
      const unmade = stored.results.filter(({ outcome }) => outcome === null).map(({ claim }) => claim.tenantId)
      if (unmade.length > 0) await sql`select waybill.refund_attempts(${unmade}::text[])`
      return { ...stored, changes: await observeEndpoints(sql, stored.endpoints, stored.results, rules) }
    })
  }

  return createBatcher<AttemptRecord, Recorded>({
    max: MAX_BATCH,
    gather: {
      ms: GATHER_MS,
      enough: Math.min(ENOUGH, deps.slots),
      // The endpoint's next attempt may have to wait for this one's record. What was not sent has kept its slot.
      isUrgent: ({ claim, outcome }) => outcome === null || linesUp(claim),
    },
    async run(attempts) {
      const allDelivered = attempts.every(({ verdict }) => verdict.kind === 'delivered')
      const { results, endpoints, changes } = await (allDelivered ? recordDelivered : recordAny)(attempts).catch(
        async (error: unknown) => {
          // This kept their jobs locked all that time, so that they could not be touched.
          const claims = attempts.map(({ claim }) => claim)
          if (isTooSlow(error)) await touch(pool, claims).catch(() => {})
          throw error
        },
      )
      for (const change of changes) deps.log.warn(change, 'endpoint.state_changed')
      const byClaim = new Map(results.map((result) => [result.claim, result]))
      const holding = new Set(endpoints.filter(({ held }) => held > 0).map((endpoint) => endpoint.endpoint_id))
      return attempts.map(({ claim, verdict }) => {
        const result = byClaim.get(claim)
        const hasFailed = verdict.kind === 'failed' || verdict.kind === 'gone'
        return {
          settled: result !== undefined,
          nextAttemptAt: result?.nextAttemptAt ?? null,
          held: holding.has(claim.endpointId),
          caughtUp: result && hasFailed ? catchUp(claim) : undefined,
        }
      })
    },
  })
}

type RecordAttempt = ReturnType<typeof createRecord>

/** Records each attempt however long the database is away. After a try that was not answered, nobody knows what that has stored. */
export function insistOn(record: RecordAttempt, log: Log): RecordAttempt {
  return (attempt) => {
    let tries = 0
    return insist(
      async () => {
        tries++
        const recorded = await record(attempt)
        return { ...recorded, settled: recorded.settled || (tries > 1 ? null : false) }
      },
      (error) => log.warn({ err: error, delivery_id: attempt.claim.deliveryId }, 'record.waiting'),
    )
  }
}

const isoTime = createIsoTime()

type Stored = { results: Result[]; endpoints: EndpointStats[]; changes: StateChange[] }

/**
 * Stores attempts (waybill.record) and finishes the jobs of those that have not failed. Returns those whose claim was still
 * valid, and how their endpoints stand afterwards.
 */
async function store(sql: Db, results: Result[]): Promise<Omit<Stored, 'changes'>> {
  const column = <T>(read: (result: Result) => T) => results.map(read)
  /** For values that are usually all null: then the list itself is null. */
  const columnOrNull = <T>(read: (result: Result) => T | null) =>
    results.every((result) => read(result) === null) ? null : column(read)
  const fence = (result: Result) => (result.verdict.kind === 'failed' ? null : fenceOf(result.claim))
  const status = ({ ending }: Result) => (ending === 'delivered' || ending === 'retrying' ? ending : 'dead_lettered')
  const startedAt = ({ claim, outcome }: Result) =>
    outcome ? isoTime(Math.floor(outcome.startedAt + claim.clockOffsetMs)) : null
  const endpoints = await sql<(EndpointStats & { settled: string[] })[]>`
    select * from waybill.record(
      ${column(({ claim }) => claim.tenantId)}::text[], ${column(({ claim }) => claim.deliveryId)}::uuid[], ${column(fence)}::text[],
      ${column(({ claim }) => claim.endpointId)}::uuid[], ${column(({ claim }) => claim.url)}::text[],
      ${column(({ claim }) => claim.attemptNumber)}::int[], ${column(({ claim }) => claim.recordedAttempts)}::int[],
      ${column(({ claim }) => claim.status)}::waybill.delivery_status[], ${column(status)}::waybill.delivery_status[],
      ${columnOrNull(({ ending }) => (ending === 'delivered' || ending === 'retrying' ? null : ending))}::waybill.dead_letter_reason[],
      ${columnOrNull(({ nextAttemptAt }) => nextAttemptAt)}::timestamptz[], ${column(startedAt)}::timestamptz[],
      ${column(({ outcome }) => outcome?.durationMs ?? 0)}::int[], ${column(({ outcome }) => outcome?.statusCode ?? null)}::smallint[],
      ${columnOrNull(({ outcome }) => outcome?.error ?? null)}::text[], ${columnOrNull(({ outcome }) => outcome?.errorMessage ?? null)}::text[],
      ${textList(column(({ outcome }) => outcome?.responseBody ?? null))}::text[],
      ${column(({ outcome }) => outcome?.responseTruncated ?? false)}::boolean[])`
  const settled = new Set(endpoints.flatMap((endpoint) => endpoint.settled))
  // If this process has claimed a delivery twice, the last claim is the valid one.
  const last = new Map<string, Result>()
  for (const result of results) {
    const { deliveryId, retryCount } = result.claim
    if (settled.has(deliveryId) && retryCount >= (last.get(deliveryId)?.claim.retryCount ?? 0))
      last.set(deliveryId, result)
  }
  return { results: [...last.values()], endpoints }
}
