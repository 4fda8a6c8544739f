import type { Scope } from '../../test/support/cleanup.ts'

/** A scope outside of a test: what is registered in it is undone by `close`, which does not throw. */
export function createScope(): { scope: Scope; close: () => Promise<void> } {
  const callbacks: (() => Promise<void>)[] = []
  return {
    scope: { after: (callback) => void callbacks.push(callback) },
    async close() {
      for (const callback of callbacks.splice(0).reverse()) {
        await callback().catch((error: unknown) => process.stderr.write(`chaos: while cleaning up: ${error}\n`))
      }
    },
  }
}
