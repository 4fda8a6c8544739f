import { z } from '@hono/zod-openapi'
import type { Db } from '../db/open.ts'
import { fragment } from '../db/statement.ts'
import { AppError } from '../errors.ts'
import { madeAt } from '../ids.ts'
import { recordId } from './record-id.ts'
import { attemptError, deliveryStatus, eventType, id, ok, ownTenant, timestamp } from './schemas.ts'

const deadLetterReason = z
  .enum(['retries_exhausted', 'endpoint_gone', 'worker_lost', 'monthly_attempt_limit'])
  .openapi('DeadLetterReason', {
    description:
      'Why the delivery was given up on. `retries_exhausted`: its last retry failed, too. `endpoint_gone`: the endpoint answered 410. `worker_lost`: its worker was lost five times in a row, or with no retry left. `monthly_attempt_limit`: the tenant had no attempt left this month.',
  })

export const deliveryRecord = z
  .object({
    delivery_id: id('delivery'),
    tenant_id: ownTenant,
    event_id: id('event'),
    endpoint_id: id('endpoint'),
    event_type: eventType,
    status: deliveryStatus,
    attempt_count: z.int().openapi({ description: 'Attempts made, over all replays.', example: 1 }),
    next_attempt_at: timestamp.nullable().openapi({
      description:
        'When it is due; while an attempt is under way, when that was due. Null when the delivery is finished, or held until its endpoint can take it. If the endpoint is `inactive` or `failing` when this comes, the delivery is held then.',
      example: null,
    }),
    last_attempt_at: timestamp.nullable(),
    last_status_code: z
      .int()
      .nullable()
      .openapi({ description: 'Null when the last attempt got no response.', example: 200 }),
    last_error: attemptError.openapi({ example: null }),
    dead_letter_reason: z
      // Not `nullable`, which would put null among the values of the enum, where it breaks clients.
      .union([deadLetterReason, z.null()])
      .openapi({ description: 'Null unless the delivery was given up on.', example: null }),
    created_at: timestamp,
    updated_at: timestamp,
    completed_at: timestamp.nullable().openapi({ description: 'When it was delivered or given up on; else null.' }),
  })
  .openapi('Delivery')

export const deliveryPath = z.object({ delivery_id: id('delivery') })
/** The answer that is one delivery. */
export const oneDelivery = z.object({ ok, ...deliveryRecord.shape })

type Shown = z.infer<typeof deliveryRecord>
type Moment = 'next_attempt_at' | 'last_attempt_at' | 'completed_at'
export type DeliveryRow = Omit<Shown, Moment | 'created_at' | 'updated_at'> & { [name in Moment]: Date | null } & {
  updated_at: Date
}

/** The columns of a DeliveryRow. */
export const deliveryColumns = fragment`
  delivery_id, tenant_id, event_id, endpoint_id, event_type, status, attempt_count, next_attempt_at, last_attempt_at,
  last_status_code, last_error, dead_letter_reason, updated_at, completed_at`

/** A delivery as the API shows it; its id carries when it was created, which for the last of a batch is a moment after its row was. */
export function renderDelivery({ updated_at, completed_at, ...row }: DeliveryRow) {
  const created_at = madeAt(row.delivery_id)
  return { ...row, created_at, updated_at: updated_at < created_at ? created_at : updated_at, completed_at }
}

/** The delivery of the tenant with that id, as it came in a path. Throws `delivery not found`. */
export async function findDelivery(sql: Db, tenantId: string, deliveryId: string): Promise<DeliveryRow> {
  const [row] = await sql<DeliveryRow[]>`
    select ${deliveryColumns} from waybill.deliveries
    where tenant_id = ${tenantId} and delivery_id = ${recordId(deliveryId, 'delivery_not_found')}`
  if (row === undefined) throw new AppError('delivery_not_found')
  return row
}
