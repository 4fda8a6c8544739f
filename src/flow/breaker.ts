/** Where an endpoint's breaker stands (waybill.endpoint_stats). */
export type Breaker = {
  state: 'closed' | 'open' | 'half_open'
  /** Attempts at once while half open. */
  ramp: number | null
  failedProbes: number
  /** Seconds until the next probe, when the breaker opens or stays open; null where none is to be scheduled, and in what was known. */
  probeInSeconds: number | null
}

export type BreakerRules = {
  /** Opens after this many failed attempts in a row … */
  failures: number
  /** … over at least this long: a short burst of failures is left to the retries. */
  seconds: number
  /** The first probe comes after this long, each later one after twice the last wait, up to the maximum. */
  probeSeconds: number
  probeMaxSeconds: number
  /** Where the ramp ends: what one worker does at once for one endpoint. */
  cap: number
}

/** What a batch of attempts tells about an endpoint, and what was known before. */
export type Evidence = {
  successes: number
  /** Whether the probe that was under way has failed. */
  probeFailed: boolean
  /** Whether the probe that was due has not been made, since the month's attempts are used up. */
  probeUnmade: boolean
  failureStreak: number
  failingSeconds: number
  held: number
}

const CLOSED: Breaker = { state: 'closed', ramp: null, failedProbes: 0, probeInSeconds: null }
const RAMP_START = 2
/** While half open, one stray failure says little; this many in a row open the breaker again. */
const HALF_OPEN_FAILURES = 3

/**
 * The usual circuit breaker, one per endpoint: closed until enough failures in a row; then open, with one probe at a time; then half
 * open, with two attempts at once and one more for each that succeeds, until it takes as many as any other, or nothing is held:
 * waiting for the latter would never end if a backlog grew by more than twice the ramp in each round. A probe is an ordinary
 * attempt of a delivery and uses one of its retries; while the breaker is open nothing else is sent and no other retry is used.
 * Pure. Returns `now` itself where nothing changes.
 */
export function nextBreaker(now: Breaker, seen: Evidence, rules: BreakerRules): Breaker {
  const reopen = (failedProbes: number): Breaker => ({
    state: 'open',
    ramp: null,
    failedProbes,
    probeInSeconds: Math.min(rules.probeMaxSeconds, rules.probeSeconds * 2 ** failedProbes),
  })
  if (now.state === 'closed') {
    const failing = seen.failureStreak >= rules.failures && seen.failingSeconds >= rules.seconds
    return failing ? reopen(0) : now
  }
  if (now.state === 'open') {
    if (seen.successes > 0)
      return closedOr({ state: 'half_open', ramp: RAMP_START, failedProbes: now.failedProbes, probeInSeconds: null })
    if (seen.probeUnmade) return { ...now, probeInSeconds: 0 }
    return seen.probeFailed ? reopen(now.failedProbes + 1) : now
  }
  if (seen.successes === 0) return seen.failureStreak >= HALF_OPEN_FAILURES ? reopen(now.failedProbes + 1) : now
  const ramp = now.ramp ?? RAMP_START
  return ramp >= rules.cap ? CLOSED : closedOr({ ...now, ramp: Math.min(rules.cap, ramp + seen.successes) })

  function closedOr(next: Breaker): Breaker {
    return seen.held === 0 ? CLOSED : next
  }
}
