import { isIPv4 } from 'node:net'

/** Why an attempt can fail, in words. `http_status` and `redirect`: a whole answer came, and it was not a 2xx. */
const MESSAGES = {
  dns_error: 'the host name could not be resolved',
  connection_refused: 'the receiver refused the connection',
  connection_reset: 'the connection was closed before the response was complete',
  network_unreachable: 'the receiver could not be reached',
  tls_error: 'the TLS handshake failed',
  timeout: 'the receiver did not answer in time',
  blocked_destination: 'the destination is blocked for SSRF protection',
  proxy_error: 'the egress proxy could not reach the receiver',
  response_too_large: 'the response is too large, even without its body',
  protocol_error: 'the response is not valid HTTP/1.1',
  http_status: 'the receiver answered with a status other than 2xx',
  redirect: 'the receiver answered with a redirect; redirects are not followed',
}

export type AttemptError = keyof typeof MESSAGES

export type Failure = {
  readonly error: AttemptError
  /** One sentence for the endpoint's owner: no address, no port, no stack. */
  readonly errorMessage: string
}

/** A failure found by ourselves, while the connection was being made or by how much it brought in. */
export class ConnectError extends Error {
  readonly failure: Failure
  constructor(failure: Failure) {
    super(failure.errorMessage)
    this.name = 'ConnectError'
    this.failure = failure
  }
}

/**
 * This process lacks what a connection takes (files, memory, a name server, the egress proxy): nothing was sent, and no receiver is to blame, so
 * this is no outcome of an attempt.
 */
export class LocalFault extends Error {}

const LOCAL_CODES = new Set(['EMFILE', 'ENFILE', 'ENOBUFS', 'ENOMEM'])

/**
 * Whether `error` says that this process lacks files, memory or local ports. For an IPv6 receiver, having no local address may
 * just mean that this host has no IPv6.
 */
export function isLocal(error: unknown): boolean {
  if (error instanceof AggregateError) return error.errors.some(isLocal)
  const { code = '', address = '' } = error as NodeJS.ErrnoException & { address?: string }
  return LOCAL_CODES.has(code) || (code === 'EADDRNOTAVAIL' && isIPv4(address))
}

/** A failed connection, as what it is: the receiver's doing, or this process's own. */
export function connectError(error: unknown, judge: (error: unknown) => Failure): ConnectError | LocalFault {
  if (error instanceof ConnectError || error instanceof LocalFault) return error
  return isLocal(error) ? new LocalFault((error as Error).message) : new ConnectError(judge(error))
}

const CONNECTION_CODES: Record<string, AttemptError> = {
  ECONNREFUSED: 'connection_refused',
  ECONNRESET: 'connection_reset',
  ECONNABORTED: 'connection_reset',
  EPIPE: 'connection_reset',
  UND_ERR_SOCKET: 'connection_reset',
  ENETUNREACH: 'network_unreachable',
  EHOSTUNREACH: 'network_unreachable',
  EHOSTDOWN: 'network_unreachable',
  ENETDOWN: 'network_unreachable',
  EADDRNOTAVAIL: 'network_unreachable',
  EACCES: 'network_unreachable',
  EPERM: 'network_unreachable',
  EINVAL: 'network_unreachable',
  ETIMEDOUT: 'timeout',
  UND_ERR_HEADERS_OVERFLOW: 'response_too_large',
}

/**
 * undici rejects a 100 or 101 that was not asked for, and any answer that comes before the request, with the code of a broken socket;
 * only the message tells them apart.
 */
const INTERIM_MESSAGES: Record<string, string> = {
  'bad response': 'the receiver sent 100 Continue, which was not asked for, or an answer before the request',
  'bad upgrade': 'the receiver switched to another protocol, which was not asked for',
}

/** What Node and OpenSSL call the commonest faults of TLS, in words; most others are known to the receiver's own log only. */
const TLS_MESSAGES: Record<string, string> = {
  CERT_HAS_EXPIRED: 'the TLS certificate has expired',
  CERT_NOT_YET_VALID: 'the TLS certificate is not valid yet',
  DEPTH_ZERO_SELF_SIGNED_CERT: 'the TLS certificate is self-signed',
  SELF_SIGNED_CERT_IN_CHAIN: 'the TLS certificate chain ends in an unknown authority',
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: 'the TLS certificate chain ends in an unknown authority',
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: 'the TLS certificate chain is incomplete',
  ERR_TLS_CERT_ALTNAME_INVALID: 'the TLS certificate is not for this host name',
  ERR_SSL_WRONG_VERSION_NUMBER: 'the receiver does not speak TLS on this port',
  ERR_SSL_TLSV1_ALERT_PROTOCOL_VERSION: 'the receiver speaks neither TLS 1.2 nor 1.3',
  ERR_SSL_UNSUPPORTED_PROTOCOL: 'the receiver speaks neither TLS 1.2 nor 1.3',
  ERR_SSL_TLSV1_ALERT_NO_APPLICATION_PROTOCOL: 'the receiver does not speak HTTP/1.1 over TLS',
  ERR_SSL_TLSV1_UNRECOGNIZED_NAME: 'the receiver has no TLS certificate for this host name',
  ERR_SSL_TLSV13_ALERT_CERTIFICATE_REQUIRED: 'the receiver wants a TLS certificate of its client',
  'ERR_SSL_SSL/TLS_ALERT_HANDSHAKE_FAILURE': 'the receiver refused the TLS handshake',
}

/** All of them, for the API's description. */
export const ATTEMPT_ERRORS = Object.keys(MESSAGES)

/** A failure of this class, in its usual words. */
export function failure(error: AttemptError): Failure {
  return { error, errorMessage: MESSAGES[error] }
}

/**
 * Puts what Node or undici threw into a class of ours. Of a length that does not fit, undici complains both when a body ends early,
 * after `Connection: close`, and when it could not read the headers after the length: `inBody` tells them apart.
 */
export function classify(error: unknown, inBody = false): Failure {
  if (error instanceof ConnectError) return error.failure
  const { name, message = '' } = error as Error
  // An aborted signal's own error has a number.
  const code = String((error as { code?: unknown }).code ?? '')
  if (code.startsWith('ERR_SSL_') || code === 'EPROTO') return tlsError(error, 'the TLS connection broke')
  const interim = code === 'UND_ERR_SOCKET' && INTERIM_MESSAGES[message]
  if (interim) return { error: 'protocol_error', errorMessage: interim }
  // The parser's own words, none of which are the receiver's.
  const [said = ''] = (name === 'HTTPParserError' && / \(.+\)$/.exec(message)) || []
  const isCutOff = said === ' (Invalid EOF state)' || (inBody && code === 'UND_ERR_RES_CONTENT_LENGTH_MISMATCH')
  if (isCutOff) return failure('connection_reset')
  const known = CONNECTION_CODES[code]
  return known ? failure(known) : { error: 'protocol_error', errorMessage: MESSAGES.protocol_error + said }
}

/** Puts a failed TLS handshake into words. If the receiver hung up, no certificate is at fault. */
export function classifyTls(error: unknown): Failure {
  const reached = CONNECTION_CODES[(error as { code?: string }).code ?? '']
  if (reached === 'connection_reset') {
    return { error: reached, errorMessage: 'the connection was closed during the TLS handshake' }
  }
  return reached ? failure(reached) : tlsError(error)
}

function tlsError(error: unknown, otherwise = MESSAGES.tls_error): Failure {
  const { code = '', message } = error as NodeJS.ErrnoException
  // A key or a signature that is too weak has no code of its own.
  const isWeak = code === 'UNSPECIFIED' && message.endsWith('too weak')
  const said = isWeak ? 'the TLS certificates have a key or a signature that is too weak' : TLS_MESSAGES[code]
  return { error: 'tls_error', errorMessage: said ?? otherwise }
}
