import { setTimeout as sleep } from 'node:timers/promises'
import { Client, type ClientConfig, DatabaseError, Pool, type QueryResult } from 'pg'
import type { Log } from '../log.ts'

// Lends connections to the database, and tells those that still lead there from those that do not.

export type Question = { text: string; name?: string; values?: unknown[] }
// biome-ignore lint/suspicious/noExplicitAny: what a statement returns is known where it is written
export type Answer = QueryResult<Record<string, any>>
export type Ask = (question: Question) => Promise<Answer>

/** For the database's own word that a statement took too long to arrive. */
const GRACE_MS = 500
/** Of SQLSTATE: those with which a connection ends. Their severity would say so, but in the server's language. */
const ENDS = /^(08|57P|25P03)/

/**
 * A pool of at most `max` connections, each opened when it is needed. One is closed after `idleMs` without use and `lifetimeSeconds` in
 * all (0: never). Who needs one waits for `connectionTimeoutMillis` at most. A question that is not answered within `patienceMs`
 * (0: whenever) ends its connection.
 */
export function createPool(
  config: ClientConfig,
  options: { max: number; patienceMs: number; idleMs: number; lifetimeSeconds: number; log: Log },
) {
  const { max, patienceMs, log } = options
  const pool = new Pool({
    ...config,
    max,
    idleTimeoutMillis: options.idleMs,
    maxLifetimeSeconds: options.lifetimeSeconds,
  })
  const connections = new Set<Client>()
  const idle = new Set<Client>()
  let closed: Promise<unknown> | undefined

  function watch(client: Client): void {
    connections.add(client)
    client.on('end', () => connections.delete(client) && idle.delete(client))
    // What was asked of it fails, too.
    client.on('error', () => {})
    client.on('notice', ({ code, message }) =>
      log[code?.startsWith('01') ? 'warn' : 'debug']({ notice: message }, 'database.notice'),
    )
  }

  pool.on('connect', watch)
  pool.on('acquire', (client) => idle.delete(client))
  pool.on('release', (isLost, client) => isLost || idle.add(client))
  // It has left the pool already.
  pool.on('error', () => {})

  const answer = (client: Client, question: Question) =>
    new Promise<Answer>((resolve, reject) => {
      const late = patienceMs && setTimeout(() => giveUp(client), patienceMs + GRACE_MS)
      void client.query(question, (error: Error | undefined, answer: Answer) => {
        clearTimeout(late)
        if (error) reject(error)
        else resolve(answer)
      })
    })

  /** A connection that does not answer leads nowhere, and most likely neither do those that nobody uses. */
  function giveUp(client: Client): void {
    for (const lost of [client, ...idle]) lost.connection.stream.destroy(new Error('the database does not answer'))
  }

  return {
    /** Lends `work` a connection. One that cannot be relied on any more does not come back. */
    async lend<Result>(work: (ask: Ask) => Promise<Result>): Promise<Result> {
      const client = await pool.connect()
      let isLost = false
      try {
        return await work(async (question) => {
          try {
            return await answer(client, question)
          } catch (error) {
            isLost ||= !(error instanceof DatabaseError) || ENDS.test(error.code ?? '') || isOutdated(error)
            // It was made where the answer was read: this is where it was asked.
            Error.captureStackTrace(error as Error)
            throw error
          }
        })
      } finally {
        client.release(isLost)
      }
    },
    /** Opens a connection for good. */
    async open(): Promise<Client> {
      const client = new Client({ ...config, query_timeout: patienceMs })
      watch(client)
      await client.connect()
      return client
    },
    /** Closes all connections: those in use as soon as they are free, but after `timeoutMs` at the latest. */
    async end(timeoutMs: number): Promise<void> {
      closed ??= pool.end()
      await Promise.race([closed, sleep(timeoutMs, undefined, { ref: false })])
      for (const client of connections) client.connection.stream.destroy()
    },
  }
}

/** Whether a connection has prepared a statement for what has another shape now: it refuses it before it does anything. */
export const isOutdated = (error: unknown) =>
  error instanceof DatabaseError && ['RevalidateCachedQuery', 'FetchPreparedStatement'].includes(error.routine ?? '')
