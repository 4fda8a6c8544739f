import { registerHooks } from 'node:module'

/**
 * The driver, mended. postgres 3.4.9 writes small messages a turn later and does not look whether the connection is still
 * there: losing the database at that moment throws where nobody can catch it, and ends the process; and what was to be
 * written stays in the connection's buffer, so that it never connects again. Both are known and open (porsager/postgres
 * issues 1154 and 1208). Its source is corrected while it is loaded; a version whose source is another fails the start,
 * and a test that cuts the connection would fail without this.
 */
const CORRECTIONS = [
  [
    'const x = socket.write(chunk, fn)',
    'if (socket === null) { chunk = nextWriteTimer = null; return false }\n    const x = socket.write(chunk, fn)',
  ],
  [
    'clearImmediate(nextWriteTimer)\n    socket.removeListener',
    'clearImmediate(nextWriteTimer)\n    chunk = nextWriteTimer = null\n    socket.removeListener',
  ],
] as const

const hooks = registerHooks({
  load(url, context, nextLoad) {
    const loaded = nextLoad(url, context)
    if (!url.endsWith('/postgres/src/connection.js')) return loaded
    let source = String(loaded.source)
    for (const [wrong, right] of CORRECTIONS) {
      if (!source.includes(wrong)) throw new Error('this version of the driver is not the one that is corrected here')
      source = source.replace(wrong, right)
    }
    return { ...loaded, source }
  },
})

export const { default: postgres } = await import('postgres')
hooks.deregister()
