import { Line } from '../line.ts'

/** How long a request may wait for the database in all. Clients are promised an answer in 5 s, whatever the database does. */
const DEADLINE_MS = 4000
/** How often deadlines are checked: a timer for each step of a request would cost as much as routing it. */
const LOOK_MS = 100

type Step = { until: number; giveUp: () => void }

const steps = new Line<Step>()
let looking: NodeJS.Timeout | undefined

function look(): void {
  const now = performance.now()
  for (const step of [...steps]) if (now >= step.until) step.giveUp()
  if (steps.size > 0) return
  clearInterval(looking)
  looking = undefined
}

/**
 * Starts a request's time: returns a function that runs one step of it, and rejects when all steps together have taken too long.
 * A late step may still succeed, unseen. The time the client takes to send its body belongs to no step.
 */
export function startDeadline(): <T>(step: () => Promise<T>) => Promise<T> {
  let leftMs = DEADLINE_MS
  return (step) =>
    new Promise((resolve, reject) => {
      const began = performance.now()
      const running = step()
      const end = () => {
        steps.leave(place)
        leftMs -= performance.now() - began
      }
      const place = steps.join({
        until: began + leftMs,
        giveUp: () => {
          end()
          reject(new Error('the database has not answered in time'))
        },
      })
      looking ??= setInterval(look, LOOK_MS)
      running.then(
        (value) => {
          end()
          resolve(value)
        },
        (error) => {
          end()
          reject(error)
        },
      )
    })
}
