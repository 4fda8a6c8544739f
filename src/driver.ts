import { registerHooks } from 'node:module'

/**
 * The driver, mended. Its source is corrected while it is loaded; a version whose source is another fails the start, and
 * tests that take the database away would fail without this.
 *
 * postgres 3.4.9 writes small messages a turn later and does not look whether the connection is still there: losing the
 * database at that moment throws where nobody can catch it, and ends the process; and what was to be written stays in
 * the connection's buffer, so that it never connects again. Both are known and open (porsager/postgres issues 1154 and 1208).
 *
 * And it waits for ever where the database takes a query and never answers, as behind a broken network or in a stopped
 * process. A new option, `answer_timeout`, ends the connection when a query, from its turn on, is not answered in so many
 * seconds; those behind it fail with it, and the pool's idle connections, which are not likely to lead further, go too.
 */
const CORRECTIONS: Record<string, [wrong: string, right: string][]> = {
  'connection.js': [
    [
      'const x = socket.write(chunk, fn)',
      'if (socket === null) { chunk = nextWriteTimer = null; return false }\n    const x = socket.write(chunk, fn)',
    ],
    [
      'clearImmediate(nextWriteTimer)\n    socket.removeListener',
      'clearImmediate(nextWriteTimer)\n    chunk = nextWriteTimer = null\n    answerTimer.cancel()\n    socket.removeListener',
    ],
    [
      'connectTimer = timer(connectTimedOut, options.connect_timeout)',
      `connectTimer = timer(connectTimedOut, options.connect_timeout)
      , answerTimer = timer(() => {
        while (queues.open.length) queues.open.shift().destroy()
        connection.destroy()
      }, options.answer_timeout)`,
    ],
    ['    terminate,\n', '    terminate,\n    destroy() { socket && socket.destroy() },\n'],
    [': (query = q, query.active = true)', ': (query = q, query.active = true, answerTimer.start())'],
    [
      'if (query)\n      return // Consider',
      'if (query)\n      return answerTimer.start()\n    answerTimer.cancel() // Consider',
    ],
  ],
  'index.js': [['socket          : o.socket,', 'socket          : o.socket,\n    answer_timeout  : o.answer_timeout,']],
}

const hooks = registerHooks({
  load(url, context, nextLoad) {
    const loaded = nextLoad(url, context)
    const [, file] = /\/postgres\/src\/(\w+\.js)$/.exec(url) ?? []
    if (file === undefined) return loaded
    let source = String(loaded.source)
    for (const [wrong, right] of CORRECTIONS[file] ?? []) {
      if (!source.includes(wrong)) throw new Error('this version of the driver is not the one that is corrected here')
      source = source.replace(wrong, right)
    }
    return { ...loaded, source }
  },
})

export const { default: postgres } = await import('postgres')
hooks.deregister()
