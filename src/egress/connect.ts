import { request as askPlainly } from 'node:http'
import { request as askWithTls } from 'node:https'
import { connect as connectTcp, isIP, type Socket } from 'node:net'
import { DEFAULT_CIPHERS } from 'node:tls'
import { buildConnector } from 'undici'
import { type AddressRange, isBlockedAddress } from './address.ts'
import { isLocalhostName } from './destination.ts'
import { ConnectError, classify, classifyTls, connectError, failure } from './failure.ts'
import type { NameResolver } from './resolve.ts'

/**
 * How long one address is tried before the next (the last has no limit of its own); Node tries them one after the other. Long
 * enough for a slow line and one lost packet; less if the attempt would otherwise be over before the last one's turn.
 */
const NEXT_ADDRESS_AFTER_MS = 2000
/** All addresses of a name are checked; no more than these are tried, of both families if it has both. */
const MAX_ADDRESSES_TRIED = 8

interface Target {
  hostname: string
  port: number
}

/** Opens a TCP connection to a receiver, or rejects with what `connectError` takes. The signal ends it, opened or not. */
export type OpenTcp = (target: Target, signal: AbortSignal) => Promise<Socket>

/**
 * Connects straight to the receiver. Every address of its name is judged, at every connect; one blocked address
 * refuses the name, and the socket goes to an address that was judged: a name server that answers differently a
 * moment later gains nothing. `timeoutMs` is the whole attempt's.
 */
export function openDirectly(resolver: NameResolver, allow: readonly AddressRange[], timeoutMs: number): OpenTcp {
  return async ({ hostname, port }, signal) => {
    const addresses = await findAddresses(hostname, resolver, allow)
    if (addresses.length === 0 || addresses.some((address) => isBlockedAddress(address, allow))) {
      throw new ConnectError(failure('blocked_destination'))
    }
    signal.throwIfAborted()
    const socket = await dial(inTurn(addresses).slice(0, MAX_ADDRESSES_TRIED), port, timeoutMs, signal)
    // Whatever was judged above, this is the address the bytes would go to, as the kernel has it; none if the receiver has left already.
    const { remoteAddress } = socket
    if (remoteAddress === undefined || isBlockedAddress(remoteAddress, allow)) {
      socket.destroy()
      throw new ConnectError(failure(remoteAddress === undefined ? 'connection_reset' : 'blocked_destination'))
    }
    return socket
  }
}

/** Connects through an HTTP CONNECT proxy, which resolves the name and filters its addresses itself. */
export function openThroughProxy(proxyUrl: string): OpenTcp {
  const { protocol, hostname: host, port: proxyPort, username, password } = new URL(proxyUrl)
  const ask = protocol === 'https:' ? askWithTls : askPlainly
  // An IPv6 address goes without its brackets. The name in the certificate is the proxy’s; Node would take it from the request.
  const address = host.replace(/^\[|\]$/g, '')
  const proxy = { host: address, port: proxyPort, servername: isIP(address) ? '' : address }
  const credentials = Buffer.from(`${decodeURIComponent(username)}:${decodeURIComponent(password)}`).toString('base64')
  const headers = username === '' ? {} : { 'proxy-authorization': `Basic ${credentials}` }
  return ({ hostname, port }, signal) =>
    new Promise((resolve, reject) => {
      const path = `${isIP(hostname) === 6 ? `[${hostname}]` : hostname}:${port}`
      ask({ ...proxy, method: 'CONNECT', path, headers: { ...headers, host: path }, agent: false, signal })
        .on('error', (error) => reject(connectError(error, () => failure('proxy_error'))))
        .on('connect', ({ statusCode = 0, headers: answer }, tunnel: Socket, head) => {
          // Never removed: an error before undici adds its own listener would end the process.
          tunnel.on('error', () => {})
          if (statusCode >= 200 && statusCode < 300) {
            signal.addEventListener('abort', () => tunnel.destroy(), { once: true })
            if (head.length > 0) tunnel.unshift(head)
            resolve(tunnel)
            return
          }
          tunnel.destroy()
          // 403 is the common answer to a forbidden destination; 407 that of smokescreen, if it does not ask for credentials.
          const isRefusal = statusCode === 403 || (statusCode === 407 && answer['proxy-authenticate'] === undefined)
          reject(new ConnectError(failure(isRefusal ? 'blocked_destination' : 'proxy_error')))
        })
        .end()
    })
}

/**
 * HTTP/1.1 only. One for all clients, so that a receiver's TLS sessions are resumed on later connections. Without DHE: its receiver
 * chooses the modulus, and one of 10,000 bits stops this process for a second.
 */
const startTls = buildConnector({
  allowH2: false,
  timeout: 0,
  rejectUnauthorized: true,
  ciphers: `${DEFAULT_CIPHERS}:!DHE`,
})

/**
 * The connector of one undici client: TCP by `openTcp`, then TLS where the URL asks for it. `onOpened` gets the TCP socket, whose
 * `bytesRead` are those that came, encrypted or not, and what ends the connection with an error, at any later stage; `onConnected`
 * the socket that undici gets.
 */
export function createConnector(
  openTcp: OpenTcp,
  signal: AbortSignal,
  on: { onOpened: (tcp: Socket, end: (error: Error) => void) => void; onConnected: (socket: Socket) => void },
): buildConnector.connector {
  return (options, callback) => {
    const secure = options.protocol === 'https:'
    const port = options.port === '' ? (secure ? 443 : 80) : Number(options.port)
    openTcp({ hostname: options.hostname, port }, signal).then(
      (tcp) => {
        let socket = tcp
        on.onOpened(tcp, (error) => socket.destroy(error))
        if (!secure) {
          on.onConnected(tcp)
          callback(null, tcp)
          return
        }
        startTls({ ...options, servername: serverName(options.hostname), httpSocket: tcp }, (error, tls) => {
          if (error) {
            const ended = tcp.errored instanceof ConnectError ? tcp.errored : error
            tcp.destroy()
            callback(connectError(ended, classifyTls), null)
            return
          }
          socket = tls as Socket
          // Else undici takes the end that follows an alert for the cause.
          socket.on('error', (alert) => socket.destroy(alert))
          on.onConnected(socket)
          callback(null, socket)
        })
      },
      (error) => callback(connectError(error, classify), null),
    )
  }
}

/** The name without the dot that a URL may have at its end (RFC 6066, section 3), and none for an address. */
const serverName = (hostname: string) => (isIP(hostname) === 0 ? hostname.replace(/\.$/, '') : '')

async function findAddresses(
  hostname: string,
  resolver: NameResolver,
  allow: readonly AddressRange[],
): Promise<string[]> {
  if (isIP(hostname) !== 0) return [hostname]
  const name = hostname.replace(/\.$/, '')
  // Those of the two loopback addresses that the operator exempts.
  if (isLocalhostName(name)) return ['127.0.0.1', '::1'].filter((address) => !isBlockedAddress(address, allow))
  return resolver.resolve(name).catch((error: unknown) => {
    throw connectError(error, () => failure('dns_error'))
  })
}

/** The two families alternately: this host may have a way to one of them only. */
function inTurn(addresses: string[]): string[] {
  const seen = { 4: 0, 6: 0 }
  const turns = addresses.map((address) => ({ address, turn: seen[isIP(address) as 4 | 6]++ }))
  return turns.sort((one, other) => one.turn - other.turn).map(({ address }) => address)
}

function dial(addresses: string[], port: number, timeoutMs: number, signal: AbortSignal): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const socket = connectTcp({
      host: 'judged',
      port,
      signal,
      noDelay: true,
      autoSelectFamily: true,
      autoSelectFamilyAttemptTimeout: Math.min(NEXT_ADDRESS_AFTER_MS, Math.ceil(timeoutMs / (addresses.length + 1))),
      lookup: (_host, _options, done) =>
        done(
          null,
          addresses.map((address) => ({ address, family: isIP(address) })),
        ),
    })
    socket.once('connect', () => resolve(socket))
    // Never removed: an error before undici adds its own listener would end the process.
    socket.on('error', reject)
  })
}
