import type { IncomingMessage } from 'node:http'
import { limitPerTurn } from '../../pacing.ts'

/**
 * How many requests begin in one turn of the event loop. Each turn takes one new connection, and no more (libuv): if it began all
 * that hundreds of busy connections ask, new ones, such as those of health checks, would wait for many seconds.
 */
const MAX_BEGUN = 32
/** Larger requests do not wait for that: Node reads on meanwhile, and ten thousand would be too much to hold. */
const MAX_WAITING_BYTES = 8192
/** What each name and value of its headers takes besides its text. */
const HEADER_BYTES = 50

/** Whether little comes with it: in its target, its headers and its body. */
const isSmall = ({ url = '', headers, rawHeaders }: IncomingMessage) =>
  headers['transfer-encoding'] === undefined &&
  Number(headers['content-length'] ?? 0) + url.length + HEADER_BYTES * rawHeaders.length + rawHeaders.join('').length <=
    MAX_WAITING_BYTES

/** Returns a function that begins requests, by calling what it is given: at once, or when their turn comes. */
export function createBeginner(): (request: IncomingMessage, begin: () => void) => void {
  const perTurn = limitPerTurn(MAX_BEGUN)
  return (request, begin) => (isSmall(request) ? perTurn(begin) : begin())
}
