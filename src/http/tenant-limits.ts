import { z } from '@hono/zod-openapi'
import { LARGEST_PAYLOAD_BYTES, MOST_FANOUT } from '../config.ts'

const limit = z
  .int('must be a whole number')
  .min(0, 'must be at least 0')
  .max(Number.MAX_SAFE_INTEGER, `must be at most ${Number.MAX_SAFE_INTEGER}`)
const allLimits = z.strictObject({
  monthly_events: limit.openapi({ format: 'int64' }),
  monthly_attempts: limit.openapi({ format: 'int64' }),
  max_endpoints: limit.max(100_000, 'must be at most 100000'),
  max_fanout_endpoints: limit.max(MOST_FANOUT, `must be at most ${MOST_FANOUT}`),
  max_payload_bytes: limit
    .min(2, 'must be at least 2')
    .max(LARGEST_PAYLOAD_BYTES, `must be at most ${LARGEST_PAYLOAD_BYTES}`),
  events_write_rate: limit
    .max(1_000_000_000, 'must be at most 1000000000')
    .openapi({ description: 'Publishes per rate window; 0: no limit.' }),
})
export const tenantLimits = allLimits.partial().openapi('TenantLimits', {
  example: { monthly_events: 2_000_000 },
  description: 'This tenant’s own limits, above or below the service’s; where one is absent, the service’s applies.',
})

export type Limits = z.infer<typeof allLimits>
