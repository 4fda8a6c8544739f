import type { Db } from '../db/open.ts'
import type { Place } from '../line.ts'

/** First attempts and retries are claimed separately, so that neither can starve the other. */
export type Kind = 'first' | 'retry'

/**
 * What is known of an endpoint: its last attempt failed; none has succeeded for half a minute; or it is well (waybill.standing). Not the
 * API's state `failing`, which is an open breaker.
 */
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
  /** Its endpoint's breaker is open or half open, so that it most likely was held before. */
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
  /** Its place among the attempts under way (flow/lanes/lanes.ts); else null. */
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

/** A claim that has not been touched for this long has lost its worker, or the worker has lost the database or its own time. */
export const LAPSE_MS = 10_000

/** pg-boss's fence: it fits the job with which the delivery was claimed, until that job is claimed again. */
export const fenceOf = ({ bundle, deliveryId, retryCount }: ClaimedJob) => `${bundle ?? deliveryId}:${retryCount}`

/** Whether its endpoint takes a few at a time: it is ordered or paced, or its breaker is not closed. */
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
