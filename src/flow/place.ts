import type { Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { type Claim, isPreferred, type Kind } from './claim.ts'
import type { createClaim } from './claim-due.ts'
import type { Fetch } from './dispatch.ts'
import { dropClaims } from './give-back.ts'
import type { InHand } from './in-hand.ts'
import type { Lanes } from './lanes/lanes.ts'
import { createSpread, PER_SECOND } from './spread.ts'

/** How many pieces of work that put claims away may be under way when more is claimed. */
const MAX_CHORES = 4
/**
 * A retry for which its tenant has no slot is given back, to come again later: so many of these a second for each slot of the worker.
 * Claiming one and giving it back takes a free slot for 6 ms, and a worker with few slots has but one free for that, for which
 * others' retries wait.
 */
const COME_AGAIN = 2.5

/**
 * Claims due deliveries, and finds each its place: it starts, waits here for a slot, or is put away again, unsent. `chores` are what
 * puts claims away; none of these rejects.
 */
export function createPlacing(deps: {
  pool: Pool
  claim: ReturnType<typeof createClaim>
  lanes: Lanes
  inHand: InHand
  start: (claim: Claim) => void
  slots: number
  log: Log
}) {
  const { lanes, inHand } = deps
  const chores = new Set<Promise<unknown>>()
  const secondsToWait = createSpread({ perSecond: Math.min(PER_SECOND, COME_AGAIN * deps.slots) })

  /** Runs `work`, which puts claims away, alongside the next fetches: deliveries that can be sent must not wait for it. */
  async function inBackground(work: () => Promise<unknown>): Promise<void> {
    const done: Promise<unknown> = work()
      // The claims lapse, and come again.
      .catch((error: unknown) => deps.log.error({ err: error }, 'worker.put_away_failed'))
      .finally(() => chores.delete(done))
    chores.add(done)
    if (chores.size > MAX_CHORES) await Promise.race(chores)
  }

  async function fetch(kind: Kind, { max, thorough, mayWait, occupy, crowding, isCrowding }: Fetch): Promise<boolean> {
    const { send, unsendable, obsolete, more } = await deps.claim({ kind, max, thorough, crowding })
    const full: Claim[] = []
    const surplus: Claim[] = []
    for (const claim of send) {
      inHand.take(claim, occupy)
      const isTooMuch = claim.withinQuota === null || isCrowding(claim.tenantId, isPreferred(claim))
      const place = isTooMuch ? 'crowding' : lanes.admit(claim, { mayWait })
      if (place === 'start') deps.start(claim)
      else if (place === 'full') full.push(claim)
      else if (place === 'crowding') surplus.push(claim)
      // Retries wait with a slot, so that those that wait are among the half of the slots that retries may have.
      else if (kind === 'retry') inHand.takeSlot(claim)
      else inHand.wait(claim, place)
    }
    for (const job of unsendable) inHand.take(job, occupy)
    const alike = Map.groupBy(surplus, ({ tenantId, withinQuota }) => `${tenantId} ${withinQuota}`)
    for (const claims of alike.values()) {
      const seconds = claims.map((one) => secondsToWait(one.tenantId))
      await inBackground(() => inHand.postpone(claims, Math.max(1, ...seconds)))
    }
    if (full.length > 0) await inBackground(() => inHand.hold(full, { counted: true }))
    if (unsendable.length > 0) await inBackground(() => inHand.hold(unsendable, { counted: false }))
    if (obsolete.length > 0) await inBackground(() => dropClaims(deps.pool, obsolete))
    return more
  }

  return { fetch, chores }
}
