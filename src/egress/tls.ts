import { constants } from 'node:crypto'
import { isIP, type Socket } from 'node:net'
import { connect as connectTls, createSecureContext, DEFAULT_CIPHERS, type SecureContext } from 'node:tls'
import { LRUCache } from 'lru-cache'
import { createHandshakes } from './handshakes.ts'

/** For all remembered TLS sessions as stored, and for one at most: most take one to three KiB, depending on the certificate. */
const SESSIONS_BYTES = 8 * 1024 * 1024
const SESSION_BYTES = 16 * 1024
/** With a session a receiver need not show its certificate again; after this it must, however often the session was resumed. */
const SESSION_MS = 3_600_000

export type Target = {
  hostname: string
  port: number
}

/** Starts TLS on a connected socket; `done` is called once. */
export type StartTls = (tcp: Socket, target: Target, done: (error: Error | null, socket: Socket | null) => void) => void

/**
 * For HTTP/1.1. Trusted authorities and ciphers are worked out once, as that takes 0.3 ms; and a receiver's session is kept, with
 * which its next handshake takes 1 ms instead of 1.7. (undici's own connector does the former each time, and loses the latter to
 * the next garbage collection.) Without DHE, where the receiver chooses the modulus: one of 10,000 bits stops this process for a
 * second; and without renegotiation, in which it could show other certificates.
 */
export function createTls(): StartTls {
  const sessions = new LRUCache<string, Buffer>({
    maxSize: SESSIONS_BYTES,
    maxEntrySize: SESSION_BYTES,
    sizeCalculation: ({ length }) => length,
  })
  const beginHandshake = createHandshakes()
  let secureContext: SecureContext | undefined
  return (tcp, { hostname, port }, done) => {
    secureContext ??= createSecureContext({
      ciphers: `${DEFAULT_CIPHERS}:!DHE`,
      secureOptions: constants.SSL_OP_NO_RENEGOTIATION,
    })
    const receiver = `${hostname}:${port}`
    let waiting = true
    let keepUntil = 0
    const handshake = beginHandshake(tcp, receiver)
    const socket = connectTls({
      socket: handshake.stream,
      host: hostname,
      servername: serverName(hostname),
      ALPNProtocols: ['http/1.1'],
      secureContext,
      rejectUnauthorized: true,
      session: sessions.get(receiver),
    })
    // Listening from the start, or Node would not look for sessions. It holds them back until the event below.
    socket.on('session', (session) => {
      const ttl = Math.ceil(keepUntil - performance.now())
      // A copy, since this one keeps 64 KiB of Node's pool from being freed.
      if (ttl > 0) sessions.set(receiver, Buffer.from(Uint8Array.from(session).buffer), { ttl })
    })
    socket.once('secureConnect', () => {
      waiting = false
      handshake.over(true)
      // Only for a full handshake: if resumed sessions counted, the certificate might never be checked again.
      if (!socket.isSessionReused()) keepUntil = performance.now() + SESSION_MS
      done(null, socket)
    })
    const fail = (error: Error) => {
      waiting = false
      handshake.over(false)
      // It may be the session that the receiver cannot cope with.
      sessions.delete(receiver)
      done(error, null)
    }
    socket.on('error', (error) => {
      if (waiting) fail(error)
      // Otherwise undici takes the end that follows an alert for the cause.
      else socket.destroy(error)
    })
    // TLS itself finds no fault with a stream that closes without having ended.
    socket.once('close', () => {
      if (waiting) fail(Object.assign(new Error('closed during the TLS handshake'), { code: 'ECONNRESET' }))
    })
  }
}

/** The name without the dot that a URL may have at its end (RFC 6066, section 3), and none for an address. */
const serverName = (hostname: string) => (isIP(hostname) === 0 ? hostname.replace(/\.$/, '') : '')
