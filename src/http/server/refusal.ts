import { STATUS_CODES } from 'node:http'
import type { Duplex } from 'node:stream'
import { AppError } from '../../errors.ts'
import { errorBody, requestIdOf, SECURITY_HEADERS } from '../answer.ts'

/** How long a client has to read the answer to something that was not a request. */
const LINGER_MS = 2000

/** The answer to something that never reached the application. `message` is null for 404. */
export function refusal(status: 400 | 404 | 408 | 431, message: string | null, requestId = requestIdOf(undefined)) {
  const error = message === null ? new AppError('not_found') : new AppError('invalid_request', [{ path: '', message }])
  const body = JSON.stringify(errorBody(error))
  const headers = {
    'content-type': 'application/json',
    'content-length': String(Buffer.byteLength(body)),
    connection: 'close',
  }
  return {
    response: () => new Response(body, { status, headers }),
    /** The answer to HEAD has no body (RFC 9110, 9.3.2). */
    end(socket: Duplex, method?: string) {
      const all = { ...SECURITY_HEADERS, 'x-request-id': requestId, ...headers }
      const head = Object.entries(all).map(([name, value]) => `${name}: ${value}\r\n`)
      socket.end(`HTTP/1.1 ${status} ${STATUS_CODES[status]}\r\n${head.join('')}\r\n${method === 'HEAD' ? '' : body}`)
      // Node no longer watches such a connection: a client that keeps its side open would keep ours open.
      setTimeout(() => socket.destroy(), LINGER_MS).unref()
    },
  }
}
