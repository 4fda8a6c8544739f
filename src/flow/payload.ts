import type { Pool } from '../db/open.ts'
import type { Log } from '../log.ts'
import { until } from '../pacing.ts'
import { createRoom } from '../room.ts'
import { type Claim, hasMissed, Outdated } from './claim.ts'
import { secretsOf } from './claim-due.ts'
import { insist } from './insist.ts'

/** Room for payloads that are not part of their claims, each from loading until its request is over. */
const ROOM_BYTES = 64 * 1024 * 1024
/** Loads at once: a large payload may keep a connection for all of the pool's patience, and recording needs the others. */
const LOADS_AT_ONCE = 4
/** How long a payload may wait for room, for its turn to load, and for the database: it keeps a slot that others could use. */
const ROOM_PATIENCE_MS = 10_000
const LOAD_PATIENCE_MS = 5000

/** Nothing was sent: there was no room for the payload in time, or the database did not deliver it. */
export class PayloadLate extends Error {}

type Row = {
  payload: string
  url: string
  is_active: boolean
  ordered: boolean
  paced: boolean
  signing_secret: string
  previous_secret: string | null
}

/** Runs `work`, which makes the claim's request, with the claim brought up to date and its payload. */
export type WithPayload = <Result>(
  claim: Claim,
  work: (claim: Claim, payload: string) => Promise<Result>,
) => Promise<Result>

/**
 * Payloads that are too large to be part of a claim are loaded separately when there is room for them: first come, first served,
 * and a tenant gets at most half of what the others leave. The endpoint may have changed by then, so it is read with the payload.
 * Throws `PayloadLate` if the payload cannot be had, `Outdated` if the endpoint does not take it in this way or at this time any more, and
 * the reason of `closing` if that aborts first.
 */
export function createPayloads({ pool, closing, log }: { pool: Pool; closing: AbortSignal; log: Log }): WithPayload {
  const refusal = () => new PayloadLate('no room in time')
  const room = createRoom(ROOM_BYTES, { maxWaitMs: ROOM_PATIENCE_MS, refusal })
  // Counted, not weighed.
  const loads = createRoom(LOADS_AT_ONCE, { maxWaitMs: LOAD_PATIENCE_MS, refusal })

  /**
   * A paced endpoint's next time slot, or null if it has none within 1.5 s. Further ahead than the half second of waybill.release_held,
   * which gives those slots to deliveries that would wait for room as well, and miss them; but not so far that a change of the endpoint
   * would apply too late.
   */
  async function takeSlot({ tenantId, endpointId }: Claim): Promise<number | null> {
    const [slot] = await unless(
      closing,
      pool<{ wait_ms: number }[]>`
        update waybill.endpoint_stats s set next_slot = greatest(s.next_slot, now()) + interval '1 second' / p.max_per_second
        from waybill.endpoints p
        where p.tenant_id = ${tenantId} and p.endpoint_id = ${endpointId}
          and s.tenant_id = ${tenantId} and s.endpoint_id = ${endpointId}
          and coalesce(s.next_slot, now()) < now() + interval '1.5 seconds'
        returning date_part('epoch', s.next_slot - interval '1 second' / p.max_per_second - now()) * 1000 as wait_ms`,
    )
    return slot ? performance.now() + slot.wait_ms : null
  }

  /** `startAt`: the time slot of a paced endpoint; null in all if the delivery has to be held. */
  async function load(claim: Claim): Promise<(Row & Pick<Claim, 'startAt'>) | null> {
    const [row] = await unless(
      closing,
      pool<Row[]>`
        select e.payload, p.url, p.is_active, p.ordered, p.max_per_second is not null as paced,
          encode(p.signing_secret, 'hex') as signing_secret,
          case when p.previous_secret_expires_at > now() then encode(p.previous_secret, 'hex') end as previous_secret
        from waybill.events e cross join waybill.endpoints p
        where e.tenant_id = ${claim.tenantId} and e.event_id = ${claim.eventId}
          and p.tenant_id = ${claim.tenantId} and p.endpoint_id = ${claim.endpointId}`,
    )
    // There always is one: retention keeps the event of an unfinished delivery, and endpoints are never deleted.
    if (row === undefined) throw new Error('the event is gone')
    if (!row.is_active || (row.ordered && claim.atOnce !== 1)) return null
    if (!row.paced) return { ...row, startAt: null }
    const mayKeep = claim.startAt !== null && !hasMissed(claim)
    const startAt = mayKeep ? claim.startAt : await takeSlot(claim)
    return startAt === null ? null : { ...row, startAt }
  }

  const loadInTurn = (claim: Claim) =>
    insist(
      () => loads.run(claim.tenantId, 1, () => load(claim), closing),
      (error) => log.warn({ err: error, tenant_id: claim.tenantId, delivery_id: claim.deliveryId }, 'payload.waiting'),
      { forMs: LOAD_PATIENCE_MS, signal: closing },
    ).catch((error: unknown) => {
      closing.throwIfAborted()
      throw error instanceof PayloadLate ? error : new PayloadLate('not loaded in time', { cause: error })
    })

  return async (claim, work) => {
    const { payload } = claim
    if (payload !== null) return await work(claim, payload)
    return await room.run(
      claim.tenantId,
      claim.payloadBytes,
      async () => {
        const row = await loadInTurn(claim)
        if (row === null) throw new Outdated()
        if (row.startAt !== null) await until(row.startAt, closing)
        if (hasMissed(row)) throw new Outdated()
        return await work({ ...claim, url: row.url, secrets: secretsOf(row) }, row.payload)
      },
      closing,
    )
  }
}

/** Settles as `promise`, or rejects with the signal's reason as soon as that aborts. */
function unless<T>(signal: AbortSignal, promise: PromiseLike<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    const stop = () => reject(signal.reason)
    signal.addEventListener('abort', stop)
    promise.then(resolve, reject).then(() => signal.removeEventListener('abort', stop))
  })
}
