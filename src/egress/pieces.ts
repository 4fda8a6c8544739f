import type { Socket } from 'node:net'

/**
 * How much undici gets at once. It makes an error of each header, or trailer, beyond its limit that comes in the same piece: 64 KiB of
 * them take 0.2 s.
 */
const PIECE_BYTES = 1024

/** A 1xx, up to the last digit. */
const ANNOUNCEMENT = /^HTTP\/1\.[01] 1\d\d\b/
const LAST_DIGIT = 11
const HEAD_END = '\r\n\r\n'

/**
 * Lets undici read from a socket in pieces, and no more once that is destroyed: Node would go on with what it has. Some receivers send
 * `100 Continue` unasked before their answer, as any 1xx may come (RFC 9110, 15.2). undici fails at this one alone, and gets it as a
 * 102. `inBody` tells whether the head of the answer itself has been read.
 */
export function readInPieces(socket: Socket, inBody: () => boolean): void {
  const { read } = socket
  socket.read = (size = socket.readableLength > PIECE_BYTES ? PIECE_BYTES : undefined) => {
    if (socket.destroyed) return null
    const piece: Buffer | null = read.call(socket, size)
    if (piece && !inBody()) renameContinues(piece)
    return piece
  }
}

/** Of the heads with which a piece begins, up to the answer's; not behind one that begins or ends in another piece. */
function renameContinues(piece: Buffer): void {
  let at = 0
  while (ANNOUNCEMENT.test(piece.toString('latin1', at, at + LAST_DIGIT + 2))) {
    if (piece.toString('latin1', at + LAST_DIGIT - 1, at + LAST_DIGIT + 1) === '00') piece.write('2', at + LAST_DIGIT)
    const end = piece.indexOf(HEAD_END, at)
    if (end === -1) return
    at = end + HEAD_END.length
  }
}
