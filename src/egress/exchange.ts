import type { Dispatcher } from 'undici'
import type { Connection } from './connections.ts'
import { type AttemptError, ConnectError, type Failure } from './failure.ts'

/**
 * If a reused connection breaks within this time of the request, the receiver was most likely closing it when the request
 * arrived, or what came was left of its last answer: that becomes known within a round trip. If it breaks later, the receiver had the
 * request.
 */
const CLOSE_RACE_MS = 1000
/** A 408 that crossed with the request. Like what is left of the last answer, it is no answer to this one. */
export const IDLE_ANSWER = new Error('the receiver had waited too long for a request')
/** How many 1xx may precede a response. More can only be meant to do harm: each takes time from other attempts. */
const MAX_ANNOUNCEMENTS = 32
/** How many headers these and the response, with its trailers, may have together, for the same reason: each takes a microsecond or two. */
const MAX_HEADERS = 256

/** How far one request has got on its connection. */
export type Exchange = {
  /** Whether the connection has carried others before. */
  isReused: boolean
  /** By performance.now(); null until the request is about to be written. */
  writtenAt: number | null
  /** Whether anything came. */
  isAnswered: boolean
  /** How many 1xx. */
  announcements: number
  /** How many headers these and the answer have had. */
  headers: number
  /** Null until the status line of the answer itself. */
  statusCode: number | null
  /** The answer's Content-Length, as it came. */
  declaredLength: unknown
  /** How much of its body has come. */
  bodyBytes: number
}

export const newExchange = (): Exchange => ({
  isReused: false,
  writtenAt: null,
  isAnswered: false,
  announcements: 0,
  headers: 0,
  statusCode: null,
  declaredLength: undefined,
  bodyBytes: 0,
})

type Raw = Dispatcher.DispatchController['rawHeaders']

/** Counts headers, or trailers, that have come. Returns whether they are too many. */
export function hasTooManyHeaders(exchange: Exchange, raw: Raw): boolean {
  // Names and values in turn.
  exchange.headers += Array.isArray(raw) ? raw.length / 2 : 0
  return exchange.headers > MAX_HEADERS
}

/** A head has come, of an announcement or of the answer. Returns what is wrong if that is too much. */
export function noteHead(exchange: Exchange, status: number, raw: Raw): AttemptError | null {
  if (status < 200) exchange.announcements++
  if (hasTooManyHeaders(exchange, raw)) return 'response_too_large'
  return exchange.announcements > MAX_ANNOUNCEMENTS ? 'protocol_error' : null
}

/** Whether all of the answer has come, whatever undici says: a space behind a length (RFC 9110, 5.6.3) is one more digit to it. */
export const isWhole = (error: unknown, { declaredLength, bodyBytes }: Exchange) =>
  (error as { code?: unknown }).code === 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH' && Number(declaredLength) === bodyBytes

/** Whether the receiver may have been closing a kept connection when the request arrived. */
export const isEarly = ({ isReused, writtenAt }: Exchange) =>
  isReused && performance.now() - (writtenAt ?? 0) < CLOSE_RACE_MS

/** Whether a kept connection is to blame, on which the receiver most likely has not read the request. */
export function isOfConnection(error: unknown, problem: Failure, { isKept }: Connection, exchange: Exchange): boolean {
  // Before it writes to a kept connection, undici looks whether that is still good, and may find that it is not.
  if (isKept && exchange.writtenAt === null) return !(error instanceof ConnectError)
  if (error === IDLE_ANSWER) return true
  const isClosed = problem.error === 'connection_reset' && !exchange.isAnswered
  const isLeftover = problem.error === 'protocol_error' && exchange.statusCode === null
  return isEarly(exchange) && (isClosed || isLeftover)
}
