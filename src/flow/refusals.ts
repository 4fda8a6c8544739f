import type { Claim } from './claim.ts'
import type { Lane } from './lane.ts'
import type { createSlotTurns } from './slot-turns.ts'
import type { createStuckSlots } from './stuck-slots.ts'

/** How long it is remembered that there was no room for one of a tenant's. */
const REMEMBERED_MS = 100
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
  return {
    /** For a claim of one more of the tenant's endpoints there is no room. `now`, here and below, is by the clock of the lanes. */
    refuse({ status }: Claim, { tenantId, standing }: Lane, now: number): 'full' {
      if (status === 'pending') {
        last = { tenantId, standing }
        until = now + REMEMBERED_MS
      }
      return 'full'
    },

    /** There is room for a claim. */
    accept({ status, tenantId }: Claim): void {
      if (status === 'pending' && tenantId !== last.tenantId) until = -Infinity
    },

    /** How many first attempts are worth claiming: any number where the tenant's hang, as others would wait behind them for long. */
    worthClaiming(now: number): number {
      if (now >= until) return Infinity
      stuck.count(now)
      if (!stuck.isTurningOver(last.tenantId)) return Infinity
      const slots = Math.max(0, stuck.mayTake(last))
      const room = slots + turns.roomIn(last.tenantId, stuck.takenBy(last.tenantId))
      return Math.max(FEW, Math.min(stuck.spareOf(last.tenantId, 'good'), room))
    },
  }
}
