import type { PgBoss } from 'pg-boss'
import type { Pool } from './db.ts'
import { LocalFault } from './egress/failure.ts'
import type { Sender } from './egress/send.ts'
import { startAnnouncing } from './flow/announce.ts'
import { type Claim, type ClaimedJob, createClaim, unclaim } from './flow/claim.ts'
import { takeDeadLetters } from './flow/dead-letter.ts'
import { createDeliver } from './flow/deliver.ts'
import { startDispatcher } from './flow/dispatch.ts'
import { holdDeliveries } from './flow/hold.ts'
import { insist } from './flow/insist.ts'
import { createLanes } from './flow/lanes.ts'
import { startLoop } from './flow/loop.ts'
import type { EndpointRules } from './flow/observe.ts'
import { createTurns, until } from './flow/pacing.ts'
import { createPayloads, PayloadLate } from './flow/payload.ts'
import { createRecord } from './flow/record.ts'
import { startReleaser } from './flow/release.ts'
import { startTakingBack } from './flow/take-back.ts'
import type { Log } from './log.ts'
import { bossDb, DELIVERIES } from './queue.ts'
import { cacheOpened, MissingKey, type SecretBox } from './secrets.ts'
import { LAST_WORDS_MS } from './shutdown.ts'

/** A third of the time after which a claim lapses (flow/take-back.ts), so that one late touch does not cost it. */
const TOUCH_MS = 3000
const STALE_LOOK_MS = 100
const DEAD_LETTER_POLL_MS = 500
const MOST_CHORES = 2
const NOT_HERE_MS = 1000
/** Opening a connection takes as long as several requests: what arrives meanwhile gets its turn in between. */
const STARTS_A_TURN = 5

/** What a worker interrupts its requests with when its grace is over. */
const SHUTTING_DOWN = new Error('the worker is shutting down')

export type Worker = {
  /**
   * Stops claiming at once, waits up to `graceMs` for what is in flight, then interrupts the rest and hands it back. Resolves
   * a second later at the latest: what the database did not take by then lapses, and is sent again. May be called again,
   * with less.
   */
  stop(graceMs: number): Promise<void>
}

/**
 * Delivers: claims due jobs, attempts up to `concurrency` of them at a time and up to `rules.cap` for one endpoint,
 * releases what is held, and marks dead letters. `pool` records, `claims` is a pool of its own, which no request can keep
 * busy and whose commits need not be durable: a crash merely forgets a claim.
 */
export async function startWorker(deps: {
  pool: Pool
  claims: Pool
  boss: PgBoss
  sender: Sender
  secretBox: SecretBox
  log: Log
  concurrency: number
  rules: EndpointRules
  attemptTimeoutSeconds: number
  monthlyAttempts: number
  headerPrefix: string
  userAgent: string
}): Promise<Worker> {
  const { pool, claims, boss, log, rules } = deps
  const interrupt = new AbortController()
  /** Ends the waiting of those that have not been sent yet. */
  const closing = new AbortController()
  /**
   * Everything that is claimed: started, or waiting for its endpoint or its moment, with what frees its slot. By claim: when
   * one lapses, this very worker may claim the delivery again.
   */
  const inHand = new Map<ClaimedJob, () => void>()
  const attempts = new Set<Promise<void>>()
  const turn = createTurns(STARTS_A_TURN)
  const chores = new Set<Promise<void>>()
  const lanes = createLanes({ cap: rules.cap, slots: deps.concurrency })
  const claim = createClaim(claims, deps.monthlyAttempts)
  const record = createRecord({ pool, boss, rules, log })
  const deliver = createDeliver({
    sender: deps.sender,
    withPayload: createPayloads({ pool, closing: closing.signal, log }),
    record: (attempt) =>
      insist(
        () => record(attempt),
        (error) => log.warn({ err: error, delivery_id: attempt.claim.deliveryId }, 'record.waiting'),
      ),
    openSecret: cacheOpened(deps.secretBox),
    headerPrefix: deps.headerPrefix,
    userAgent: deps.userAgent,
    log,
  })

  async function attempt(claim: Claim, answered: () => void): Promise<void> {
    try {
      if (claim.startAt !== null) await until(claim.startAt, closing.signal)
      // It may hang, and have no connection yet.
      if (lanes.pace(claim.endpointId) === 0) await turn()
      const { held } = await deliver(claim, interrupt.signal, answered)
      if (held && lanes.isRoomy(claim.endpointId)) releaser.wake()
    } catch (error) {
      if (error === SHUTTING_DOWN) await handBack([claim])
      else if (error instanceof PayloadLate) await putOff(claim, error)
      else if (error instanceof MissingKey || error instanceof LocalFault) await leaveToOthers(claim, error)
      // Ours to mend, not the receiver's fault: the claim lapses and the delivery is tried again.
      else log.error({ err: error, tenant_id: claim.tenantId, delivery_id: claim.deliveryId }, 'delivery.failed')
    }
  }

  /** Attempts a claim, and whatever waits for the same endpoint as soon as the request is over. */
  function start(claim: Claim): void {
    const goOn = () => {
      const next = interrupt.signal.aborted ? undefined : lanes.next(claim)
      if (next !== undefined) start(next)
    }
    const done = attempt(claim, goOn).finally(() => {
      attempts.delete(done)
      letGo([claim])
      goOn()
    })
    attempts.add(done)
  }

  function freeSlots(claims: ClaimedJob[]): void {
    for (const claim of claims) inHand.get(claim)?.()
  }

  /** They are not in hand any more, and their slots are free. */
  function letGo(claims: ClaimedJob[]): void {
    freeSlots(claims)
    for (const claim of claims) inHand.delete(claim)
  }

  /**
   * As if they had never been claimed: an interrupted attempt is not a failed one, and costs no retry. When the database
   * does not answer, the claims lapse instead.
   */
  async function handBack(given: Claim[]): Promise<void> {
    freeSlots(given)
    if (given.length === 0) return
    try {
      await unclaim(pool, given)
    } catch (error) {
      log.error({ err: error, deliveries: given.length }, 'worker.hand_back_failed')
    }
    letGo(given)
  }

  /** They stay in hand until they are held: claims that lapse count as attempts whose worker was lost. */
  async function hold(held: ClaimedJob[], { counted }: { counted: boolean }): Promise<void> {
    freeSlots(held)
    await insist(
      () => holdDeliveries(pool, held, { counted }),
      (error) => log.warn({ err: error, deliveries: held.length }, 'hold.waiting'),
    ).finally(() => letGo(held))
  }

  /** It comes again when its endpoint has room, behind what waited for the same. */
  async function putOff(claim: Claim, reason: Error): Promise<void> {
    const ids = { tenant_id: claim.tenantId, delivery_id: claim.deliveryId }
    log.warn({ ...ids, err: reason }, 'delivery.put_off')
    await hold([claim], { counted: true }).catch((error: unknown) =>
      log.error({ ...ids, err: error }, 'worker.put_away_failed'),
    )
  }

  /**
   * Others may have the key that this process was started without, or files for a connection. The delivery is not to blame,
   * so it costs no attempt; it keeps its slot for a moment, or it would go in and out of the queue all the time.
   */
  async function leaveToOthers(claim: Claim, reason: MissingKey | LocalFault): Promise<void> {
    await until(performance.now() + NOT_HERE_MS, closing.signal).catch(() => {})
    await putOff(claim, reason)
  }

  /** Runs what puts claims away while the next are fetched: what can be sent must not wait for what cannot. */
  async function aside(work: () => Promise<void>): Promise<void> {
    const done = work()
      // They lapse, and come again.
      .catch((error: unknown) => log.error({ err: error }, 'worker.put_away_failed'))
      .finally(() => chores.delete(done))
    chores.add(done)
    if (chores.size > MOST_CHORES) await Promise.race(chores)
  }

  const deliveries = startDispatcher({
    slots: deps.concurrency,
    log,
    async fetch(kind, { max, thorough, take }) {
      const claimed = await claim({ kind, max, thorough })
      const full: Claim[] = []
      for (const claim of claimed.send) {
        inHand.set(claim, take())
        const verdict = lanes.admit(claim)
        if (verdict === 'start') start(claim)
        if (verdict === 'full') full.push(claim)
      }
      const { hold: unsendable, obsolete } = claimed
      for (const job of unsendable) inHand.set(job, () => {})
      if (full.length + unsendable.length + obsolete.length > 0) {
        await aside(async () => {
          if (full.length > 0) await hold(full, { counted: true })
          if (unsendable.length > 0) await hold(unsendable, { counted: false })
          const jobs = obsolete.map(({ job }) => job)
          if (jobs.length > 0) await boss.deleteJob(DELIVERIES, jobs, { db: bossDb(pool) })
        })
      }
      return claimed.send.length + claimed.hold.length + claimed.obsolete.length
    },
  })
  const releaser = startReleaser({ pool, lanes, leaseSeconds: deps.attemptTimeoutSeconds + 10, log })
  const deadLetters = startLoop({
    name: 'dead-letters',
    idleMs: DEAD_LETTER_POLL_MS,
    log,
    run: async () => (await takeDeadLetters(pool, boss, log)) > 0,
  })
  const announcing = startAnnouncing(pool, log)
  const waiting = startLoop({
    name: 'waiting',
    idleMs: STALE_LOOK_MS,
    log,
    async run() {
      const stale = lanes.takeStale()
      if (stale.length > 0) await hold(stale, { counted: true })
      return false
    },
  })
  const takingBack = startTakingBack({ pool: claims, boss, wake: deliveries.wake, log })
  const touching = setInterval(() => {
    const jobs = [...inHand.keys()].map(({ job }) => job)
    if (jobs.length === 0) return
    claims`select waybill.touch(${jobs.map(({ id }) => id)}::uuid[], ${jobs.map(({ retryCount }) => retryCount)}::int[])`.catch(
      (error: unknown) => log.warn({ err: error }, 'touch.failed'),
    )
  }, TOUCH_MS)
  const due = await pool.listen(
    'waybill_due',
    (kind) => deliveries.wake(kind === 'retry'),
    () => deliveries.wake(true),
  )
  const held = await pool.listen('waybill_held', () => releaser.wake(), releaser.wake)

  async function finish(): Promise<void> {
    await Promise.all([deliveries, releaser, deadLetters, announcing, waiting, takingBack].map((loop) => loop.stop()))
    closing.abort(SHUTTING_DOWN)
    await handBack(lanes.takeWaiting())
    while (attempts.size + chores.size > 0) await Promise.all([...attempts, ...chores])
    await Promise.all([due.unlisten(), held.unlisten()])
  }

  return {
    async stop(graceMs) {
      const { promise: tooLate, resolve: giveUp } = Promise.withResolvers<void>()
      const timers = [
        setTimeout(() => interrupt.abort(SHUTTING_DOWN), graceMs),
        setTimeout(() => {
          log.warn({ deliveries: inHand.size }, 'worker.gave_up')
          giveUp()
        }, graceMs + LAST_WORDS_MS),
      ]
      await Promise.race([finish(), tooLate])
      for (const timer of timers) clearTimeout(timer)
      clearInterval(touching)
    },
  }
}
