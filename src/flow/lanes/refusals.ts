import type { Claim } from '../claim.ts'
import type { Lane } from './lane.ts'
import { inPatience, newPace, noteFinished } from './pace.ts'
import type { createSlotTurns } from './slot-turns.ts'
import type { createStuckSlots } from './stuck-slots.ts'

/** How long it is remembered that there was no room for one of a tenant's. */
const REMEMBERED_MS = 100
/** For how long a tenant's slots are expected to be left soon, before its pace can tell. */
const TRUSTED_MS = 50
/** So many are worth claiming in any case, for what is behind those for which there is no room. */
const FEW = 8

/**
 * What is claimed and finds no room is held, released and claimed again, which takes the database three times as long. With a backlog
 * for thousands of one tenant's endpoints, others leave slots free all the time that this tenant may not have. So no more are claimed
 * then than it may have: what comes next in the queue is most likely the same tenant's, as long as no other's was among the last.
 */
export function createRefusals(stuck: ReturnType<typeof createStuckSlots>, turns: ReturnType<typeof createSlotTurns>) {
  let last: Pick<Lane, 'tenantId' | 'standing'> = { tenantId: '', standing: 'good' }
  let until = -Infinity
  /** Since when it has been that tenant, and how fast its attempts have been finished since. */
  let since = until
  let pace = newPace(until)
  return {
    /** For a claim of one more of the tenant's endpoints there is no room. `now`, here and below, is by the clock of the lanes. */
    refuse({ status }: Claim, { tenantId, standing }: Lane, now: number): 'full' {
      if (status === 'pending') {
        if (tenantId !== last.tenantId) {
          since = now
          pace = newPace(now)
        }
        last = { tenantId, standing }
        until = now + REMEMBERED_MS
      }
      return 'full'
    },

    /** There is room for a claim. */
    accept({ status, tenantId }: Claim): void {
      if (status === 'pending' && tenantId !== last.tenantId) until = -Infinity
    },

    /** One of the tenant's attempts is finished, soon enough to tell of its pace. */
    noteFinished({ tenantId }: Claim, now: number): void {
      if (tenantId === last.tenantId) noteFinished(pace, now)
    },

    /**
     * How many first attempts are worth claiming: any number unless the tenant leaves half of its slots within a moment, and most of
     * those that nobody knows to be quick are new. Otherwise they may hang, and others would wait behind them for long.
     */
    worthClaiming(now: number): number {
      if (now >= until) return Infinity
      stuck.count(now)
      const taken = stuck.takenBy(last.tenantId)
      const isQuick = now < since + TRUSTED_MS || 2 * inPatience(pace, now) >= taken
      if (!isQuick || !stuck.isTurningOver(last.tenantId)) return Infinity
      const room = Math.max(0, stuck.mayTake(last)) + turns.roomIn(last.tenantId, taken)
      return Math.max(FEW, Math.min(stuck.spareOf(last.tenantId, 'good'), room))
    },
  }
}
