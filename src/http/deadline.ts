import { awakeMs } from '../awake.ts'
import { createWatch } from '../watch.ts'

/** How long a request may wait for the database in all, by `awakeMs`. Clients are promised an answer in 5 s, whatever the database does. */
const DEADLINE_MS = 4000
const LOOK_MS = 100

const watch = createWatch(LOOK_MS)

/**
 * Starts a request's time: returns a function that runs one step of it, and rejects when all steps together have taken too long.
 * A late step may still succeed, unseen. The time the client takes to send its body belongs to no step.
 */
export function startDeadline(): <T>(step: () => Promise<T>) => Promise<T> {
  let leftMs = DEADLINE_MS
  return (step) =>
    new Promise((resolve, reject) => {
      const began = awakeMs()
      const until = began + leftMs
      const running = step()
      const leave = watch(() => {
        if (awakeMs() < until) return
        end()
        reject(new Error('the database has not answered in time'))
      })
      const end = () => {
        leave()
        leftMs -= awakeMs() - began
      }
      running.finally(end).then(resolve, reject)
    })
}
