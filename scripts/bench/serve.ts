/** What runs in a helper process (helper.ts): answers each task by its function. */
export function serve(tasks: Record<string, (argument: never) => unknown>): void {
  process.on('message', async ({ id, task, argument }: { id: number; task: string; argument: never }) => {
    try {
      process.send?.({ id, answer: await tasks[task]?.(argument) })
    } catch (error) {
      process.send?.({ id, error: String(error) })
    }
  })
  // The bench may be killed: nothing is left to do then.
  process.on('disconnect', () => process.exit())
}

/** Microseconds of the system's monotonic clock, which all processes share. */
export const nowMicros = (): number => Number(process.hrtime.bigint() / 1000n)
