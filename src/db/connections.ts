import { setTimeout as sleep } from 'node:timers/promises'
import { LRUCache } from 'lru-cache'
import { Client, type ClientConfig, DatabaseError, Pool, type PoolClient, type QueryResult } from 'pg'
import type { Log } from '../log.ts'
import { setLate } from '../pacing.ts'
import { isFull } from './errors.ts'

// Lends connections to the database, and tells those that still lead there from those that do not.

type Question = { text: string; name?: string; values?: unknown[] }
// biome-ignore lint/suspicious/noExplicitAny: what a statement returns is known where it is written
export type AnyRow = Record<string, any>
type Answer = QueryResult<AnyRow>
export type Ask = (question: Question) => Promise<Answer>

/** How long the database's own word that a statement took too long may take to arrive. */
const GRACE_MS = 500
/**
 * SQLSTATEs after which a connection is given up. The severity would tell, but in the server's language. An error without a
 * SQLSTATE is no answer. A connection that is read-only (25006) stays so even when the database no longer is.
 */
const ENDS = /^($|08|57P|25P0[34]|25006)/
/** If one of these fails, as when it is cancelled, the connection may still be in its transaction. */
const ENDINGS = ['commit', 'rollback']
/** For how long a pool makes do with the connections that it has, once the database, or the role, has no more to give. */
const FULL_MS = 1000
/** Warnings that were told within the last hour: some come with each connection. */
const told = new LRUCache<string, true>({ max: 100, ttl: 3_600_000 })

/**
 * A pool of at most `max` connections, each opened when it is needed. One is closed after `idleMs` without use and `lifetimeSeconds` in
 * all (0: never). Whoever needs one waits for `patienceMs` at most, and a question that is not answered in about that time ends
 * its connection (0: never).
 */
export function createPool(
  config: ClientConfig,
  options: { max: number; patienceMs: number; idleMs: number; lifetimeSeconds: number; log: Log },
) {
  const { max, patienceMs, log } = options
  const connections = new Set<Client>()
  const idle = new Set<Client>()
  /** Those of the pool that are open. */
  const open = new Set<Client>()
  /** Those that lead to a standby. */
  const standbys = new Set<Client>()
  /** Each refuses one who is still waiting for a connection. */
  const waiting = new Set<(error: Error) => void>()
  let closed: Promise<unknown> | undefined

  /** Known from the start, so that one that is still being opened ends with the others. */
  class Watched extends Client {
    constructor(more?: ClientConfig) {
      super({ ...more, ...config })
      connections.add(this)
      this.on('end', () => {
        for (const clients of [connections, idle, open, standbys]) clients.delete(this)
      })
      // Nothing to do: what was asked of it fails as well.
      this.on('error', () => {})
      // A login that fails on this side would leave it open, and a process of the server waiting for a minute.
      this.connection.on('error', () => this.connection.stream.destroy())
      this.connection.on('parameterStatus', ({ parameterName, parameterValue }) => {
        if (parameterName === 'in_hot_standby') standbys[parameterValue === 'on' ? 'add' : 'delete'](this)
      })
      this.on('notice', ({ code, message: notice = '' }) => {
        const isNews = code?.startsWith('01') && !told.has(notice)
        if (isNews) told.set(notice, true)
        log[isNews ? 'warn' : 'debug']({ notice }, 'database.notice')
      })
    }
  }

  const pool = new Pool({
    Client: Watched,
    max,
    connectionTimeoutMillis: patienceMs,
    idleTimeoutMillis: options.idleMs,
    maxLifetimeSeconds: options.lifetimeSeconds,
  })

  pool.on('connect', (client) => open.add(client))
  pool.on('acquire', (client) => idle.delete(client))
  // One that has ended while it was lent has left already.
  pool.on('release', (isLost, client) => isLost || (connections.has(client) && idle.add(client)))
  // It has left the pool already.
  pool.on('error', () => {})

  const answer = (client: Client, question: Question) =>
    new Promise<Answer>((resolve, reject) => {
      let isAnswered = false
      const giveUpUnlessAnswered = () => {
        if (!isAnswered) giveUp(client)
      }
      const late = patienceMs && setLate(giveUpUnlessAnswered, patienceMs + GRACE_MS)
      void client.query(question, (error: Error | undefined, answer: Answer) => {
        isAnswered = true
        clearTimeout(late)
        if (error) reject(error)
        else resolve(answer)
      })
    })

  /** A connection that does not answer leads nowhere, and most likely neither do those that nobody uses. */
  function giveUp(client: Client): void {
    for (const lost of [client, ...idle]) lost.connection.stream.destroy(new Error('the database does not answer'))
  }

  /** Pg-pool says this as if the database could not be reached. */
  const isOverdue = (error: Error | undefined) =>
    error?.message.startsWith('timeout exceeded') && open.size >= pool.options.max

  /** Waits for a connection; whoever ends the pool ends the waiting, too. */
  const borrow = () =>
    new Promise<PoolClient>((resolve, reject) => {
      waiting.add(reject)
      pool.connect((error, client) => {
        const isWanted = waiting.delete(reject)
        if (client === undefined)
          reject(isOverdue(error) ? new Error(`all ${open.size} connections were in use for too long`) : error)
        else if (isWanted) resolve(client)
        else client.release(true)
      })
    })

  /** Where the database has no more connections, one that is in use will soon be free. */
  const borrowEven = () =>
    borrow().catch((error: unknown) => {
      if (!isFull(error) || open.size === 0) throw error
      pool.options.max = open.size
      setTimeout(() => {
        pool.options.max = max
      }, FULL_MS).unref()
      return borrow()
    })

  return {
    /** Lends `work` a connection. One that can no longer be relied on is not taken back. */
    async lend<Result>(work: (ask: Ask) => Promise<Result>): Promise<Result> {
      const client = await borrowEven()
      let isLost = false
      try {
        return await work(async (question) => {
          try {
            return await answer(client, question)
          } catch (error) {
            isLost ||= endsConnection(error) || isOutdated(error) || ENDINGS.includes(question.text)
            // Its stack shows where the answer was read; this shows where the question was asked.
            Error.captureStackTrace(error as Error)
            throw error
          }
        })
      } finally {
        // The address may lead to the primary by now; this would read what was true a while ago, and publish nothing.
        client.release(isLost || standbys.has(client))
      }
    },
    /** Opens a connection for its caller to keep. */
    async open(): Promise<Client> {
      const client = new Watched({ query_timeout: patienceMs })
      await client.connect()
      return client
    },
    /** Closes all connections: those in use when they are free, or after `timeoutMs`. Whoever waits for one is refused. */
    async end(timeoutMs: number): Promise<void> {
      closed ??= pool.end()
      for (const refuse of waiting) refuse(new Error('the pool is closed'))
      waiting.clear()
      await Promise.race([closed, sleep(timeoutMs, undefined, { ref: false })])
      for (const client of connections) client.connection.stream.destroy()
    },
  }
}

/** Whether a connection is given up after this error. The pool itself notices those that are closed. */
const endsConnection = (error: unknown) => error instanceof DatabaseError && ENDS.test(error.code ?? '')

/** Whether a prepared statement is gone, or no longer fits the tables: it was refused before it did anything. */
export const isOutdated = (error: unknown) =>
  error instanceof DatabaseError && ['RevalidateCachedQuery', 'FetchPreparedStatement'].includes(error.routine ?? '')
