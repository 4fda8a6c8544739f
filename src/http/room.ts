import { AppError } from '../errors.ts'

/** What the bodies of the requests under way may come to. As text, parsed and on its way to the database, one takes some five times its size. */
const BODY_BYTES = 32 * 1024 * 1024
/** A short wait costs a client less than an error, so this many wait for as long as this; more would wait in vain. */
const MAX_WAITING = 1000
const MAX_WAIT_MS = 1000

export type Room = {
  /**
   * Runs `work` once there is room for its `bytes`, first come, first served; what waits is not read from its socket, so
   * that its sender has to wait as well. Throws `service overloaded` when too many wait already, or it has waited for a second.
   */
  hold<Result>(bytes: number, work: () => Promise<Result>): Promise<Result>
}

/** Bounds the memory that requests take, however many arrive at once and however large they are. */
export function createRoom(): Room {
  let taken = 0
  const waiting: { bytes: number; enter: () => void }[] = []

  /** A body larger than all of it goes in alone. */
  const hasRoom = (bytes: number) => taken === 0 || taken + bytes <= BODY_BYTES

  /** Lets in whoever is first, as long as there is room. */
  function admit(): void {
    for (let next = waiting[0]; next !== undefined && hasRoom(next.bytes); next = waiting[0]) {
      taken += next.bytes
      waiting.shift()
      next.enter()
    }
  }

  function waitFor(bytes: number): Promise<void> {
    if (waiting.length >= MAX_WAITING) throw new AppError('overloaded')
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        waiting.splice(waiting.indexOf(entry), 1)
        reject(new AppError('overloaded'))
      }, MAX_WAIT_MS)
      const enter = () => {
        clearTimeout(timer)
        resolve()
      }
      const entry = { bytes, enter }
      waiting.push(entry)
    })
  }

  return {
    async hold(bytes, work) {
      if (waiting.length === 0 && hasRoom(bytes)) taken += bytes
      else await waitFor(bytes)
      try {
        return await work()
      } finally {
        taken -= bytes
        admit()
      }
    },
  }
}
