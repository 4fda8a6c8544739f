import type { Pool } from '../db/open.ts'
import { LocalFault } from '../egress/failure.ts'
import { Line } from '../line.ts'
import type { Log } from '../log.ts'
import { until } from '../pacing.ts'
import { MissingKey } from '../secrets.ts'
import { createBatcher } from './batch.ts'
import { type Claim, type ClaimedJob, type Hand, Outdated } from './claim.ts'
import { fromClaims, unclaim } from './give-back.ts'
import { insist } from './insist.ts'
import { PayloadLate } from './payload.ts'

export type InHand = ReturnType<typeof createInHand>

const NOT_HERE_MS = 1000
/** Put-off deliveries are logged once in this time, with the number of the others: a silent name server affects them all. */
const TELL_MS = 1000
/**
 * How many answered attempts per slot may wait to be recorded without one. A busy worker has some 200 waiting on average, but they come
 * and go by whole batches: with half of this it delivered a tenth less.
 */
const UNRECORDED = 3
const MAX_PUT_AWAY = 1000

/**
 * What a worker has claimed and not let go of yet, whether under way or waiting for its endpoint or its time slot, and the ways
 * to put it away unsent. If the database is away too long for that, the claims lapse, and the deliveries are claimed again.
 * `slots` is how many may be under way; as many more first attempts may wait for their endpoint, and twice as many for a slot of their
 * tenant. Retries wait with a slot. `closing` ends all waiting.
 */
export function createInHand(deps: { pool: Pool; slots: number; closing: AbortSignal; log: Log }) {
  const { pool, closing, log } = deps
  /** Claims, not deliveries: when one lapses, this same worker may claim the delivery again. */
  const kept = new Line<ClaimedJob>()
  /** How many claims have no slot and wait for one of their endpoint or tenant, or only remain to be recorded. */
  const waiting = { endpoint: 0, tenant: 0 }
  let answered = 0
  const mostAnswered = UNRECORDED * deps.slots

  const told = { at: -Infinity, since: 0 }

  function tellPutOff(ids: object, reason: unknown): void {
    if (performance.now() < told.at + TELL_MS) {
      told.since++
      return
    }
    log.warn({ ...ids, err: reason, others_since_last: told.since }, 'delivery.put_off')
    Object.assign(told, { at: performance.now(), since: 0 })
  }

  function waitNoMore(hand: Hand): void {
    if (hand.waitsFor !== null) waiting[hand.waitsFor]--
    hand.waitsFor = null
  }

  function takeSlot({ tenantId, hand }: ClaimedJob): void {
    if (hand?.freeSlot !== null) return
    hand.freeSlot = hand.occupy(tenantId)
    waitNoMore(hand)
  }

  function letGo(claims: ClaimedJob[]): void {
    for (const claim of claims) {
      if (claim.hand === null) continue
      kept.leave(claim.hand.place)
      claim.hand.freeSlot?.()
      if (claim.hand.isAnswered) answered--
      waitNoMore(claim.hand)
      claim.hand = null
    }
  }

  const inBatches = (putAway: (claims: Claim[]) => Promise<void>) =>
    createBatcher<Claim, null>({
      max: MAX_PUT_AWAY,
      async run(claims) {
        await putAway(claims)
        return claims.map(() => null)
      },
    })

  /** When the grace is over, all interrupted attempts are given back at once, and there is a second for it. */
  const giveBack = inBatches((claims) => unclaim(pool, claims))

  /** The claims stay in hand until their deliveries are held: one that lapses counts as an attempt whose worker was lost. */
  async function hold(claims: ClaimedJob[], { counted }: { counted: boolean }): Promise<void> {
    await insist(
      () => pool`
        select waybill.hold_claims(array_agg(tenant_id), array_agg(c.id), array_agg(endpoint_id), array_agg(bundle), array_agg(n), ${counted})
        ${fromClaims(claims)}`,
      (error) => log.warn({ err: error, deliveries: claims.length }, 'hold.waiting'),
    ).finally(() => letGo(claims))
  }

  /** After the process was stopped, all that wait for their time slots have missed them at once. */
  const holdOne = inBatches((claims) => hold(claims, { counted: true }))

  return {
    /** Takes a claim in hand, without a slot: `takeSlot` gives it one. */
    take(claim: ClaimedJob, occupy: (tenantId: string) => () => void): void {
      claim.hand = { place: kept.join(claim), occupy, freeSlot: null, isAnswered: false, waitsFor: null }
    },

    /** A claim gets under way. */
    takeSlot,

    /** A claim waits for a slot that its endpoint, or another of its tenant, leaves. */
    wait({ hand }: ClaimedJob, waitsFor: 'endpoint' | 'tenant'): void {
      if (hand === null) return
      hand.waitsFor = waitsFor
      waiting[waitsFor]++
    },

    /**
     * By how many those that wait are too many: so many slots are to be left free, which slows claiming down. Those that wait for a
     * slot of their tenant are counted apart, and twice as many of them may: if they slowed claiming down as soon as the others do,
     * other tenants' deliveries would not be claimed.
     */
    tooMany: (): number => Math.max(0, waiting.endpoint - deps.slots) + Math.max(0, waiting.tenant - 2 * deps.slots),

    /**
     * The request of a claim is over: its slot is free while the attempt is recorded. False if too many wait to be recorded;
     * then it keeps its slot, so that no more are sent than can be recorded.
     */
    answered(claim: ClaimedJob): boolean {
      if (claim.hand === null || claim.hand.isAnswered || answered >= mostAnswered) return false
      claim.hand.isAnswered = true
      answered++
      claim.hand.freeSlot?.()
      return true
    },

    /** Lets go of claims, and frees their slots. */
    letGo,

    all: (): ClaimedJob[] => [...kept],

    /**
     * Gives claims back as if they had never been made: an interrupted attempt has not failed, and uses no retry. If the
     * database does not answer, the claims lapse instead.
     */
    async handBack(claims: Claim[]): Promise<void> {
      await Promise.all(claims.map(giveBack)).catch((error: unknown) =>
        log.error({ err: error, deliveries: claims.length }, 'worker.hand_back_failed'),
      )
      letGo(claims)
    },

    /** Gives claims back, to come again in so many seconds. They stay in hand until that is done, as in `hold`. */
    async postpone(claims: Claim[], seconds: number): Promise<void> {
      await insist(
        () => unclaim(pool, claims, seconds),
        (error) => log.warn({ err: error, deliveries: claims.length }, 'postpone.waiting'),
      ).finally(() => letGo(claims))
    },

    /**
     * Takes deliveries out of the queue until their endpoint can take them, which may be at once (flow/release.ts). `counted`: their
     * attempts have been counted against the month's limit, and are taken off again.
     */
    hold,

    /**
     * Puts off a delivery that this process could not send, or that is `Outdated`, for `reason`: it is held, uses no retry, and comes
     * again behind what is already queued for its endpoint. False, and nothing is done, if `reason` is of another kind.
     */
    async putOff(claim: Claim, reason: unknown): Promise<boolean> {
      // Another process may have the key, or a free file descriptor. The slot is kept for a moment, or the delivery would be
      // claimed and put off all the time.
      const isNotHere = reason instanceof MissingKey || reason instanceof LocalFault
      const isUsual = reason instanceof Outdated
      if (!isNotHere && !isUsual && !(reason instanceof PayloadLate)) return false
      if (isNotHere) await until(performance.now() + NOT_HERE_MS, closing).catch(() => {})
      const ids = { tenant_id: claim.tenantId, delivery_id: claim.deliveryId }
      if (!isUsual) tellPutOff(ids, reason)
      await holdOne(claim).catch((error: unknown) => log.error({ ...ids, err: error }, 'worker.put_away_failed'))
      return true
    },
  }
}
