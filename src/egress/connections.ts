import type { Socket } from 'node:net'
import { Client } from 'undici'
import { Line, type Place } from '../line.ts'
import { createWatch } from '../watch.ts'
import { createConnector, type OpenTcp } from './connect.ts'
import { ConnectError, failure } from './failure.ts'
import { readInPieces } from './pieces.ts'
import { createTls } from './tls.ts'

/**
 * How long a connection stays open unused, if the receiver does not ask for less (`Keep-Alive: timeout=`): a new one costs it and
 * us a handshake, and the delivery some round trips. Many proxies close theirs after a minute; closing before they do avoids most
 * of the race in which a request goes out on a connection that the receiver is closing.
 */
const IDLE_TIMEOUT_MS = 50_000
/** The same for all but one to the same receiver: a burst should not occupy it for long. */
const SPARE_TIMEOUT_MS = 4000
/**
 * After how long a connection is not kept any more. One that is never unused for long would lead for ever to an address that its
 * name has no longer.
 */
const MAX_AGE_MS = 60_000
/** Of connections that were opened within this time of one another, the receiver may have accepted any first. */
const TOGETHER_MS = 1000
/** How often unused connections are looked at for these. */
const TIDY_MS = 1000
/** Unused connections kept in all: how many host names there are is up to tenants. */
const MAX_IDLE_CONNECTIONS = 1024
const MAX_HEADER_BYTES = 16_384
/**
 * How many bytes may come in for one request, or for a handshake: many times what a response's headers and kept body take. The
 * parser bounds only those; a reason phrase, a chunk extension or white space could go on for ever, as could what TLS keeps to
 * itself (empty records, new keys), and all of these take time from other attempts.
 */
const MAX_READ_BYTES = 128 * 1024
/**
 * How much of its request may not have been sent when a connection is kept: of a small one, TLS says so only a turn of the event loop
 * after the system has taken it, when the answer may be there already.
 */
const MAX_UNSENT_BYTES = 64 * 1024
/** How often connections are looked at for having brought more than MAX_READ_BYTES. */
const LOOK_MS = 50
/** How many TLS session tickets a connection may bring. Servers send one to four; each takes time from other attempts. */
const MAX_TICKETS = 32
/** Nobody sees it, as the attempt has ended. Made once, since a stack trace at every close is expensive. */
const CANCELLED = new Error('cancelled')

/** One undici client with one socket, used by one attempt at a time. */
export type Connection = {
  readonly origin: string
  readonly client: Client
  /** By performance.now(). */
  readonly openedAt: number
  /** Its place among the unused ones; null while in use. */
  idle: Place<Connection> | null
  /** By performance.now(). */
  unusedSince: number
  /** Whether it has been unused before. */
  isKept: boolean
  /** Whether what comes is the body of an answer. */
  inBody: boolean
  /** To be called when a request is about to be written; returns whether it is the first one on its socket. */
  start(): boolean
  /** How much of its request has not been sent. */
  unsentBytes(): number
  /** What has broken it, if anything: undici takes a reset for the end of a body that has no length. */
  broken(): Error | null
  /** Ends it at any stage: name resolution, connect, TLS, request, response. */
  cancel(): void
}

type Connections = {
  /** An unused connection of this origin, else a new one. */
  take(origin: string): Connection
  open(origin: string): Connection
  /** Gives back a connection whose response has been read to its end. */
  give(connection: Connection): void
  close(): void
}

/**
 * Keeps connections for reuse. Not undici's Agent: its pool queues a request behind others of the same origin, where it
 * would use up its deadline unsent, and cannot end a connection attempt. Here an attempt owns its connection, so
 * the attempts in flight, which the caller bounds, are also the bound on busy connections. No unused ones are kept beyond
 * `most` in all.
 */
export function createConnections(openTcp: OpenTcp, most: number): Connections {
  const idleByOrigin = new Map<string, Connection[]>()
  const idle = new Line<Connection>()
  const all = new Line<Connection>()
  const startTls = createTls()
  const watch = createWatch(LOOK_MS)
  const tidying = setInterval(tidy, TIDY_MS).unref()
  let closed = false

  function open(origin: string): Connection {
    const [oldest] = idle
    if (all.size >= most) oldest?.cancel()
    const controller = new AbortController()
    let wire: Socket | null = null
    let fresh = true
    let mostRead = 0
    let look = () => {}
    /** Under TLS not `wire`. */
    let connected: Socket | null = null
    const readMore = () => {
      mostRead = (wire?.bytesRead ?? 0) + MAX_READ_BYTES
    }
    const client = new Client(origin, {
      allowH2: false,
      // Zero: the attempt's own deadline covers the headers and the body.
      headersTimeout: 0,
      bodyTimeout: 0,
      keepAliveTimeout: IDLE_TIMEOUT_MS,
      keepAliveMaxTimeout: IDLE_TIMEOUT_MS,
      keepAliveTimeoutThreshold: 1000,
      maxHeaderSize: MAX_HEADER_BYTES,
      connect: createConnector(openTcp, startTls, controller.signal, {
        onOpened(tcp, end) {
          wire = tcp
          readMore()
          look = () => {
            if (tcp.bytesRead > mostRead) end(new ConnectError(failure('response_too_large')))
          }
          tcp.once('close', watch(look))
        },
        onConnected(socket) {
          fresh = true
          connected = socket
          readInPieces(socket, () => connection.inBody)
          // Called before undici's own listener, which reads. What TLS keeps to itself is not readable, and found a moment later.
          socket.on('readable', look)
          let tickets = 0
          socket.on('session', () => {
            if (++tickets > MAX_TICKETS) socket.destroy(new ConnectError(failure('protocol_error')))
          })
        },
      }),
    })
    const connection: Connection = {
      origin,
      client,
      openedAt: performance.now(),
      idle: null,
      unusedSince: 0,
      isKept: false,
      inBody: false,
      start() {
        const isFirst = fresh
        fresh = false
        connection.inBody = false
        readMore()
        return isFirst
      },
      unsentBytes: () => connected?.writableLength ?? 0,
      broken: () => connected?.errored ?? null,
      cancel: () => {
        forget(connection)
        all.leave(place)
        client.destroy(CANCELLED)
        controller.abort()
      },
    }
    const place = all.join(connection)
    client.on('disconnect', (_origin, _clients, error) => {
      // While it is in use, its attempt deals with the loss, unless the request was still to be written: for such a request
      // undici would connect again and again.
      if (connection.idle) connection.cancel()
      else if (fresh) void client.destroy(error)
    })
    return connection
  }

  function take(origin: string): Connection {
    const newest = idleByOrigin.get(origin)?.at(-1)
    if (newest === undefined) return open(origin)
    forget(newest)
    return newest
  }

  function give(connection: Connection): void {
    // A receiver that answers what it has not read would have ever more requests wait behind it, and memory fill with them.
    if (closed || connection.client.destroyed || isTooOld(connection) || connection.unsentBytes() > MAX_UNSENT_BYTES) {
      connection.cancel()
      return
    }
    connection.idle = idle.join(connection)
    connection.unusedSince = performance.now()
    connection.isKept = true
    const sameOrigin = idleByOrigin.get(connection.origin)
    if (sameOrigin) sameOrigin.push(connection)
    else idleByOrigin.set(connection.origin, [connection])
    const [oldest] = idle
    if (idle.size > MAX_IDLE_CONNECTIONS || all.size > most) oldest?.cancel()
  }

  function forget(connection: Connection): void {
    if (connection.idle === null) return
    idle.leave(connection.idle)
    connection.idle = null
    const sameOrigin = idleByOrigin.get(connection.origin) ?? []
    sameOrigin.splice(sameOrigin.lastIndexOf(connection), 1)
    if (sameOrigin.length === 0) idleByOrigin.delete(connection.origin)
  }

  function tidy(): void {
    // A receiver that serves one connection at a time serves a later one only when this is closed. That will be kept in its place.
    const lastInUse = new Map<string, number>()
    for (const { idle, origin, openedAt } of all) if (idle === null) lastInUse.set(origin, openedAt)
    for (const connection of [...idle]) {
      if (performance.now() - connection.unusedSince < SPARE_TIMEOUT_MS) return
      const { origin, openedAt } = connection
      const isWaitedFor = (lastInUse.get(origin) ?? -Infinity) > openedAt - TOGETHER_MS
      const isSpare = isWaitedFor || idleByOrigin.get(origin)?.at(-1) !== connection
      if (isSpare || isTooOld(connection)) connection.cancel()
    }
  }

  function close(): void {
    closed = true
    clearInterval(tidying)
    for (const connection of [...idle]) connection.cancel()
  }

  return { take, open, give, close }
}

const isTooOld = ({ openedAt }: Connection) => performance.now() - openedAt > MAX_AGE_MS
