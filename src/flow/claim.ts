import type { Db, Pool } from '../db/open.ts'
import type { Place } from '../line.ts'
import { followClock } from './database-clock.ts'

/** First attempts and retries are claimed separately, so that neither can starve the other. */
export type Kind = 'first' | 'retry'

/** What is known of an endpoint: its last attempt failed; none has succeeded for half a minute; or it is well (waybill.standing). */
export type Standing = 'failing' | 'unsure' | 'good'

/** A claimed job with all that its attempt needs. */
export type Claim = {
  tenantId: string
  deliveryId: string
  /** The job that it shares with others and was claimed with (sql/functions/bundles.sql); null if it has its own, with its own id. */
  bundle: string | null
  /** Of that job: with its id, pg-boss's fence, which names this claim and no later one of the same job. */
  retryCount: number
  /** The number of this attempt, from 1, counted over all replays. */
  attemptNumber: number
  /** How many attempts have a record: fewer than `attemptNumber - 1` if a worker was lost. */
  recordedAttempts: number
  status: 'pending' | 'retrying'
  eventId: string
  eventType: string
  /** Null if it is too large to be part of a claim; it is loaded when there is room for it (flow/payload.ts). */
  payload: string | null
  payloadBytes: number
  endpointId: string
  url: string
  /** Sealed signing secrets, in hexadecimal, newest first. */
  secrets: string[]
  /** False if the month's attempts are used up: it must not be sent. Null if it was not counted, to be given back. */
  withinQuota: boolean | null
  /** How many attempts the endpoint may have at once; null if only the worker's own cap applies. */
  atOnce: number | null
  /** Its endpoint's breaker is not closed, so that it was held before. */
  isProbed: boolean
  standing: Standing
  /** When the attempt may start if its endpoint is paced, by performance.now(); else null. */
  startAt: number | null
  /** The database's clock minus performance.now(), in milliseconds: this machine's own clock may be changed at any time. */
  clockOffsetMs: number
  /** When it was claimed, by the database's clock, in milliseconds. */
  claimedAtMs: number
  /** Before its claim or the last `touch` was asked for, by performance.now(). */
  touchedAt: number
  /** How this process has it in hand (flow/in-hand.ts); null once it has let go. */
  hand: Hand | null
  /** Its place among the attempts under way (flow/lanes.ts); else null. */
  underWay: Place<UnderWay> | null
}

/** `since`: by performance.now(). `isReleased`: it had been held. */
export type UnderWay = { since: number; isReleased: boolean }

/**
 * `freeSlot` is null while it has no slot. `waitsFor`: whose slot it waits for, if it does. `isAnswered`: its request is over, its slot
 * free, and its record not stored yet.
 */
export type Hand = {
  place: Place<ClaimedJob>
  occupy: (tenantId: string) => () => void
  freeSlot: (() => void) | null
  isAnswered: boolean
  waitsFor: 'endpoint' | 'tenant' | null
}

/** What it takes to put a claimed job away. */
export type ClaimedJob = Pick<
  Claim,
  'tenantId' | 'deliveryId' | 'endpointId' | 'bundle' | 'retryCount' | 'claimedAtMs' | 'touchedAt' | 'hand'
>

/** `unsendable`: the endpoint takes nothing now. `obsolete`: the delivery is finished, gone, or has another job. `more`: others are due. */
type Claimed = { send: Claim[]; unsendable: ClaimedJob[]; obsolete: ClaimedJob[]; more: boolean }

/**
 * A claim's answer must arrive within the pool's patience however large the payloads are, or every worker would ask for the
 * same jobs for ever. Postgres knows the length of a payload without reading it.
 */
const MAX_CLAIMED_PAYLOAD_BYTES = 64 * 1024

/** A claim that has not been touched for this long has lost its worker, or the worker has lost the database or its own time. */
export const LAPSE_MS = 10_000

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
 * which only what is preferred may start.
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
  const endpoints = new Map<
    string,
    Pick<Claim, 'url' | 'secrets' | 'atOnce' | 'isProbed' | 'standing' | 'claimedAtMs'>
  >()
  for (const row of rows) {
    if (row.url !== null) {
      const { url, at_once: atOnce, probed, standing, now_ms: claimedAtMs } = row
      const isProbed = probed === true
      endpoints.set(row.endpoint_id, { url, secrets: secretsOf(row), atOnce, isProbed, standing, claimedAtMs })
    }
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

/** An endpoint's sealed secrets, newest first. */
export const secretsOf = ({ signing_secret, previous_secret }: Pick<Lead, 'signing_secret' | 'previous_secret'>) =>
  previous_secret ? [signing_secret, previous_secret] : [signing_secret]

/** pg-boss's fence: it fits the job with which the delivery was claimed, until that job is claimed again. */
export const fenceOf = ({ bundle, deliveryId, retryCount }: ClaimedJob) => `${bundle ?? deliveryId}:${retryCount}`

/** Whether its endpoint takes a few at a time: it is ordered, paced, or being probed. */
export const linesUp = ({ atOnce, startAt }: Claim) => atOnce !== null || startAt !== null

/** Whether its endpoint is well, or takes a few at a time. Of a tenant's retries, the last slots are for these: the others may hang. */
export const isPreferred = (claim: Claim) => claim.standing === 'good' || linesUp(claim)

/** Whether it may have lapsed, so that another worker may have its delivery. */
export const isLate = ({ touchedAt }: ClaimedJob) => performance.now() - touchedAt > LAPSE_MS

/**
 * An attempt that is later than this for its time slot, as after the process was stopped, is not made: all that were late would go out
 * together, beside those whose turn it is now. (Time slots are given out for as long ahead.)
 */
const MISSED_MS = 500

/** Nothing was sent: the delivery has missed its time slot, or its endpoint was changed meanwhile so that it has to be held. */
export class Outdated extends Error {}

/** Whether it has missed its time slot. */
export const hasMissed = ({ startAt }: Pick<Claim, 'startAt'>) =>
  startAt !== null && performance.now() > startAt + MISSED_MS

/** Notes that the worker that has these claims is alive. One that was late remains so: it may be somebody else's by now. */
export async function touch(sql: Db, claims: ClaimedJob[]): Promise<void> {
  const askedAt = performance.now()
  const jobs = new Map(claims.map(({ bundle, deliveryId, retryCount }) => [bundle ?? deliveryId, retryCount]))
  if (jobs.size > 0) await sql`select waybill.touch(${[...jobs.keys()]}::uuid[], ${[...jobs.values()]}::int[])`
  // Only now: it may have lapsed while this waited for the database.
  for (const claim of claims) if (!isLate(claim)) claim.touchedAt = askedAt
}
