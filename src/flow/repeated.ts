import type { Pool } from '../db/open.ts'
import { heavyTurn } from '../pacing.ts'
import { createRequestRoom } from '../room.ts'
import { isSameJson } from './same-json.ts'

/** Room for payloads that are being compared with their originals, originals included. */
const COMPARED_BYTES = 1024 * 1024
/** How many times as long as a comparison took its room stays taken: a small request may have an original that takes long to read. */
const REST = 9

/** The event that has a request's idempotency key already, as waybill.publish tells of it. */
export type Original = {
  event_id: string
  /** Whether the request has the same type and, byte for byte, the same payload. */
  same_text?: boolean | null
  original_type?: string | null
  original_bytes?: number | null
}

/**
 * The returned function tells whether an event is the same as the original of its idempotency key: the payloads are compared as
 * JSON. Null when the original is gone.
 */
export function createComparison(pool: Pool) {
  const room = createRequestRoom(COMPARED_BYTES)
  return async (tenantId: string, event: { type: string; payload: string }, original: Original) => {
    if (original.same_text) return true
    if (event.type !== original.original_type) return false
    // The largest count as half of the room, so that two tenants can compare one each.
    const bytes = Math.min(event.payload.length + (original.original_bytes ?? 0), COMPARED_BYTES / 2)
    const leave = await room.enter(tenantId, bytes)
    let restMs = 0
    try {
      const [stored] = await pool<{ payload: string }[]>`
        select payload from waybill.events where tenant_id = ${tenantId} and event_id = ${original.event_id}`
      if (!stored) return null
      await heavyTurn()
      const began = performance.now()
      const isSame = isSameJson(event.payload, stored.payload)
      restMs = REST * (performance.now() - began)
      return isSame
    } finally {
      setTimeout(leave, restMs)
    }
  }
}
