import { Line } from '../line.ts'

/** What a request may wait for the database in all. Clients are promised an answer in 5 s, whatever the database does. */
const DEADLINE_MS = 4000
/** How often it is looked at. A timer for each step of a request costs as much as routing it. */
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
 * For one request: a function that runs a step of it and rejects when all steps together have taken too long. A step that is
 * late may still succeed afterwards, unseen. How long the client takes to send its body counts in no step.
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
