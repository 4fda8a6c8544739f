import type { Socket } from 'node:net'

/** As Node itself says it of requests that leave HTTP: nothing more is read. */
const READ_NO_MORE = 2

/**
 * Destroys a connection, and has Node take no more of what it has brought. Otherwise Node would make requests of all that came in the
 * same piece, two thousand in 64 KiB, and for each an error once the connection is gone.
 */
export function cutOff(socket: Socket): void {
  const { parser } = socket as Socket & { parser?: { onIncoming: () => number } | null }
  if (parser) parser.onIncoming = () => READ_NO_MORE
  socket.destroy()
}
