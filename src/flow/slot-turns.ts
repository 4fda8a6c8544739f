import { Line } from '../line.ts'
import type { Lane } from './lane.ts'

/**
 * Where a tenant has all slots that it may have, each that one of its endpoints leaves goes to one that has none. Here these wait for
 * it, each tenant's in the order in which they came.
 */
export function createSlotTurns() {
  const lines = new Map<string, Line<Lane>>()

  return {
    /** Those of a tenant that wait. */
    of: (tenantId: string): Line<Lane> | undefined => lines.get(tenantId),

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
