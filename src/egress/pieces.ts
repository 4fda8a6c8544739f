import type { Socket } from 'node:net'

/**
 * How much undici gets at once. It makes an error of each header, or trailer, beyond its limit that comes in the same piece: 64 KiB of
 * them take 0.2 s.
 */
const PIECE_BYTES = 1024

/** Lets undici read from a socket in pieces, and no more once that is destroyed: Node would go on with what it has. */
export function readInPieces(socket: Socket): void {
  const { read } = socket
  socket.read = (size = socket.readableLength > PIECE_BYTES ? PIECE_BYTES : undefined) =>
    socket.destroyed ? null : read.call(socket, size)
}
