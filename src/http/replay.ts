import { createRoute } from '@hono/zod-openapi'
import type { Pool } from '../db/open.ts'
import { AppError } from '../errors.ts'
import { createReplay } from '../flow/replay.ts'
import type { Tenant } from './auth.ts'
import {
  type DeliveryRow,
  deliveryColumns,
  deliveryPath,
  findDelivery,
  oneDelivery,
  renderDelivery,
} from './delivery-record.ts'
import { errorAnswers, TENANT_ERRORS } from './error-answers.ts'
import type { Mount } from './route.ts'
import { answers } from './schemas.ts'
import { readUsage } from './usage.ts'

/** What the example of a delivery that has just been replayed has of its own. */
const REPLAYED = { status: 'pending', next_attempt_at: '2026-11-20T09:30:00.000Z', completed_at: null }

const replay = createRoute({
  method: 'post',
  path: '/v1/deliveries/{delivery_id}/replay',
  operationId: 'replayDelivery',
  tags: ['Deliveries'],
  summary: 'Replay a delivery',
  description:
    'Any delivery may be replayed. A finished one becomes pending again with a full set of retries; its id stays the same, and its attempt numbers go on. One that waits for a retry becomes due now; one that is being attempted is replayed as soon as that attempt has failed, and not at all if it succeeds. If the endpoint is failing, the delivery becomes the next probe, unless one is under way; if it is inactive, the delivery waits until it is active. At an `ordered` endpoint, what waits for a retry becomes due, too, as the others wait for it. Nothing is queued twice.',
  request: { params: deliveryPath },
  responses: {
    202: answers('The delivery', oneDelivery, REPLAYED),
    ...errorAnswers(...TENANT_ERRORS, 'delivery_not_found', 'monthly_attempts'),
  },
})

/** Replaying deliveries. */
export function mountReplay(mount: Mount, { pool }: { pool: Pool }): void {
  const replayNow = createReplay<DeliveryRow>(pool, deliveryColumns)

  /** Without an attempt left this month, a replayed delivery would only be dead-lettered again. */
  async function requireAttempts(tenant: Tenant): Promise<void> {
    const limit = tenant.limits.monthly_attempts
    const { attempts: current, end } = await readUsage(pool, tenant.tenantId)
    if (current >= limit) throw new AppError('monthly_attempts', { limit, current, resets_at: end })
  }

  mount.tenant(replay, { action: 'deliveries:replay' }, async (c, tenant, { params }) => {
    const { delivery_id } = await findDelivery(pool, tenant.tenantId, params.delivery_id)
    await requireAttempts(tenant)
    const row = await replayNow(tenant.tenantId, delivery_id)
    // Retention was faster.
    if (row === undefined) throw new AppError('delivery_not_found')
    return c.json({ ok: true, ...renderDelivery(row) }, 202)
  })
}
