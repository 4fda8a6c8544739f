import type { Socket } from 'node:net'

/**
 * How much undici gets at once. It makes an error of each header, or trailer, beyond its limit that comes in the same piece: 64 KiB of
 * them take 0.2 s.
 */
const PIECE_BYTES = 1024

/** Up to the last digit of the status. */
const CONTINUE = /^HTTP\/1\.[01] 100\b/
const LAST_DIGIT = 11

/**
 * Lets undici read from a socket in pieces, and no more once that is destroyed: Node would go on with what it has. Some receivers send
 * `100 Continue` unasked before their answer, as any 1xx may come (RFC 9110, 15.2). undici fails at this one alone, and gets it as a 102.
 */
export function readInPieces(socket: Socket): void {
  const { read } = socket
  socket.read = (size = socket.readableLength > PIECE_BYTES ? PIECE_BYTES : undefined) => {
    if (socket.destroyed) return null
    const piece: Buffer | null = read.call(socket, size)
    if (piece && CONTINUE.test(piece.toString('latin1', 0, LAST_DIGIT + 2))) piece.write('2', LAST_DIGIT)
    return piece
  }
}
