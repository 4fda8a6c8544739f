import { availableParallelism, loadavg } from 'node:os'

const HOUR_MS = 3_600_000

async function passEndOf(lengthMs: number, nearMs: number): Promise<void> {
  const leftMs = lengthMs - (Date.now() % lengthMs)
  if (leftMs < nearMs) await new Promise((resolve) => setTimeout(resolve, leftMs + 10))
}

/** Waits for the end of the hour, if it is near: for a test that must not see it. */
export const passHour = (nearMs = 20_000) => passEndOf(HOUR_MS, nearMs)

/** Waits for midnight UTC, if it is near: for a test that must not see a day, a month or a window of a day end. */
export const passMidnight = (nearMs = 20_000) => passEndOf(24 * HOUR_MS, nearMs)

/** How long to wait for what should come within `ms`: longer on a machine that has more to do than the tests. */
export const patience = (ms = 15_000): number => ms * Math.max(1, loadavg()[0]! / availableParallelism() / 3)

type Waiting = { timeoutMs?: number; intervalMs?: number; what?: string }

/**
 * Asks `condition` again and again until it answers something truthy, and returns that. What it throws (a failed
 * assertion, say) counts as "not yet"; the last such error is the cause of the timeout's.
 */
export async function waitFor<T>(
  condition: () => Promise<T> | T,
  { timeoutMs, intervalMs = 40, what = 'the condition' }: Waiting = {},
): Promise<NonNullable<T>> {
  const since = Date.now()
  let cause: unknown
  do {
    try {
      const answer = await condition()
      if (answer) return answer
      cause = undefined
    } catch (error) {
      cause = error
    }
    await new Promise((resolve) => setTimeout(resolve, intervalMs))
  } while (Date.now() - since < patience(timeoutMs))
  const reason = cause instanceof Error ? `: ${cause.message}` : ''
  throw new Error(`waited ${Date.now() - since} ms for ${what}${reason}`, { cause })
}
