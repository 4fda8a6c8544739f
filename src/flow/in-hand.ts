import type { Pool } from '../db.ts'
import { LocalFault } from '../egress/failure.ts'
import { Line } from '../line.ts'
import type { Log } from '../log.ts'
import { MissingKey } from '../secrets.ts'
import { type Claim, type ClaimedJob, unclaim } from './claim.ts'
import { insist } from './insist.ts'
import { until } from './pacing.ts'
import { PayloadLate } from './payload.ts'

const NOT_HERE_MS = 1000
/** What is the lot of every delivery, as without any name server, is told once in this time, with how many more there were. */
const TELL_MS = 1000
/** How many requests, for each slot, may wait for their record without one. A busy worker records a hundred while the next hundred comes. */
const UNRECORDED = 1.5

/**
 * What a worker has claimed and not let go of yet, started or waiting for its endpoint or its moment, and the ways in which
 * it is put away unsent. Whatever those cannot do, because the database is away for long, lapses and comes again.
 * `slots` is how many may be under way; as many more may wait for their endpoint. `closing` ends what waits.
 */
export function createInHand(deps: { pool: Pool; slots: number; closing: AbortSignal; log: Log }) {
  const { pool, closing, log } = deps
  /** By claim: when one lapses, this very worker may claim the delivery again. */
  const kept = new Line<ClaimedJob>()
  /** How many of them have no slot: since they wait or are put away, and since their record is still to be stored. */
  let waiting = 0
  let answered = 0
  const mostAnswered = Math.floor(UNRECORDED * deps.slots)

  const told = { at: Number.NEGATIVE_INFINITY, since: 0 }

  function tellPutOff(ids: object, reason: unknown): void {
    if (performance.now() < told.at + TELL_MS) {
      told.since++
      return
    }
    log.warn({ ...ids, err: reason, others_since_last: told.since }, 'delivery.put_off')
    Object.assign(told, { at: performance.now(), since: 0 })
  }

  function takeSlot({ hand }: ClaimedJob): void {
    if (hand?.freeSlot !== null) return
    hand.freeSlot = hand.takeSlot()
    waiting--
  }

  function letGo(claims: ClaimedJob[]): void {
    for (const claim of claims) {
      if (claim.hand === null) continue
      kept.leave(claim.hand.place)
      if (claim.hand.freeSlot === null) waiting--
      else claim.hand.freeSlot()
      if (claim.hand.isAnswered) answered--
      claim.hand = null
    }
  }

  /** They stay in hand until they are held: claims that lapse count as attempts whose worker was lost. */
  async function hold(claims: ClaimedJob[], { counted }: { counted: boolean }): Promise<void> {
    await insist(
      () => holdDeliveries(pool, claims, { counted }),
      (error) => log.warn({ err: error, deliveries: claims.length }, 'hold.waiting'),
    ).finally(() => letGo(claims))
  }

  return {
    /** Without a slot, which it gets from `takeSlot`. */
    take(claim: ClaimedJob, takeSlot: () => () => void): void {
      claim.hand = { place: kept.join(claim), takeSlot, freeSlot: null, isAnswered: false }
      waiting++
    },

    /** It is under way. */
    takeSlot,

    /** It waits for its endpoint, so that the next one is at hand as soon as that has room. */
    wait(claim: ClaimedJob): void {
      if (waiting > deps.slots) takeSlot(claim)
    },

    /**
     * The request of one is over, and another may go out while this one is recorded. With too many of those it is false: it keeps
     * its slot, so that no more are sent than can be recorded.
     */
    answered(claim: ClaimedJob): boolean {
      if (claim.hand === null || claim.hand.isAnswered || answered >= mostAnswered) return false
      claim.hand.isAnswered = true
      answered++
      claim.hand.freeSlot?.()
      return true
    },

    /** They are not in hand any more, and their slots are free. */
    letGo,

    all: (): ClaimedJob[] => [...kept],

    /**
     * As if they had never been claimed: an interrupted attempt is not a failed one, and costs no retry. When the database
     * does not answer, the claims lapse instead.
     */
    async handBack(claims: Claim[]): Promise<void> {
      if (claims.length === 0) return
      try {
        await unclaim(pool, claims)
      } catch (error) {
        log.error({ err: error, deliveries: claims.length }, 'worker.hand_back_failed')
      }
      letGo(claims)
    },

    /**
     * Takes deliveries out of the queue until their endpoint takes something (flow/release.ts). `counted`: they have places in
     * the month, which they give back.
     */
    hold,

    /**
     * Puts a delivery off that could not be sent for no fault of its own, at no cost: it comes again when its endpoint has
     * room, behind what waited for the same. False when `reason` is none of those.
     */
    async putOff(claim: Claim, reason: unknown): Promise<boolean> {
      // Others may have the key that this process was started without, or files for a connection. It keeps its slot for a
      // moment, or it would go in and out of the queue all the time.
      const isNotHere = reason instanceof MissingKey || reason instanceof LocalFault
      if (!isNotHere && !(reason instanceof PayloadLate)) return false
      if (isNotHere) await until(performance.now() + NOT_HERE_MS, closing).catch(() => {})
      const ids = { tenant_id: claim.tenantId, delivery_id: claim.deliveryId }
      tellPutOff(ids, reason)
      await hold([claim], { counted: true }).catch((error: unknown) =>
        log.error({ ...ids, err: error }, 'worker.put_away_failed'),
      )
      return true
    },
  }
}

/**
 * Their rows wait, `held`, until `release_held` queues them again with the retries that they have left. Held wrongly, because
 * the endpoint recovered meanwhile, they are released at the next look.
 */
async function holdDeliveries(pool: Pool, jobs: ClaimedJob[], { counted }: { counted: boolean }): Promise<void> {
  const column = <T>(read: (job: ClaimedJob) => T) => jobs.map(read)
  await pool`
    select waybill.hold_claims(${column((job) => job.tenantId)}::text[], ${column((job) => job.deliveryId)}::uuid[],
      ${column((job) => job.endpointId)}::uuid[], ${column(({ job }) => job.retryCount)}::int[], ${counted})`
}
