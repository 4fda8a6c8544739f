import { Line } from '../../line.ts'
import type { Standing } from '../claim.ts'
import { type Lane, paceOf } from './lane.ts'

/** For which endpoints there is a slot. */
type Room = 'none' | 'quick' | 'any'

/**
 * A tenant's endpoints take turns only in a worker with at least so many slots. A smaller one leaves other tenants so few that it claims
 * nearly one delivery at a time, and theirs would come late, behind all that the waiting tenant then keeps in the queue.
 */
const LEAST_SLOTS = 128

/**
 * While a tenant has all the slots that it may have, a slot that one of its endpoints leaves goes to one of its endpoints that has none,
 * not to the same endpoint's next claim. Endpoints without a slot wait for that here: each tenant's in a line of their own, first come,
 * first served.
 */
export function createSlotTurns(slots: number) {
  const lines = new Map<string, Line<Lane>>()

  /**
   * The first of a tenant's that has something waiting and may have a slot. Hundreds may be here, so `roomFor` is asked about one of
   * each standing.
   */
  function first(tenantId: string, now: number, roomFor: (lane: Lane, now: number) => Room): Lane | undefined {
    const room: { [standing in Standing]?: Room } = {}
    for (const lane of lines.get(tenantId) ?? []) {
      if (lane.waiting.length === 0) continue
      room[lane.standing] ??= roomFor(lane, now)
      const own = room[lane.standing]
      if (own === 'any' || (own === 'quick' && paceOf(lane, now) > 0)) return lane
    }
    return undefined
  }

  const roomIn = (tenantId: string, most: number) =>
    slots >= LEAST_SLOTS ? Math.max(0, most - (lines.get(tenantId)?.size ?? 0)) : 0

  return {
    /** Whether there are enough slots for that. */
    areTaken: slots >= LEAST_SLOTS,

    /** Whether it may wait here if at most `most` of the tenant's do. */
    mayJoin: (lane: Lane, most: number): boolean => lane.turn !== null || roomIn(lane.tenantId, most) > 0,

    /** How many more of the tenant's may wait here if at most `most` do. */
    roomIn,

    /** Whether any of a tenant's waits. */
    has: (tenantId: string): boolean => lines.has(tenantId),

    first,

    /** The same of any tenant, which comes last from then on: one would have all that others leave. */
    nextOfAny(now: number, roomFor: (lane: Lane, now: number) => Room): Lane | undefined {
      for (const [tenantId, line] of lines) {
        const lane = first(tenantId, now, roomFor)
        if (lane === undefined) continue
        lines.delete(tenantId)
        lines.set(tenantId, line)
        return lane
      }
      return undefined
    },

    /** Joining twice does nothing. */
    join(lane: Lane): void {
      const line = lines.get(lane.tenantId) ?? new Line()
      lines.set(lane.tenantId, line)
      lane.turn ??= line.join(lane)
    },

    leave(lane: Lane): void {
      if (lane.turn === null) return
      const line = lines.get(lane.tenantId)
      line?.leave(lane.turn)
      lane.turn = null
      if (line?.size === 0) lines.delete(lane.tenantId)
    },
  }
}
