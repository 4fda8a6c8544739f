/** A test's context, or `{ after }` of node:test for what lives as long as the file. */
export type Scope = {
  after: (callback: () => Promise<void>) => void
  passed?: boolean
  diagnostic?: (message: string) => void
}

const opened = new WeakMap<Scope, (() => Promise<unknown> | unknown)[]>()

/**
 * Registers what undoes something that was just set up. node:test calls its `after` hooks in the order of their
 * registration; this goes backwards, so that a service ends before the database it uses is dropped.
 */
export function cleanUp(scope: Scope, close: () => Promise<unknown> | unknown): void {
  const known = opened.get(scope)
  if (known) {
    known.push(close)
    return
  }
  const closers = [close]
  opened.set(scope, closers)
  scope.after(async () => {
    const errors: unknown[] = []
    for (let last = closers.pop(); last !== undefined; last = closers.pop()) {
      try {
        await last()
      } catch (error) {
        errors.push(error)
      }
    }
    if (errors.length > 0) throw new AggregateError(errors, 'cleaning up failed')
  })
}
