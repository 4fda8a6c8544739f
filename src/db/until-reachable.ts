import { setTimeout as sleep } from 'node:timers/promises'
import { DatabaseError } from 'pg'
import type { Log } from '../log.ts'
import { openDb } from './open.ts'
import { parseUrl, readDatabaseUrl } from './url.ts'

/** How long a start waits for a database that is not there yet; whoever supervises the process may then start it anew. */
const START_PATIENCE_MS = 60_000
const START_PAUSE_MS = 500
/** SQLSTATEs: the database is starting, stopping, or out of connections. */
const PASSING = ['57P03', '57P01', '53300']

/**
 * Resolves when the database answers, and is no standby, so that it does not matter which of the two starts first. Throws its
 * error if it refuses (wrong password, no such database), and the last failure if it cannot be reached for a minute. Returns the
 * address to use from then on: where the server can end transactions that take long, it asks it not to (earlier ones refuse a
 * setting they do not know).
 */
export async function untilReachable(url: string, log: Log): Promise<string> {
  const until = performance.now() + START_PATIENCE_MS
  for (let tries = 1; ; tries++) {
    const pool = openDb(url, { log, name: 'waybill start', max: 1 })
    try {
      const [server] = await pool<
        [{ ends: string | null; standby: boolean }]
      >`select current_setting('transaction_timeout', true) as ends, pg_is_in_recovery() as standby`
      if (server.standby) throw new Error('the database is a standby, which only reads')
      return server.ends ? withOption(url, '-c transaction_timeout=0') : url
    } catch (error) {
      // The driver's own words, as when a password is asked for and there is none.
      const isOfLogin = error instanceof Error && error.message.startsWith('SASL')
      const refused = isOfLogin || (error instanceof DatabaseError && !PASSING.includes(error.code ?? ''))
      if (isOfLogin && error.message.includes('password must be'))
        throw new Error('the database asks for a password, and neither DATABASE_URL nor PGPASSWORD has one', {
          cause: error,
        })
      if (refused || performance.now() > until) throw error
      if (tries % 10 === 1) log.warn({ err: error }, 'database.waiting')
    } finally {
      await pool.end(0)
    }
    await sleep(START_PAUSE_MS)
  }
}

function withOption(url: string, option: string): string {
  const address = parseUrl(url)
  address.searchParams.set('options', `${readDatabaseUrl(url).options} ${option}`)
  // Node writes blanks as pluses.
  address.search = address.search.replaceAll('+', '%20')
  return address.href
}
