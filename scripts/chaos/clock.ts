import { caller } from '../../test/support/service.ts'
import type { Experiment } from './experiment.ts'
import { round } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const SKEW = new URL('./skew.ts', import.meta.url).href
const WINDOW_LIMIT = 10

const skewed = (seconds: number) => ({ env: { NODE_OPTIONS: `--import ${SKEW}`, SKEW_MS: String(seconds * 1000) } })

const clocks: Experiment = {
  id: 'F15',
  title: 'clocks wrong: workers by 10 min, APIs by 1 h, both ways',
  setup: { workers: 0, env: { RATE_LIMIT_ENDPOINTS_WRITE: String(WINDOW_LIMIT), RETRY_DELAY_SECONDS: '1' } },
  async run(world) {
    const [first] = world.fleet.running('api')
    const [ahead, behind, ...workers] = await Promise.all([
      world.fleet.start('api', skewed(3600)),
      world.fleet.start('api', skewed(-3600)),
      world.fleet.start('worker', skewed(600)),
      world.fleet.start('worker', skewed(-600)),
    ])
    await world.fleet.stop(first!)
    for (const endpoint of world.active) endpoint.reply = (_receipt, nth) => (nth === 1 ? 500 : 200)
    const load = world.load({ rate: 20 })
    await sleep(world.quick ? 3000 : 10_000)
    await load.stop()
    await world.quiesce()
    const signed = world.ledger.receipts.map(({ signedAt, at }) => Math.abs(at / 1000 - signedAt))
    const late = await retriesLate(world)
    const statuses = await fillWindow(world, [ahead.url, behind.url])
    return {
      figures: {
        signed_off_max_s: round(Math.max(...signed)),
        retries: late.length,
        retry_late_min_s: round(Math.min(...late)),
        retry_late_max_s: round(Math.max(...late)),
      },
      conditions: {
        'each worker is told that its clock is wrong': workers.every(({ logs }) =>
          logs.some(({ msg, warning }) => msg === 'queue.warning' && /clock skew/i.test(String(warning))),
        ),
        'what is signed is the right time, to 3 s': Math.max(...signed) <= 3,
        'retries come within 2 s of when they are due': Math.min(...late) > -0.1 && Math.max(...late) <= 2,
        'both APIs count in one rate window': statuses.lastIndexOf(400) === WINDOW_LIMIT - 1 && statuses.at(-1) === 429,
      },
    }
  },
}

/** Seconds from the moment for which each retry was announced to its arrival. */
async function retriesLate(world: World): Promise<number[]> {
  const attempts = await world.database.sql<{ delivery_id: string; next_attempt_at: Date }[]>`
    select delivery_id, next_attempt_at from waybill.attempts where attempt_number = 1`
  return attempts.map((attempt) => {
    const retry = world.ledger.of(attempt.delivery_id)[1]
    return ((retry?.at ?? Number.POSITIVE_INFINITY) - attempt.next_attempt_at.getTime()) / 1000
  })
}

/** Two requests more than the window allows, to the APIs in turn: bad ones, which count as well. */
async function fillWindow(world: World, urls: string[]): Promise<number[]> {
  const { key } = await world.addTenant()
  const ask = (nth: number) => caller(urls[nth % urls.length]!, key)('POST', '/v1/endpoints', { body: {} })
  // A window that is about to end would be two of them.
  const { headers } = await ask(0)
  const left = Number(headers.get('x-ratelimit-reset'))
  if (left < 5) await sleep((left + 0.5) * 1000)
  const statuses = left < 5 ? [] : [400]
  while (statuses.length < WINDOW_LIMIT + 2) statuses.push((await ask(statuses.length)).status)
  return statuses
}

export const clockExperiments = [clocks]
