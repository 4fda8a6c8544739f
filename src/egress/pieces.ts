import type { Socket } from 'node:net'

/**
 * How much undici gets at once. It makes an error of each header, or trailer, beyond its limit that comes in the same piece: 64 KiB of
 * them take 0.2 s.
 */
const PIECE_BYTES = 1024
/** For how long larger answers are read in one turn of the event loop: a hundred in awkward forms at once take half a second. */
const TURN_MS = 10

/**
 * Returns a function that lets undici read from a socket in pieces, and in turns of the event loop: when no more may be read in this
 * one, the socket seems to be empty, and says in a later one that it is not. `mayWait`: only while that holds.
 */
export function createPieces(): (socket: Socket, mayWait: () => boolean) => void {
  /** When the first piece of this turn was read. */
  let beganAt: number | null = null
  const waiting: (() => void)[] = []

  function hasTime(): boolean {
    const now = performance.now()
    if (beganAt === null) {
      beganAt = now
      setImmediate(endTurn)
    }
    return now - beganAt < TURN_MS
  }

  function endTurn(): void {
    beganAt = null
    while (waiting.length > 0 && hasTime()) waiting.shift()?.()
  }

  return (socket, mayWait) => {
    const { read } = socket
    let isWaiting = false
    const goOn = () => {
      isWaiting = false
      socket.emit('readable')
    }
    socket.read = (size?: number) => {
      // Node would go on with what it has.
      if (socket.destroyed) return null
      if (size !== undefined || socket.readableLength <= PIECE_BYTES) return read.call(socket, size)
      if (hasTime() || !mayWait()) return read.call(socket, PIECE_BYTES)
      if (!isWaiting) waiting.push(goOn)
      isWaiting = true
      return null
    }
  }
}
