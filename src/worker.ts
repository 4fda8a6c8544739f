import type { PgBoss } from 'pg-boss'
import type { Pool } from './db/open.ts'
import type { Sender } from './egress/send.ts'
import { startAnnouncing } from './flow/announce.ts'
import { createAttempts, SHUTTING_DOWN } from './flow/attempts.ts'
import { touch } from './flow/claim.ts'
import { createClaim } from './flow/claim-due.ts'
import { createDeadLetterTaker } from './flow/dead-letter.ts'
import { createDeliver } from './flow/deliver.ts'
import { startDispatcher } from './flow/dispatch.ts'
import { createInHand } from './flow/in-hand.ts'
import { createLanes } from './flow/lanes/lanes.ts'
import { startLoop } from './flow/loop.ts'
import type { EndpointRules } from './flow/observe.ts'
import { createPayloads } from './flow/payload.ts'
import { createPlacing } from './flow/place.ts'
import { createRecord, insistOn } from './flow/record.ts'
import { startReleaser } from './flow/release.ts'
import { startTakingBack } from './flow/take-back.ts'
import type { Log } from './log.ts'
import { cacheKeys, type SecretBox } from './secrets.ts'
import { LAST_WORDS_MS } from './shutdown.ts'

/** A third of the time after which a claim lapses (flow/claim.ts), so that one late touch does not lose the claim. */
const TOUCH_MS = 3000
const STALE_LOOK_MS = 100
const DEAD_LETTER_POLL_MS = 500

type Worker = {
  /**
   * Stops claiming at once, waits up to `graceMs` for what is in flight, then interrupts the rest and hands it back. Resolves
   * at most a second later; what the database did not take by then lapses, and is sent again. May be called again with less
   * grace.
   */
  stop(graceMs: number): Promise<void>
}

/**
 * Delivers: claims due jobs, attempts up to `slots` of them at once and up to `rules.cap` for one endpoint, releases held
 * deliveries, and marks dead letters. Resolves when it runs. `claims` is a pool of its own, so that recording cannot keep it
 * busy, and its commits need not be durable: a crash merely forgets a claim. `leaseSeconds`: see `startReleaser`.
 */
export async function startWorker(deps: {
  pool: Pool
  claims: Pool
  boss: PgBoss
  sender: Sender
  secretBox: SecretBox
  log: Log
  slots: number
  rules: EndpointRules
  leaseSeconds: number
  monthlyAttempts: number
  headerPrefix: string
  userAgent: string
}): Promise<Worker> {
  const { pool, claims, boss, log, slots, rules } = deps
  /** Ends all waiting of deliveries that have not been sent yet. */
  const closing = new AbortController()
  const inHand = createInHand({ pool, slots, closing: closing.signal, log })
  const lanes = createLanes({ cap: rules.cap, slots })
  const deliver = createDeliver({
    sender: deps.sender,
    withPayload: createPayloads({ pool, closing: closing.signal, log }),
    record: insistOn(createRecord({ pool, rules, slots, log }), log),
    keyOf: cacheKeys(deps.secretBox),
    headerPrefix: deps.headerPrefix,
    userAgent: deps.userAgent,
    log,
  })
  const attempts = createAttempts({
    lanes,
    inHand,
    deliver,
    onRoom: () => wake.releaser(),
    closing: closing.signal,
    log,
  })

  const placing = createPlacing({
    pool,
    claim: createClaim(claims, deps.monthlyAttempts),
    lanes,
    inHand,
    start: attempts.start,
    slots,
    log,
  })

  // Listening first, as it can fail: a worker that does not start must have claimed nothing. There is nobody to wake yet.
  const wake = { dispatcher: (_retries: boolean) => {}, releaser: () => {} }
  await pool.listen('waybill_due', (kind) => wake.dispatcher(kind !== ''))
  await pool.listen('waybill_held', () => wake.releaser())

  const dispatcher = startDispatcher({
    slots,
    log,
    worthClaiming: lanes.worthClaiming,
    tooMany: inHand.tooMany,
    fetch: placing.fetch,
  })
  const releaser = startReleaser({
    pool,
    lanes,
    hasBacklog: dispatcher.hasBacklog,
    slots,
    leaseSeconds: deps.leaseSeconds,
    log,
  })
  Object.assign(wake, { dispatcher: dispatcher.wake, releaser: releaser.wake })
  const takeDeadLetters = createDeadLetterTaker(pool, boss, log)
  const deadLetters = startLoop({
    name: 'dead-letters',
    idleMs: DEAD_LETTER_POLL_MS,
    log,
    run: async () => (await takeDeadLetters()) > 0,
  })
  const announcing = startAnnouncing(pool, log)
  const waiting = startLoop({
    name: 'waiting',
    idleMs: STALE_LOOK_MS,
    log,
    async run() {
      for (const claim of lanes.takeFree()) attempts.start(claim)
      const stale = lanes.takeStale()
      if (stale.length > 0) await inHand.hold(stale, { counted: true })
      return false
    },
  })
  const takingBack = startTakingBack({ pool: claims, wake: () => dispatcher.wake(true), log })
  const touching = setInterval(() => {
    touch(claims, inHand.all()).catch((error: unknown) => log.warn({ err: error }, 'touch.failed'))
  }, TOUCH_MS)
  async function finish(): Promise<void> {
    await Promise.all([dispatcher, releaser, deadLetters, announcing, waiting, takingBack].map((loop) => loop.stop()))
    closing.abort(SHUTTING_DOWN)
    await inHand.handBack(lanes.takeWaiting())
    while (attempts.all.size + placing.chores.size > 0) await Promise.all([...attempts.all, ...placing.chores])
  }

  return {
    async stop(graceMs) {
      const { promise: tooLate, resolve: giveUp } = Promise.withResolvers<void>()
      const timers = [
        setTimeout(() => {
          attempts.startNoMore()
          deps.sender.interrupt(SHUTTING_DOWN)
        }, graceMs),
        setTimeout(() => {
          log.warn({ deliveries: inHand.all().length }, 'worker.gave_up')
          giveUp()
        }, graceMs + LAST_WORDS_MS),
      ]
      await Promise.race([finish(), tooLate])
      for (const timer of timers) clearTimeout(timer)
      clearInterval(touching)
    },
  }
}
