import type { Scope } from '../../test/support/cleanup.ts'

type Closable = { scope: Scope; close: () => Promise<void> }

const open = new Set<Closable>()

/** A scope outside of a test: what is registered in it is undone by `close`, which does not throw. */
export function createScope(): Closable {
  const callbacks: (() => Promise<void>)[] = []
  const one: Closable = {
    scope: { after: (callback) => void callbacks.push(callback) },
    async close() {
      open.delete(one)
      for (const callback of callbacks.splice(0).reverse()) {
        await callback().catch((error: unknown) => process.stderr.write(`chaos: while cleaning up: ${error}\n`))
      }
    },
  }
  open.add(one)
  return one
}

/** Closes whatever is open, last first. */
export async function closeAll(): Promise<void> {
  for (const one of [...open].reverse()) await one.close()
}
