import type { Log } from '../log.ts'
import type { createRecord } from './record.ts'

/** How long recording is tried again: beyond this the claim has lapsed and another worker has the job. */
const RECORD_MS = 45_000
const RECORD_PAUSE_MS = 500

/** What a receiver has answered is worth keeping: while the database is away, recording waits for it. */
export function untilRecorded(record: ReturnType<typeof createRecord>, log: Log): ReturnType<typeof createRecord> {
  return async (attempt) => {
    const until = performance.now() + RECORD_MS
    for (let tries = 1; ; tries++) {
      try {
        return await record(attempt)
      } catch (error) {
        if (performance.now() > until) throw error
        if (tries === 1) log.warn({ err: error, delivery_id: attempt.claim.deliveryId }, 'record.waiting')
        await new Promise((resolve) => setTimeout(resolve, RECORD_PAUSE_MS))
      }
    }
  }
}
