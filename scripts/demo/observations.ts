/** What was seen from outside: a line of the service's log, or a request that reached the receiver. */
export type Observation = { msg: string; [field: string]: unknown }

export type Observations = ReturnType<typeof createObservations>

/** Collects what is seen, hands each to `onSeen`, and lets the story wait for what must come next. */
export function createObservations(onSeen: (seen: Observation) => void) {
  const all: Observation[] = []
  const waiting = new Set<{ check: () => void; fail: (error: Error) => void }>()
  let failed: Error | undefined
  const failure = Promise.withResolvers<never>()
  failure.promise.catch(() => {})

  return {
    /** Rejects when nothing more will come. */
    failed: failure.promise,

    add(seen: Observation): void {
      all.push(seen)
      onSeen(seen)
      for (const waiter of waiting) waiter.check()
    },

    /** Nothing more will come: whoever waits, now or later, gets `error`. */
    fail(error: Error): void {
      failed ??= error
      failure.reject(error)
      for (const waiter of waiting) waiter.fail(error)
    },

    /** The first `count` observations that match, those of the past included; rejects when `seconds` go by without them. */
    async until(
      what: string,
      seconds: number,
      matches: (seen: Observation) => boolean,
      count = 1,
    ): Promise<Observation> {
      const find = () => all.filter(matches)[count - 1]
      return await new Promise<Observation>((resolve, reject) => {
        const end = (settle: () => void) => {
          clearTimeout(timer)
          waiting.delete(waiter)
          settle()
        }
        const waiter = {
          check: () => {
            const found = find()
            if (found) end(() => resolve(found))
          },
          fail: (error: Error) => end(() => reject(error)),
        }
        const timer = setTimeout(
          () => waiter.fail(new Error(`${what} did not happen within ${seconds} s`)),
          seconds * 1000,
        )
        waiting.add(waiter)
        if (failed) waiter.fail(failed)
        else waiter.check()
      })
    },
  }
}
