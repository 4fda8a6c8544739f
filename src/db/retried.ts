import { setTimeout as sleep } from 'node:timers/promises'
import { isRetryable } from './errors.ts'
import type { Db, Pool } from './open.ts'

/**
 * Waits a moment (20 to 100 ms) before another try of what Postgres gave up because of others. They are being woken: who came back
 * at once would take from them what they have waited for, and be in their way again.
 */
const giveWay = () => sleep(20 + 80 * Math.random())

/**
 * Does what Postgres may give up because of others, up to `most` times in all, with a `pause` after each that was given up. `work` must
 * be one statement or transaction.
 */
export async function retried<Result>(
  work: () => PromiseLike<Result>,
  { most = 3, pause = giveWay as (error: unknown, tries: number) => Promise<unknown> } = {},
): Promise<Result> {
  for (let tries = 1; ; tries++) {
    try {
      return await work()
    } catch (error) {
      if (!isRetryable(error) || tries === most) throw error
      await pause(error, tries)
    }
  }
}

/** Runs a transaction, again if Postgres gives it up because of others (`retried`). */
export const transact = <Result>(pool: Pool, work: (sql: Db) => Promise<Result>): Promise<Result> =>
  retried(() => pool.begin(work))
