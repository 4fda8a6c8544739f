/** What a request may wait for the database in all. Clients are promised an answer in 5 s, whatever the database does. */
const DEADLINE_MS = 4000

/**
 * For one request: a function that runs a step of it and rejects when all steps together have taken too long. A step that is
 * late may still succeed afterwards, unseen. How long the client takes to send its body counts in no step.
 */
export function startDeadline(): <T>(step: () => Promise<T>) => Promise<T> {
  let leftMs = DEADLINE_MS
  return async (step) => {
    const began = performance.now()
    let timer: NodeJS.Timeout | undefined
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new Error('the database has not answered in time')), Math.max(0, leftMs))
    })
    try {
      return await Promise.race([step(), late])
    } finally {
      clearTimeout(timer)
      leftMs -= performance.now() - began
    }
  }
}
