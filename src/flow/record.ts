import { isTooSlow } from '../db/errors.ts'
import type { Pool } from '../db/open.ts'
import { transact } from '../db/retried.ts'
import type { Log } from '../log.ts'
import { createBatcher } from './batch.ts'
import { createCatchUp } from './catch-up.ts'
import { touch } from './claim.ts'
import { insist } from './insist.ts'
import { concerned, type EndpointRules, observe, type StateChange } from './observe.ts'
import { type AttemptRecord, type Stored, store } from './store.ts'

export type Recorded = {
  /** False if the claim had lapsed: nothing was stored. Null if an earlier, unanswered try may have stored it. */
  settled: boolean | null
  nextAttemptAt: Date | null
  /** Whether the endpoint has deliveries that are held. */
  held: boolean
  /** For an attempt that has failed: resolves once it is caught up with (flow/catch-up.ts), which may take long. Never rejects. */
  caughtUp?: Promise<void> | undefined
}

type Observed = Stored & { changes: StateChange[] }

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
 * Successes and failures of an endpoint share a batch, since failures count as in a row where no success is recorded with them.
 */
export function createRecord(deps: { pool: Pool; rules: EndpointRules; slots: number; log: Log }) {
  const { pool, rules, log } = deps
  const catchUp = createCatchUp(pool, log)

  async function recordUsual(attempts: AttemptRecord[]): Promise<Observed> {
    const stored = await store(pool, attempts)
    return { ...stored, changes: concerned(stored, rules).length > 0 ? await observeStored(stored) : [] }
  }

  /** The attempts are stored already. If this fails, or the process ends before it, the endpoint's next attempt moves the breaker. */
  async function observeStored(stored: Stored): Promise<StateChange[]> {
    try {
      return await transact(pool, (sql) => observe(sql, stored, rules))
    } catch (error) {
      log.error({ err: error }, 'breaker.not_moved')
      return []
    }
  }

  /** In one transaction: nobody is to see that a delivery was given up since its endpoint is gone, and the endpoint active. */
  async function recordGone(attempts: AttemptRecord[]): Promise<Observed> {
    return await pool.begin(async (sql) => {
      const stored = await store(sql, attempts)
      return { ...stored, changes: await observe(sql, stored, rules) }
    })
  }

  return createBatcher<AttemptRecord, Recorded>({
    max: MAX_BATCH,
    gather: {
      ms: GATHER_MS,
      enough: Math.min(ENOUGH, deps.slots),
      // The endpoint's next attempt may have to wait for this one's record. What was not sent has kept its slot.
      isUrgent: ({ claim, outcome }) => outcome === null || claim.atOnce !== null,
    },
    async run(attempts) {
      const isGone = attempts.some(({ verdict }) => verdict.kind === 'gone')
      const { results, endpoints, changes } = await (isGone ? recordGone : recordUsual)(attempts).catch(
        async (error: unknown) => {
          // This kept their jobs locked all that time, so that they could not be touched.
          const claims = attempts.map(({ claim }) => claim)
          if (isTooSlow(error)) await touch(pool, claims).catch(() => {})
          throw error
        },
      )
      for (const change of changes) log.warn(change, 'endpoint.state_changed')
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
