import { AppError } from '../errors.ts'
import { createRoom as createSharedRoom, type Room } from '../room.ts'

/** A short wait costs a client less than an error, so this many may wait, for up to this long; more would wait in vain. */
const MAX_WAITING = 1000
const MAX_WAIT_MS = 1000

/**
 * Room for requests; one that waits for `maxWaitMs` in vain is refused with `service overloaded`. While it waits, its body is not
 * read from the socket, so that the sender has to wait as well.
 */
export const createRoom = (size: number, maxWaitMs = MAX_WAIT_MS): Room =>
  createSharedRoom(size, { maxWaiting: MAX_WAITING, maxWaitMs, refusal: () => new AppError('overloaded') })
