import { registerHooks } from 'node:module'

/**
 * The Postgres driver, patched. Its source is corrected as it is loaded. A version with another source fails the start, and
 * without any one of the corrections a test fails.
 *
 * 1. postgres 3.4.9 writes small messages a turn later without looking whether the connection is still there. Losing the
 *    database at that moment throws where nobody can catch it and ends the process; and what was to be written stays in the
 *    connection's buffer, so that it never connects again. Both are known and open (porsager/postgres issues 1154 and 1208).
 * 2. It waits for ever if the database takes a query and never answers, as behind a broken network or in a stopped process. A
 *    new option, `answer_timeout`, ends the connection if a query is not answered in so many seconds from its turn on.
 *    Those sent behind it fail with it, and the pool's idle connections, which most likely lead nowhere either, are closed.
 * 3. Each query assigns two function literals to properties. V8 takes such functions for permanent and allocates them in the old
 *    space, where they keep the query, its input and its result alive until the next full collection: a fifth of a worker's
 *    time. Assigned by way of a variable, they are allocated like everything else.
 * 4. It uses a pool's connections in turn. Here the one used last is next, since its server process has warm caches.
 * 5. A `begin` that is the last statement to fit into a connection's line (or that fills its socket's buffer) does not reserve the
 *    connection: the transaction fails, and is left open there. Single statements that come later are answered within it, and lost.
 * 6. What has come of an answer that fails, or is cut off, is counted with the next answer on that connection, also a new one, which then
 *    begins with so many holes. And a connection that is lost in the middle of a query keeps it and its error: the next query fails
 *    with that, or, if the new connection is refused, is never settled.
 * 7. A prepared statement whose result has changed its type is sent again with its parameters serialized twice, and in such a way that
 *    others sent behind it get each other's answers. Here it goes back to its pool.
 * 8. A query that cannot be built, as one with a value that is undefined, rejects the one that is under way in its place.
 * 9. What is left of a transaction that has lost its connection runs on the next one, within whatever is there.
 * 10. A server that closes a connection before it says anything, as what stands before a database that is down, is asked again and again,
 *    without a pause or an end. And an unused connection that is closed over a dead network never comes back to its pool.
 * 11. After a loss, each channel is listened on again once; where that is refused, never.
 * 12. The failures of statements that are given as text are kept for ever.
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
    ['return write(toBuffer(q))', 'const isReady = write(toBuffer(q))'],
    [
      '&& (!q.options.onexecute || q.options.onexecute(connection))',
      '\n      return q.options.onexecute ? q.options.onexecute(connection) : isReady',
    ],
    [
      'query = results = errorResponse = null\n    result = new Result()\n    connectTimer',
      'query = results = errorResponse = null\n    result = new Result()\n    rows = 0\n    connectTimer',
    ],
    [
      'closedTime = performance.now()',
      `query = results = errorResponse = null
    result = new Result()
    rows = 0
    ended && ended()
    ending = ended = null
    closedTime = performance.now()`,
    ],
    ['q.retried = error\n    execute(q)', 'q.retried = error\n    q.parameters = null\n    q.handler(q)'],
    [
      `query.retried
          ? errored(query.retried)
          : query.prepared && retryRoutines.has(errorResponse.routine)
            ? retry(query, errorResponse)
            : errored(errorResponse)`,
      `query.prepared && retryRoutines.has(errorResponse.routine)
          ? retry(query, errorResponse)
          : errored(query.retried || errorResponse)`,
    ],
    [
      'sent.length === 0 && write(Sync)\n      errored(error)\n      return true',
      `if (query !== q) {
        sent.remove(q)
        queryError(q, error)
        return true
      }
      write(Sync)
      errored(error)
      return true`,
    ],
    [
      'if (initial)\n      return reconnect()\n\n    !hadError && (query || sent.length) && error(',
      '!hadError && (query || initial || sent.length) && error(',
    ],
    [
      "socket.readyState === 'open' && socket.end(b().X().end())",
      "socket.readyState === 'open' ? (socket.end(b().X().end()), socket.destroySoon()) : socket.destroy()",
    ],
    [': (query = q, query.active = true)', ': (query = q, query.active = true, answerTimer.start())'],
    [
      'if (query)\n      return // Consider',
      'if (query)\n      return answerTimer.start()\n    answerTimer.cancel() // Consider',
    ],
  ],
  'query.js': [
    [
      'this.resolve = x => (this.active = false, resolve(x))\n    this.reject = x => (this.active = false, reject(x))',
      `const resolved = x => (this.active = false, resolve(x))
    const rejected = x => (this.active = false, reject(x))
    this.resolve = resolved
    this.reject = rejected`,
    ],
    [': this.tagged && originStackCache.has', ": !this.tagged ? '' : originStackCache.has"],
  ],
  'index.js': [
    ['socket          : o.socket,', 'socket          : o.socket,\n    answer_timeout  : o.answer_timeout,'],
    ['return go(open.shift(), query)', 'return go(open.pop(), query)'],
    ['let savepoints = 0', 'let lost = null, savepoints = 0'],
    [
      'new Promise((_, reject) => connection.onclose = reject)',
      `new Promise((_, reject) => connection.onclose = error => {
          lost = error
          while (queries.length) queries.shift().reject(error)
          reject(error)
        })`,
    ],
    [
      'q.catch(e => uncaughtError || (uncaughtError = e))',
      'q.catch(e => uncaughtError || (uncaughtError = e))\n        if (lost) return q.reject(lost)',
    ],
    [
      `delete listen.channels[name]
          Promise.all(listeners.map(l => listen(name, l.fn, l.onlisten).catch(() => { /* noop */ })))`,
      `const channel = listen.channels[name]
          if (channel.again) return
          channel.again = true
          again()
          async function again() {
            if (listen.channels[name] !== channel || ending) return
            try {
              await listen.sql\`listen \${ sql.unsafe('"' + name.replace(/"/g, '""') + '"') }\`
            } catch {
              return setTimeout(again, 250)
            }
            channel.again = false
            channel.listeners.forEach(l => l.onlisten && l.onlisten())
          }`,
    ],
  ],
  'queue.js': [
    [
      '    shift: () => {',
      `    pop: () => {
      const out = xs.pop()
      if (index === xs.length) { index = 0; xs = [] }
      return out
    },
    shift: () => {`,
    ],
  ],
}

const uncorrected = new Set(Object.keys(CORRECTIONS))
const hooks = registerHooks({
  load(url, context, nextLoad) {
    const loaded = nextLoad(url, context)
    const [, file] = /\/postgres\/src\/(\w+\.js)$/.exec(url) ?? []
    if (file === undefined) return loaded
    let source = String(loaded.source)
    for (const [wrong, right] of CORRECTIONS[file] ?? []) {
      if (!source.includes(wrong)) throw new Error('this version of the driver is not the one that is corrected here')
      source = source.replace(wrong, () => right)
    }
    uncorrected.delete(file)
    return { ...loaded, source }
  },
})

export const { default: postgres } = await import('postgres')
hooks.deregister()
if (uncorrected.size > 0) throw new Error('the driver was loaded before it could be corrected')
