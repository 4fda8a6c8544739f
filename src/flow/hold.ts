import type { Pool } from '../db.ts'
import type { ClaimedJob } from './claim.ts'

/**
 * Takes claimed deliveries out of the queue: their rows wait, `held`, until `release_held` queues them again with the
 * retries that they have left. Held wrongly, because the endpoint recovered meanwhile, they are released at the next look.
 * `counted`: they have places in the month, which they give back.
 */
export async function holdDeliveries(pool: Pool, jobs: ClaimedJob[], { counted }: { counted: boolean }): Promise<void> {
  const column = <T>(read: (job: ClaimedJob) => T) => jobs.map(read)
  await pool`
    select waybill.hold_claims(${column((job) => job.tenantId)}::text[], ${column((job) => job.deliveryId)}::uuid[],
      ${column((job) => job.endpointId)}::uuid[], ${column(({ job }) => job.retryCount)}::int[], ${counted})`
}
