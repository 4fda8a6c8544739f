import { request as askPlainly } from 'node:http'
import { request as askWithTls } from 'node:https'
import { connect as connectTcp, isIP, type Socket } from 'node:net'
import type { buildConnector } from 'undici'
import { inTurn } from '../in-turn.ts'
import { type AddressRange, isBlockedAddress } from './address.ts'
import { isLocalhostName } from './destination.ts'
import { ConnectError, classify, classifyTls, connectError, failure, LocalFault } from './failure.ts'
import type { NameResolver } from './resolve.ts'
import type { StartTls, Target } from './tls.ts'

/**
 * How long one address is tried before the next (the last has no limit of its own); Node tries them one after the other. Long
 * enough for a slow line and one lost packet; less if the attempt would otherwise be over before the last one's turn.
 */
const NEXT_ADDRESS_AFTER_MS = 2000
/** How long a connection to the egress proxy may take, with TLS if it is `https:`; at most a third of an attempt's time. */
const PROXY_THERE_MS = 5000
/**
 * From then on an unused connection is probed, by the system: one whose receiver is gone without a word would otherwise be found out
 * only by the next request, when its time is up.
 */
const PROBE_AFTER_MS = 10_000
/** All addresses of a name are checked; no more than these are tried, of both families if it has both. */
const MAX_ADDRESSES_TRIED = 8

/** Opens a TCP connection to a receiver, or rejects with what `connectError` takes. The signal ends it, opened or not. */
export type OpenTcp = (target: Target, signal: AbortSignal) => Promise<Socket>

/**
 * Connects straight to the receiver. Every address of its name is judged, at every connect; one blocked address
 * refuses the name, and the socket goes to an address that was judged: a name server that answers differently a
 * moment later gains nothing. `timeoutMs` is the whole attempt's.
 */
export function openDirectly(resolver: NameResolver, allow: readonly AddressRange[], timeoutMs: number): OpenTcp {
  const judge = (addresses: string[]) => {
    if (addresses.length === 0 || addresses.some((address) => isBlockedAddress(address, allow))) return null
    // The two families alternately: this host may have a way to one of them only.
    return inTurn(addresses, isIP).slice(0, MAX_ADDRESSES_TRIED)
  }
  return async ({ hostname, port }, signal) => {
    const tried = judge(await findAddresses(hostname, resolver, allow))
    if (tried === null) throw new ConnectError(failure('blocked_destination'))
    signal.throwIfAborted()
    const socket = await dial(tried, port, timeoutMs, signal)
    // Whatever was judged above, this is the address the bytes would go to, as the kernel has it; none if the receiver has left already.
    const { remoteAddress } = socket
    if (remoteAddress === undefined || isBlockedAddress(remoteAddress, allow)) {
      socket.destroy()
      throw new ConnectError(failure(remoteAddress === undefined ? 'connection_reset' : 'blocked_destination'))
    }
    return socket
  }
}

/**
 * Connects through an HTTP CONNECT proxy, which resolves the name and filters its addresses itself. If it cannot be reached, or wants
 * other credentials, no receiver is to blame: a `LocalFault`. If it drops the connection without an answer, as when it restarts, it is
 * asked once more, since nothing has reached the receiver. `timeoutMs` is the whole attempt's.
 */
export function openThroughProxy(proxyUrl: string, timeoutMs: number): OpenTcp {
  const { protocol, hostname: host, port: proxyPort, username, password } = new URL(proxyUrl)
  const ask = protocol === 'https:' ? askWithTls : askPlainly
  // An IPv6 address goes without its brackets. The certificate must be for the proxy’s name; Node would go by the Host header.
  const address = host.replace(/^\[|\]$/g, '')
  const proxy = { host: address, port: proxyPort, servername: isIP(address) ? '' : address }
  const credentials = Buffer.from(`${decodeURIComponent(username)}:${decodeURIComponent(password)}`).toString('base64')
  const headers = username + password === '' ? {} : { 'proxy-authorization': `Basic ${credentials}` }
  const open = ({ hostname, port }: Target, signal: AbortSignal, mayAskAgain: boolean): Promise<Socket> =>
    new Promise((resolve, reject) => {
      const path = `${isIP(hostname) === 6 ? `[${hostname}]` : hostname}:${port}`
      let isThere = false
      const asking = ask({
        ...proxy,
        method: 'CONNECT',
        path,
        headers: { ...headers, host: path },
        agent: false,
        signal,
      })
      const silence = setTimeout(
        () => asking.destroy(new Error('it does not answer')),
        Math.min(PROXY_THERE_MS, timeoutMs / 3),
      )
      asking
        .on('socket', (socket) =>
          socket.once(protocol === 'https:' ? 'secureConnect' : 'connect', () => {
            isThere = true
            clearTimeout(silence)
          }),
        )
        .on('close', () => clearTimeout(silence))
        .on('error', (error) => {
          const isDropped = isThere && (error as NodeJS.ErrnoException).code === 'ECONNRESET'
          if (isDropped && mayAskAgain && !signal.aborted) resolve(open({ hostname, port }, signal, false))
          else if (isThere || signal.aborted) reject(connectError(error, () => failure('proxy_error')))
          else reject(new LocalFault(`the egress proxy cannot be reached: ${error.message}`))
        })
        .on('connect', ({ statusCode = 0, headers: answer }, tunnel: Socket, head) => {
          // Never removed: an error before undici adds its own listener would end the process.
          tunnel.on('error', () => {})
          if (statusCode >= 200 && statusCode < 300) {
            signal.addEventListener('abort', () => tunnel.destroy(), { once: true })
            tunnel.setNoDelay(true).setKeepAlive(true, PROBE_AFTER_MS)
            if (head.length > 0) tunnel.unshift(head)
            resolve(tunnel)
            return
          }
          tunnel.destroy()
          if (statusCode === 407 && answer['proxy-authenticate'] !== undefined) {
            reject(new LocalFault('the egress proxy refuses the credentials in EGRESS_PROXY_URL'))
            return
          }
          // 403 is the common answer to a forbidden destination; 407 that of smokescreen.
          const isRefusal = statusCode === 403 || statusCode === 407
          reject(new ConnectError(failure(isRefusal ? 'blocked_destination' : 'proxy_error')))
        })
        .end()
    })
  return (target, signal) => open(target, signal, true)
}

/**
 * The connector of one undici client: TCP by `openTcp`, then TLS where the URL asks for it. `onOpened` gets the TCP socket, whose
 * `bytesRead` counts all that came in, encrypted or not, and a function that ends the connection with an error at any later
 * stage. `onConnected` gets the socket that undici gets.
 */
export function createConnector(
  openTcp: OpenTcp,
  startTls: StartTls,
  signal: AbortSignal,
  on: { onOpened: (tcp: Socket, end: (error: Error) => void) => void; onConnected: (socket: Socket) => void },
): buildConnector.connector {
  return (options, callback) => {
    const secure = options.protocol === 'https:'
    const port = options.port === '' ? (secure ? 443 : 80) : Number(options.port)
    const target = { hostname: options.hostname, port }
    openTcp(target, signal).then(
      (tcp) => {
        let socket = tcp
        on.onOpened(tcp, (error) => socket.destroy(error))
        if (!secure) {
          on.onConnected(tcp)
          callback(null, tcp)
          return
        }
        startTls(tcp, target, (error, tls) => {
          if (tls === null) {
            tcp.destroy()
            callback(connectError(error, classifyTls), null)
            return
          }
          socket = tls
          on.onConnected(tls)
          callback(null, tls)
        })
      },
      (error) => callback(connectError(error, classify), null),
    )
  }
}

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

function dial(addresses: string[], port: number, timeoutMs: number, signal: AbortSignal): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const socket = connectTcp({
      host: 'judged',
      port,
      signal,
      noDelay: true,
      keepAlive: true,
      keepAliveInitialDelay: PROBE_AFTER_MS,
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
