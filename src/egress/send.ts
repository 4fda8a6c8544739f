import { LRUCache } from 'lru-cache'
import type { Dispatcher } from 'undici'
import { Line } from '../line.ts'
import { setLate } from '../pacing.ts'
import type { AddressRange } from './address.ts'
import { collectBody } from './body.ts'
import { openDirectly, openThroughProxy } from './connect.ts'
import { type Connection, createConnections } from './connections.ts'
import { checkUrl } from './destination.ts'
import {
  type Exchange,
  hasTooManyHeaders,
  IDLE_ANSWER,
  isEarly,
  isOfConnection,
  isWhole,
  newExchange,
  noteHead,
} from './exchange.ts'
import { type AttemptError, classify, type Failure, failure, LocalFault } from './failure.ts'
import { createResolver } from './resolve.ts'

/** A receiver that was never asked has not failed to answer. */
const NOT_CONNECTED: Failure = {
  error: 'timeout',
  errorMessage: 'the host name was not resolved, or the connection or its TLS handshake not made, in time',
}
/** What became of one POST. Delivered if, and only if, `error` is null. */
export type Outcome = {
  /** By performance.now(). */
  startedAt: number
  /** Whole milliseconds from the start to the end of the response, the failure or the deadline. */
  durationMs: number
  /** Null when no status line came. A 2xx can stand beside an error: the receiver broke the response off. */
  statusCode: number | null
  error: AttemptError | null
  errorMessage: string | null
  /** At most 16 KiB; null when no status line came. */
  responseBody: string | null
  /** The body was longer than what was kept, did not end, or was not HTTP. */
  responseTruncated: boolean
  /** The header as it came, of any status; the first one if there were several. */
  retryAfter: string | null
}

export type SendRequest = {
  url: string
  headers: Record<string, string>
  body: string
  /** Asked when there is a connection and the request is about to go out; if it is too late for it, `send` rejects with a `LocalFault`. */
  isLate?: () => boolean
}

export type Sender = {
  send(request: SendRequest): Promise<Outcome>
  /** Ends all requests under way and to come: `send` rejects with the reason. An interrupted attempt has not failed. */
  interrupt(reason: Error): void
  /** Closes the unused connections; those in use close when their attempts end. */
  close(): void
}

type SenderOptions = {
  /** Addresses exempt from the blocked classes. */
  allow: readonly AddressRange[]
  /** One deadline for the whole attempt: DNS, connect, TLS, request, headers and body. */
  timeoutMs: number
  /** An HTTP CONNECT proxy; it resolves names and filters addresses in this program's place. */
  proxyUrl?: string
  /** Name servers to ask instead of the system's, as `address` or `address:port`. */
  dnsServers?: readonly string[]
  /** While there are this many connections, none is kept beside a new one. */
  maxConnections?: number
}

/**
 * Sends single POSTs over HTTP/1.1. Follows no redirect, decompresses nothing, takes no proxy from the environment. Whatever a
 * receiver does wrong is an Outcome, never an exception; if this process lacks something, `send` rejects with a `LocalFault`.
 */
export function createSender({
  allow,
  timeoutMs,
  proxyUrl,
  dnsServers,
  maxConnections = Infinity,
}: SenderOptions): Sender {
  const resolver = createResolver({ timeoutMs, servers: dnsServers })
  const connections = createConnections(
    proxyUrl ? openThroughProxy(proxyUrl, timeoutMs) : openDirectly(resolver, allow, timeoutMs),
    maxConnections,
  )
  // Judged when the endpoint was stored, and again here: rows can be written behind the API's back. The rules do not change
  // meanwhile, and URLs are few compared with requests, so verdicts are kept.
  const targets = new LRUCache<string, { origin: string; path: string } | 'blocked'>({
    max: 1000,
    memoMethod(url) {
      if (checkUrl(url, allow) !== null) return 'blocked'
      const { origin, pathname, search } = new URL(url)
      return { origin, path: pathname + search }
    },
  })

  const underWay = new Line<() => void>()
  let interruption: Error | null = null

  function send({ url, headers, body, isLate = () => false }: SendRequest): Promise<Outcome> {
    const startedAt = performance.now()
    if (interruption) return Promise.reject(interruption)
    const target = targets.memo(url)
    if (target === 'blocked') {
      const nothing = {
        durationMs: 0,
        statusCode: null,
        responseBody: null,
        responseTruncated: false,
        retryAfter: null,
      }
      return Promise.resolve({ startedAt, ...nothing, ...failure('blocked_destination') })
    }
    const { origin, path } = target
    const options: Dispatcher.DispatchOptions = { path, method: 'POST', headers, body }

    return new Promise((resolve, reject) => {
      const response = collectBody()
      let connection: Connection
      let current: Exchange
      let retryAfter: string | null = null
      let ended = false

      /** The first caller decides the outcome; whatever the connection reports later is ignored. */
      const end = (): boolean => {
        if (ended) return false
        ended = true
        clearTimeout(deadline)
        underWay.leave(place)
        return true
      }
      const settle = (responseTruncated: boolean, problem: Failure | null) => {
        const { error = null, errorMessage = null } = problem ?? {}
        const { statusCode } = current
        const durationMs = Math.round(performance.now() - startedAt)
        const responseBody = statusCode === null ? null : response.text()
        resolve({ startedAt, durationMs, statusCode, error, errorMessage, responseBody, responseTruncated, retryAfter })
      }
      /** Stops reading: if a status has come, the receiver has decided, and the rest of its body changes nothing. */
      const cutOff = () => {
        if (!end()) return
        connection.cancel()
        const { statusCode, writtenAt } = current
        if (statusCode !== null) settle(true, judgeStatus(statusCode))
        else settle(false, writtenAt === null ? NOT_CONNECTED : failure('timeout'))
      }
      const deadline = setLate(cutOff, timeoutMs)
      const place = underWay.join(() => {
        if (!end()) return
        connection.cancel()
        reject(interruption)
      })

      const dispatch = (using: Connection, mayRetry: boolean) => {
        const exchange = newExchange()
        connection = using
        current = exchange
        using.client.dispatch(options, {
          onRequestStart(controller) {
            exchange.isReused = !using.start()
            exchange.writtenAt = performance.now()
            if (isLate()) controller.abort(new LocalFault('another process may have sent it by now'))
          },
          onResponseStarted() {
            exchange.isAnswered = true
          },
          onResponseStart(controller, status, responseHeaders) {
            const problem = noteHead(exchange, status, controller.rawHeaders)
            if (problem !== null) {
              if (!end()) return
              using.cancel()
              settle(false, failure(problem))
              return
            }
            if (status < 200) return
            using.inBody = true
            // Some say this, and that they close it, to a connection that is idle for too long, and it crosses with the request
            // (RFC 9110, 15.5.9).
            const isClosing = () => /close/i.test(String(responseHeaders.connection))
            if (status === 408 && exchange.announcements === 0 && isEarly(exchange) && isClosing()) {
              controller.abort(IDLE_ANSWER)
              return
            }
            exchange.statusCode = status
            exchange.declaredLength = responseHeaders['content-length']
            const header = responseHeaders['retry-after']
            retryAfter = (Array.isArray(header) ? header[0] : header) ?? null
          },
          onResponseData(_controller, chunk) {
            exchange.bodyBytes += chunk.length
            if (!response.add(chunk)) cutOff()
          },
          onResponseEnd(controller) {
            if (!end()) return
            const isLarge = hasTooManyHeaders(exchange, controller.rawTrailers)
            const error = using.broken()
            if (isLarge) using.cancel()
            else connections.give(using)
            const verdict = judgeStatus(exchange.statusCode ?? 0) ?? (error && classify(error, true))
            settle(error !== null, isLarge ? failure('response_too_large') : verdict)
          },
          onResponseError(_controller, error) {
            if (ended) return
            using.cancel()
            if (error instanceof LocalFault) {
              if (end()) reject(error)
              return
            }
            const problem = classify(error, exchange.statusCode !== null)
            if (mayRetry && isOfConnection(error, problem, using, exchange)) {
              // Once, on a new connection. If the receiver did get the first request, it gets the same event again under
              // the same ids, as it must expect of at-least-once delivery.
              dispatch(connections.open(origin), false)
            } else if (end()) {
              const { statusCode } = exchange
              if (statusCode === null) settle(false, problem)
              else if (isWhole(error, exchange)) settle(false, judgeStatus(statusCode))
              // A receiver that breaks off a 2xx has not confirmed the event: better twice than never. One that is only at odds with
              // the parser over how a body is written has, and would be again.
              else settle(true, judgeStatus(statusCode) ?? (problem.error === 'protocol_error' ? null : problem))
            }
          },
        })
      }
      dispatch(connections.take(origin), true)
    })
  }

  function interrupt(reason: Error): void {
    interruption = reason
    for (const end of [...underWay]) end()
  }

  function close(): void {
    connections.close()
    resolver.close()
  }

  return { send, interrupt, close }
}

function judgeStatus(statusCode: number): Failure | null {
  if (statusCode >= 200 && statusCode < 300) return null
  return failure(statusCode >= 300 && statusCode < 400 ? 'redirect' : 'http_status')
}
