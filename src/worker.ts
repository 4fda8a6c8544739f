import { LRUCache } from 'lru-cache'
import type { PgBoss } from 'pg-boss'
import type { Pool } from './db.ts'
import type { Sender } from './egress/send.ts'
import { type Claim, claimDeliveries, refundAttempts } from './flow/claim.ts'
import { takeDeadLetters } from './flow/dead-letter.ts'
import { createDeliver } from './flow/deliver.ts'
import { startDispatcher } from './flow/dispatch.ts'
import { holdDeliveries } from './flow/hold.ts'
import { createRecord } from './flow/record.ts'
import type { Log } from './log.ts'
import { bossDb, DELIVERIES, unclaim } from './queue.ts'
import type { SecretBox } from './secrets.ts'

/** A third of the queue's heartbeat, so that one late touch does not cost a claim. */
const TOUCH_MS = 3000

/** What a worker interrupts its requests with when its grace is over. */
const SHUTTING_DOWN = new Error('the worker is shutting down')

export type Worker = {
  /** Stops claiming at once, waits up to `graceMs` for what is in flight, then interrupts the rest and hands it back. */
  stop(graceMs: number): Promise<void>
}

/**
 * Delivers: claims due jobs, attempts up to `concurrency` of them at a time, and marks dead letters. `pool` records,
 * `claims` is a pool whose commits need not be durable: a crash merely forgets a claim.
 */
export async function startWorker(deps: {
  pool: Pool
  claims: Pool
  boss: PgBoss
  sender: Sender
  secretBox: SecretBox
  log: Log
  concurrency: number
  monthlyAttempts: number
  headerPrefix: string
  userAgent: string
}): Promise<Worker> {
  const { pool, claims, boss, log } = deps
  const interrupt = new AbortController()
  const inFlight = new Map<string, { claim: Claim; done: Promise<void> }>()
  const deliver = createDeliver({
    sender: deps.sender,
    record: untilRecorded(createRecord(pool, boss), log),
    openSecret: cachedSecrets(deps.secretBox),
    headerPrefix: deps.headerPrefix,
    userAgent: deps.userAgent,
    log,
  })

  async function attempt(claim: Claim, release: () => void): Promise<void> {
    try {
      await deliver(claim, interrupt.signal)
    } catch (error) {
      if (error === SHUTTING_DOWN) return handBack(claim)
      // Ours to mend, not the receiver's fault: the claim lapses and the delivery is tried again.
      log.error({ err: error, tenant_id: claim.tenantId, delivery_id: claim.deliveryId }, 'delivery.failed')
    } finally {
      inFlight.delete(claim.deliveryId)
      release()
    }
  }

  /** As if it had never been claimed: an interrupted attempt is not a failed one, and costs no retry. */
  async function handBack(claim: Claim): Promise<void> {
    const [given] = await unclaim(pool, [claim.job])
    if (given) await refundAttempts(pool, [claim.tenantId])
  }

  const deliveries = startDispatcher({
    slots: deps.concurrency,
    log,
    async fetch(max, release) {
      const claimed = await claimDeliveries(claims, boss, max, deps.monthlyAttempts)
      const { sendable, inactive, obsolete } = claimed
      for (const claim of sendable) inFlight.set(claim.deliveryId, { claim, done: attempt(claim, release) })
      if (inactive.length > 0) await holdDeliveries(pool, boss, inactive)
      if (obsolete.length > 0) {
        await boss.deleteJob(
          DELIVERIES,
          obsolete.map(({ job }) => job),
          { db: bossDb(pool) },
        )
      }
      for (const _ of [...inactive, ...obsolete]) setImmediate(release)
      return sendable.length + inactive.length + obsolete.length
    },
  })
  const deadLetters = startDispatcher({
    slots: 1,
    log,
    async fetch(_max, release) {
      const found = await takeDeadLetters(pool, boss, log)
      if (found > 0) setImmediate(release)
      return Math.min(found, 1)
    },
  })
  const touching = setInterval(() => {
    const jobs = [...inFlight.values()].map(({ claim }) => claim.job)
    if (jobs.length === 0) return
    boss
      .touch(DELIVERIES, jobs, { db: bossDb(pool) })
      .catch((error: unknown) => log.warn({ err: error }, 'touch.failed'))
  }, TOUCH_MS)
  const listening = await pool.listen(
    'waybill_due',
    () => deliveries.wake(),
    () => deliveries.wake(),
  )

  return {
    async stop(graceMs) {
      await Promise.all([deliveries.stop(), deadLetters.stop()])
      const timer = setTimeout(() => interrupt.abort(SHUTTING_DOWN), graceMs)
      await Promise.all([...inFlight.values()].map(({ done }) => done))
      clearTimeout(timer)
      clearInterval(touching)
      await listening.unlisten()
    },
  }
}

/** How long, and how often, recording is tried again: beyond this the claim has lapsed and another worker has the job. */
const RECORD_TRIES = 90
const RECORD_PAUSE_MS = 500

/** What a receiver has answered is worth keeping: while the database is away, recording waits for it. */
function untilRecorded(record: ReturnType<typeof createRecord>, log: Log): ReturnType<typeof createRecord> {
  return async (attempt) => {
    for (let tries = 1; ; tries++) {
      try {
        return await record(attempt)
      } catch (error) {
        if (tries === RECORD_TRIES) throw error
        if (tries === 1) log.warn({ err: error, delivery_id: attempt.claim.deliveryId }, 'record.waiting')
        await new Promise((resolve) => setTimeout(resolve, RECORD_PAUSE_MS))
      }
    }
  }
}

/** Decrypting takes longer than signing, and endpoints are few beside their deliveries. */
function cachedSecrets(box: SecretBox): (sealed: Uint8Array, claim: Claim) => string {
  const opened = new LRUCache<string, string>({ max: 10_000 })
  return (sealed, claim) => {
    const key = Buffer.from(sealed).toString('latin1')
    const known = opened.get(key)
    if (known !== undefined) return known
    const secret = box.open(sealed, `${claim.tenantId}/${claim.endpointId}`)
    opened.set(key, secret)
    return secret
  }
}
