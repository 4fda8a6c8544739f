import { ADMIN_KEY } from '../../test/support/service.ts'
import { residentMemory } from '../bench/usage.ts'
import type { Experiment } from './experiment.ts'
import type { Endpoint } from './ledger.ts'
import { replyAfter, round, triesMs, watch } from './measure.ts'
import { type Publish, sleep } from './publisher.ts'
import type { World } from './world.ts'

const SAMPLE_MS = 500
const RESET_MS = 1500
/** Memory is flat when it grows by no more than this from the middle of a trouble to its end. */
const FLAT_MIB = 24
/** The rest of the machine is busy as well. */
const NOISE_MS = 150

/** Not at once: that would look like a kept connection which had been closed, and the request would be sent on another. */
const reset = replyAfter(RESET_MS, null)

const outage: Experiment = {
  id: 'F33',
  title: 'no receiver answers for a minute, or each resets',
  // What takes minutes otherwise.
  setup: {
    env: { ATTEMPT_TIMEOUT_SECONDS: '5', BREAKER_SECONDS: '10', BREAKER_PROBE_MAX_SECONDS: '20' },
  },
  async run(world) {
    const lasts = world.quick ? 15_000 : 60_000
    const load = world.load({ rate: 50 })
    // Plans, connections and caches are made in the first seconds.
    await sleep(3000)
    const calm = Date.now()
    await sleep(10_000)
    const memory = watchMemory(world)
    const begun = Date.now()
    world.active.forEach((endpoint, nth) => {
      endpoint.reply = nth === 1 ? reset : () => new Promise(() => {})
    })
    await sleep(lasts)
    const ended = Date.now()
    for (const endpoint of world.active) endpoint.reply = () => 200
    const growth = await memory.growth(begun, ended)
    await load.stop()
    const left = await waiting(world)
    await world.quiesce(150_000)
    const [before, during] = [triesMs(world, calm, begun), triesMs(world, begun, ended)]
    return {
      figures: {
        outage_s: lasts / 1000,
        waiting_at_its_end: left,
        drained_after_s: round((Date.now() - ended) / 1000),
        publish_p99_ms: during,
        publish_p99_ms_before: before,
        ...growth,
      },
      conditions: {
        'what was published waits': left > lasts / 100,
        'publishing takes at most half as long again as before, or 150 ms': during <= Math.max(1.5 * before, NOISE_MS),
        'no process grows': isFlat(growth),
      },
    }
  },
}

const ANSWER_MS = 200
const CAP = 15
/** Deliveries a second. */
const CAPACITY = (CAP * 1000) / ANSWER_MS
const WINDOW_SECONDS = 5

const pressed: Experiment = {
  id: 'F34',
  title: 'three times as many events as the worker can deliver, and as a rate limit allows',
  setup: { env: { ENDPOINT_CONCURRENCY: String(CAP), RATE_LIMIT_WINDOW_SECONDS: String(WINDOW_SECONDS) } },
  async run(world) {
    const lasts = world.quick ? 15_000 : 60_000
    const memory = watchMemory(world)
    const begun = Date.now()
    const free = await press(world, { lasts, rate: 3 * CAPACITY })
    const growth = await memory.growth(begun, begun + lasts)
    await world.quiesce()
    const allowed = CAPACITY / 2
    const limits = { events_write_rate: Math.floor(allowed * WINDOW_SECONDS) }
    const limited = await press(world, { lasts: 10_000, rate: 3 * allowed, limits })
    await world.quiesce()
    const tries = world.published.flatMap((publish) => publish.tries)
    const count = (status: number) => tries.filter((one) => one.status === status).length
    return {
      figures: {
        pressed_s: lasts / 1000,
        capacity_per_s: CAPACITY,
        oldest_s: free.oldest,
        oldest_s_shown: free.shown,
        oldest_s_limited: limited.oldest,
        oldest_s_shown_limited: limited.shown,
        answered_429: count(429),
        answered_503: count(503),
        ...growth,
      },
      conditions: {
        'each request is accepted, or told to come later': tries.every(
          ({ status, shaped }) => shaped && [200, 202, 429, 503].includes(status ?? 0),
        ),
        'without a limit the oldest gets old, and its age is shown':
          free.oldest > lasts / 4000 && Math.abs(free.shown - free.oldest) <= 0.2 * free.oldest + 1,
        'with a limit some are told to come later, and none gets old':
          count(429) > 0 && limited.oldest <= 2 * WINDOW_SECONDS,
        'no process grows': isFlat(growth),
      },
    }
  },
}

/** Publishes to a slow endpoint, which then gets quick. Ages are the highest seen, in seconds. */
async function press(world: World, { lasts, rate, limits = {} }: { lasts: number; rate: number; limits?: object }) {
  const tenant = await world.addTenant()
  const limit = (by: object) => {
    const body = { tenant_id: tenant.tenantId, tenant_slug: tenant.tenantId, limits: by }
    return world.call('POST', '/v1/admin/tenants', { key: ADMIN_KEY, body })
  }
  await limit(limits)
  const endpoint = await world.addEndpoint(`/${tenant.tenantId}`, { tenant, reply: replyAfter(ANSWER_MS) })
  const load = world.load({ rate, tenant })
  const ages = { oldest: 0, shown: 0 }
  for (const end = Date.now() + lasts; Date.now() < end; await sleep(1000)) {
    const { body } = await world.call('GET', '/v1/metrics/summary', { key: tenant.key })
    ages.shown = Math.max(ages.shown, body.queue_age_seconds)
    ages.oldest = Math.max(ages.oldest, ageOfOldest(world, load.log, endpoint))
  }
  endpoint.reply = () => 200
  await load.stop()
  // The oracle repeats what was recovered.
  await limit({})
  return { oldest: round(ages.oldest), shown: round(ages.shown) }
}

/** Seconds since the first of these publishes was accepted that has not arrived. */
function ageOfOldest(world: World, published: Publish[], endpoint: Endpoint): number {
  const arrived = new Set(world.ledger.at(endpoint).map(({ eventId }) => eventId))
  const missing = published.flatMap(({ eventId, acceptedAt }) =>
    acceptedAt !== null && !arrived.has(eventId!) ? [acceptedAt] : [],
  )
  return missing.length === 0 ? 0 : (Date.now() - Math.min(...missing)) / 1000
}

async function waiting({ database: { sql } }: World): Promise<number> {
  const [row] = await sql<{ n: number }[]>`select sum(pending + retrying)::int as n from waybill.endpoint_stats`
  return row?.n ?? 0
}

/** Notes what the API and the worker take, until it is asked. */
function watchMemory(world: World) {
  const [api, worker] = (['api', 'worker'] as const).map((mode) => world.fleet.running(mode)[0]!.pid)
  const watching = watch(world.scope, SAMPLE_MS, async () => ({
    api: residentMemory(api!) ?? 0,
    worker: residentMemory(worker!) ?? 0,
  }))
  return {
    /** By how much more each takes, at most, in the last third of a while than in the second. */
    async growth(from: number, to: number) {
      const seen = await watching.stop()
      const third = (to - from) / 3
      const most = (since: number, whose: 'api' | 'worker') =>
        Math.max(...seen.filter(({ at }) => at >= since && at < since + third).map((one) => one[whose]))
      const growthOf = (whose: 'api' | 'worker') => round(most(to - third, whose) - most(from + third, whose))
      return { api_growth_MiB: growthOf('api'), worker_growth_MiB: growthOf('worker') }
    },
  }
}

const isFlat = (growth: Record<string, number>) => Object.values(growth).every((mib) => mib <= FLAT_MIB)

export const pressureExperiments = [outage, pressed]
