import type { Pool } from '../db/open.ts'
import type { Claim, ClaimedJob, Kind, Standing } from './claim.ts'
import { followClock } from './database-clock.ts'

/** `unsendable`: the endpoint takes nothing now. `obsolete`: the delivery is finished, gone, or has another job. `more`: others may be due. */
type Claimed = { send: Claim[]; unsendable: ClaimedJob[]; obsolete: ClaimedJob[]; more: boolean }

/**
 * A claim's answer must arrive within the pool's patience however large the payloads are, or every worker would ask for the
 * same jobs for ever. Postgres knows the length of a payload without reading it.
 */
const MAX_CLAIMED_PAYLOAD_BYTES = 64 * 1024

type Row = {
  tenant_id: string
  delivery_id: string
  retry_count: number
  bundle: string | null
  earlier_attempts: number
  status: Claim['status'] | 'delivered' | 'dead_lettered' | null
  attempt_count: number
  event_id: string
  event_type: string
  payload: string | null
  payload_bytes: number
  endpoint_id: string
  sendable: boolean | null
  within_quota: boolean | null
  slot: number | null
  more: boolean
} & (Lead | { [Field in keyof Lead]: null })

/** What the row of each endpoint's first delivery tells for all of its deliveries. */
type Lead = {
  url: string
  at_once: number | null
  /** Null as long as nothing has been recorded for the endpoint. */
  probed: boolean | null
  standing: Standing
  signing_secret: string
  previous_secret: string | null
  now_ms: number
}

/**
 * The returned function claims at most `max` due deliveries, first attempts or retries, and reads what they need. `thorough`: also
 * those that have returned to a part of the queue that claiming has already passed (waybill.claim_due). `crowding`: the tenants of
 * which only what is preferred may start. `monthlyAttempts`: the limit of tenants that have none of their own.
 */
export function createClaim(pool: Pool, monthlyAttempts: number) {
  const follow = followClock()
  return async (asking: { kind: Kind; thorough: boolean; max: number; crowding?: string[] }): Promise<Claimed> => {
    const asked = performance.now()
    const rows = await pool<Row[]>`
      select tenant_id, delivery_id, retry_count, bundle, slot, status, attempt_count, earlier_attempts, event_id, event_type,
        octet_length(payload) as payload_bytes, case when octet_length(payload) <= ${MAX_CLAIMED_PAYLOAD_BYTES} then payload end as payload,
        endpoint_id, sendable, within_quota, case when leads then url end as url,
        case when leads then at_once end as at_once, case when leads then probed end as probed, case when leads then standing end as standing,
        case when leads then encode(signing_secret, 'hex') end as signing_secret,
        case when leads then encode(previous_secret, 'hex') end as previous_secret,
        case when leads then date_part('epoch', now) * 1000 end as now_ms, more
      from waybill.claim_due(${asking.kind === 'retry'}, ${asking.thorough}, ${asking.max}, ${monthlyAttempts}, ${asking.crowding ?? []}::text[])`
    const now = rows.find((row) => row.now_ms !== null)?.now_ms
    return sortOut(rows, { clockOffsetMs: now ? follow(now, asked).ahead : 0, asked })
  }
}

function sortOut(rows: Row[], { clockOffsetMs, asked }: { clockOffsetMs: number; asked: number }): Claimed {
  const claimed: Claimed = { send: [], unsendable: [], obsolete: [], more: rows[0]?.more ?? false }
  const endpoints = new Map<string, ReturnType<typeof endpointOf>>()
  for (const row of rows) {
    if (row.url !== null) endpoints.set(row.endpoint_id, endpointOf(row))
    const endpoint = endpoints.get(row.endpoint_id)
    const ids = {
      tenantId: row.tenant_id,
      deliveryId: row.delivery_id,
      endpointId: row.endpoint_id,
      bundle: row.bundle,
      retryCount: row.retry_count,
      claimedAtMs: endpoint?.claimedAtMs ?? 0,
      touchedAt: asked,
      hand: null,
    }
    if (endpoint === undefined || (row.status !== 'pending' && row.status !== 'retrying')) claimed.obsolete.push(ids)
    else if (!row.sendable) claimed.unsendable.push(ids)
    else {
      claimed.send.push({
        ...ids,
        ...endpoint,
        attemptNumber: row.earlier_attempts + row.retry_count + 1,
        recordedAttempts: row.attempt_count,
        status: row.status,
        eventId: row.event_id,
        eventType: row.event_type,
        payload: row.payload,
        payloadBytes: row.payload_bytes,
        withinQuota: row.within_quota,
        startAt: row.slot === null ? null : row.slot - clockOffsetMs,
        clockOffsetMs,
        underWay: null,
      })
    }
  }
  return claimed
}

/** What the claims of all its deliveries say of an endpoint. */
const endpointOf = (lead: Lead) => ({
  url: lead.url,
  secrets: secretsOf(lead),
  atOnce: lead.at_once,
  isProbed: lead.probed === true,
  standing: lead.standing,
  claimedAtMs: lead.now_ms,
})

/** An endpoint's sealed secrets, newest first. */
export const secretsOf = ({ signing_secret, previous_secret }: Pick<Lead, 'signing_secret' | 'previous_secret'>) =>
  previous_secret ? [signing_secret, previous_secret] : [signing_secret]
