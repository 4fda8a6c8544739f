import { AppError } from '../errors.ts'
import { createRoom as createSharedRoom, type Room } from '../room.ts'

/** A short wait costs a client less than an error, so this many wait for as long as this; more would wait in vain. */
const LINE = { maxWaiting: 1000, maxWaitMs: 1000, refusal: () => new AppError('overloaded') }

/** Room for requests. A body that waits for it is not read from its socket, so that its sender has to wait as well. */
export const createRoom = (size: number): Room => createSharedRoom(size, LINE)
