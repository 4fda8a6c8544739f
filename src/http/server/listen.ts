import { once } from 'node:events'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo, Socket } from 'node:net'
import type { Duplex } from 'node:stream'
import { getRequestListener, RequestError } from '@hono/node-server'
import { Answer, requestIdOf } from '../answer.ts'
import type { App } from '../route.ts'
import { createBeginner } from './begin.ts'
import { cutOff } from './cut-off.ts'
import { type Connection, type Connections, drain, isIdle, newConnection, type State } from './drain.ts'
import { limitClients } from './limit-clients.ts'
import { lingerForRequest } from './linger.ts'
import { refusal } from './refusal.ts'
import { cutUnread } from './unread.ts'

/** `close`: see `drain`. */
type Listening = { port: number; close: (graceMs: number) => Promise<void> }

const HEADERS_MS = 10_000
const REQUEST_MS = 30_000
/** Longer than the minute for which load balancers keep idle connections, so that they, not we, close them. */
const KEEP_ALIVE_MS = 65_000
/** How often Node looks for late requests: its default, 30 s, would let headers take 40. */
const LATE_CHECK_MS = 2000
/** How many requests of one connection may wait for their answers; a client that sends more is cut off. */
const MAX_PIPELINED = 100
/** What waiting requests on all connections may hold together, in names and values of headers: each takes some 50 bytes. */
const MAX_AHEAD = 200_000
/** What each of them takes besides its headers, in the same unit. */
const REQUEST_WEIGHT = 50
/** How many connections may wait to be taken, unless the system's own limit (net.core.somaxconn) is lower; others try again seconds later. */
const BACKLOG = 65_535
/** No host has a longer name, with its port. Reading one as part of a URL takes time that grows with the square of its length. */
const MAX_HOST = 300
const INVALID_TARGET = 'the request target or the Host header is not valid'
const idOf = (request: IncomingMessage | null | undefined) => requestIdOf(request?.headers['x-request-id'])

/** The length of the Host header, or of the host in a target that is a whole URL. */
const hostLength = ({ url = '', headers: { host = '' } }: IncomingMessage) =>
  Math.max(host.length, url.startsWith('/') ? 0 : (/^[a-z]+:\/\/([^/?#]*)/i.exec(url)?.[1]?.length ?? 0))

type Options = { hostname: string; port: number; maxClients: number; onFull: (refused: number) => void }

/**
 * Serves `app`; resolves when it listens, rejects when it cannot. Port 0 picks a free one. Connections beyond `maxClients` are
 * refused, and `onFull` is told of them.
 */
export async function listen(app: App, { hostname, port, maxClients, onFull }: Options): Promise<Listening> {
  const state: State = { isDraining: false, haveIdleLeft: false, taken: 0 }
  const connections: Connections = new Map()
  const answer = getRequestListener(app.fetch, {
    // Stands in for the Host header that HTTP/1.0 does not have; nothing else reads it.
    hostname: 'localhost',
    // It would cut off, answer and all, a client that is still sending half a second later. Node reads on, keeps nothing of it,
    // and ends it when the request's time is up.
    autoCleanupIncoming: false,
    errorHandler(error) {
      if (!(error instanceof RequestError)) throw error
      return refusal(400, INVALID_TARGET).response()
    },
  })
  const { weigh, onRequest } = createReception(connections, state, answer)
  const server = createServer(
    {
      headersTimeout: HEADERS_MS,
      requestTimeout: REQUEST_MS,
      keepAliveTimeout: KEEP_ALIVE_MS,
      connectionsCheckingInterval: LATE_CHECK_MS,
      // Node's own refusal has no body.
      requireHostHeader: false,
      // Otherwise Node takes the first of two Authorization headers.
      joinDuplicateHeaders: true,
      ServerResponse: Answer,
    },
    onRequest,
  )
  // A client that has sent everything may say so (RFC 9293, 3.6) and still wait for its answers. The types leave this out.
  Object.assign(server, { httpAllowHalfOpen: true })
  server.on('connection', (socket: Socket) => {
    const connection = newConnection()
    connections.set(socket, connection)
    state.taken++
    lingerForRequest(socket, () => connection.last)
    cutUnread(socket)
    socket.once('close', () => {
      weigh(connection, -connection.ahead)
      connections.delete(socket)
    })
  })
  limitClients(server, maxClients, onFull)
  // Whoever asks first is told to go on when the body is wanted; otherwise Node would say so at once. If it is not, the answer is the
  // last on its connection.
  server.on('checkContinue', (request: IncomingMessage, response: Answer) => {
    response.askForBody = () => response.writeContinue()
    onRequest(request, response)
  })
  // An expectation other than 100-continue is one that we need not meet (RFC 9110, 10.1.1).
  server.on('checkExpectation', onRequest)
  server.on('connect', (request: IncomingMessage, socket: Duplex) => {
    // Node has let go of it, and an error that nobody listens to would end the process.
    socket.on('error', () => {})
    if (connections.get(socket)?.unanswered.length !== 0) socket.destroy()
    else refusal(404, null, idOf(request)).end(socket)
  })
  server.on('clientError', (error: NodeJS.ErrnoException, socket: Duplex) => {
    const { last, unanswered } = connections.get(socket) ?? newConnection()
    const isArriving = last?.complete === false
    // The refusal answers the request that is arriving, or what is no request at all. If another request waited for its answer,
    // the client would take this for it; and no request may get two.
    const isNext = unanswered.length === (isArriving ? 1 : 0)
    if (error.code === 'ECONNRESET' || !socket.writable || !isNext || isAnswering(socket)) {
      socket.destroy()
      return
    }
    const broken = isArriving ? last : undefined
    const refuse = (status: 400 | 408 | 431, message: string) =>
      refusal(status, message, idOf(broken)).end(socket, broken?.method)
    if (error.code === 'HPE_HEADER_OVERFLOW') refuse(431, 'there must be at most 1,000 headers, of 16 KiB in all')
    else if (error.code === 'ERR_HTTP_REQUEST_TIMEOUT') refuse(408, 'the request took too long to arrive')
    else refuse(400, 'is not valid HTTP')
  })
  await once(server.listen({ port, host: hostname, backlog: BACKLOG }), 'listening').catch((cause: Error) => {
    throw new Error(`HOST and PORT: ${cause.message}`, { cause })
  })
  return {
    port: (server.address() as AddressInfo).port,
    close: (graceMs) => drain(server, connections, state, graceMs),
  }
}

/** Has requests answered, each connection's one after the other, however many are sent ahead. `weigh` adds to what a connection has waiting. */
function createReception(
  connections: Connections,
  state: State,
  answer: (request: IncomingMessage, response: Answer) => unknown,
) {
  let ahead = 0
  const weigh = (connection: Connection, weight: number) => {
    connection.ahead += weight
    ahead += weight
  }
  const beginInTurn = createBeginner()
  const onRequest = (request: IncomingMessage, response: Answer) => {
    const connection = connections.get(request.socket) as Connection
    connection.last = request
    // While draining, clients are told to leave: a kept-alive connection would hold up the close for seconds, and one that is closed
    // without a word takes the next request with it, which its sender may not repeat. Who keeps asking ahead leaves with the first
    // request that comes after the idle ones have left.
    const isLate = state.haveIdleLeft
    response.isLast = () => isLate || (state.isDraining && connection.unanswered.length === 1)
    const lacksHost = request.headers.host === undefined && request.httpVersionMinor > 0
    const isBehind = connection.unanswered.length > 0
    const weight = isBehind ? REQUEST_WEIGHT + request.rawHeaders.length : 0
    weigh(connection, weight)
    const begin = () =>
      beginInTurn(request, () => {
        // A connection that is gone weighs nothing any more.
        if (request.socket.destroyed) return
        weigh(connection, -weight)
        const problem = lacksHost ? 'must carry a Host header' : hostLength(request) > MAX_HOST ? INVALID_TARGET : null
        if (problem === null) void answer(request, response)
        else refusal(400, problem, response.requestId).end(request.socket, request.method)
      })
    const isTooMuch = connection.unanswered.push(begin) > MAX_PIPELINED || (isBehind && ahead > MAX_AHEAD)
    if (isTooMuch || (lacksHost && isBehind)) {
      cutOff(request.socket)
      return
    }
    response.once('close', () => {
      connection.unanswered.shift()
      // One after the other, each in a turn of its own: otherwise all that connections have sent ahead would begin in one.
      const [next] = connection.unanswered
      if (next) setImmediate(next)
      const settle = () => {
        // So that an idle connection does not keep its last request in memory.
        if (connection.last === request) connection.last = undefined
        connection.read = request.socket.bytesRead
      }
      // One that was answered early is still arriving.
      if (request.complete) settle()
      else request.once('end', settle)
      // An answer that began before the draining leaves its connection open.
      if (state.haveIdleLeft && isIdle(request.socket, connection)) setImmediate(() => request.socket.destroy())
    })
    if (!isBehind) begin()
  }
  return { weigh, onRequest }
}

/** Whether part of an answer is on its way already: a second one would be read as its continuation. */
function isAnswering(socket: Duplex): boolean {
  const { _httpMessage: message } = socket as Socket & { _httpMessage?: ServerResponse }
  return message?.headersSent === true
}
