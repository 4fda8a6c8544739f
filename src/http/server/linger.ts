import type { IncomingMessage } from 'node:http'
import type { Socket } from 'node:net'

/**
 * Node closes a connection right behind its last answer. If the request is still arriving then, the connection is reset, and a client
 * that reads only once all is sent (nginx, asking as HTTP/1.0) never sees the answer. So this closes our side, and the rest when the
 * request has arrived or its time is up. `last`: the request that came last.
 */
export function lingerForRequest(socket: Socket, last: () => IncomingMessage | undefined): void {
  const { destroySoon } = socket
  socket.destroySoon = () => {
    const request = last()
    if (request === undefined || request.complete) return destroySoon.call(socket)
    socket.end()
    request.once('end', () => socket.destroy()).once('close', () => socket.destroy())
  }
}
