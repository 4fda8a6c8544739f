import { AppError } from '../errors.ts'
import { createRoom as createSharedRoom, type Room } from '../room.ts'

/** A short wait costs a client less than an error, so this many wait for as long as this; more would wait in vain. */
const MAX_WAITING = 1000
const MAX_WAIT_MS = 1000

/**
 * Room for requests; who waits in vain for `maxWaitMs` is refused as `service overloaded`. A body that waits for it is not read
 * from its socket, so that its sender has to wait as well.
 */
export const createRoom = (size: number, maxWaitMs = MAX_WAIT_MS): Room =>
  createSharedRoom(size, { maxWaiting: MAX_WAITING, maxWaitMs, refusal: () => new AppError('overloaded') })
