import { waitFor } from '../../test/support/wait.ts'
import { createClient } from '../demo/client.ts'
import { percentile } from '../percentile.ts'
import { makeTable, measureCommits, measureOneCommit } from './ceilings.ts'
import { type Cost, countCost, type Measured } from './cost.ts'
import type { Helper } from './helper.ts'
import type { Load, LoadResult } from './load.ts'
import type { Posting } from './post.ts'
import { nowMicros } from './serve.ts'
import type { Services } from './services.ts'

const PAYLOAD_BYTES = 250
const FANOUT = 10
const TENANTS = 1000
const ENDPOINTS = 5000
const ENDPOINTS_OF_A_TYPE = 50
const STEADY_RATE = 500
export const PATIENCE = { timeoutMs: 120_000, intervalMs: 100 }

export type Bench = Measured & {
  /** Of the receiver, in plain HTTP. */
  receiverPort: number
  /** Where endpoints are, and bare requests go: the same receiver, behind TLS if that is asked for. */
  receiverOrigin: string
  workers: number
  quick: boolean
  apiKey: string
}
/** `mostMiB`: of each tenth of the time. */
export type SteadyRun = Times & { rate: number; seconds: number; mostMiB: Record<'api' | 'worker', number[]> }

/**
 * What the cores can do without the service: commits a second, the median of one in ms, signed POSTs a second, and those made the
 * usual way (post.ts).
 */
export type Ceiling = 'commits' | 'oneCommit' | 'posts' | 'usualPosts'
export type Ceilings = Record<Ceiling, number[]> & { commitsBy: string; generator: number }
/** A run with the mean of what its ceilings were just before and after it; none where none are measured. */
export type Beside<Run> = Run & { ceilings: Partial<Record<Ceiling, number>> }
export type PublishRun = Times & { connections: number; events: number; perSecond: number; cost: Cost }
/** `again`: requests for a delivery that had come before. */
export type DrainRun = { deliveries: number; perSecond: number; again: number; cost: Cost }
export type BothRun = {
  published: number
  delivered: number
  publishP50: number
  publishP99: number
  backlogSeconds: number
}
export type TenantsRun = Times & { tenants: number; published: number; drained: DrainRun }
export type EndpointsRun = { endpoints: number; fanout: number; drained: DrainRun }
export type FanoutRun = { fanout: number; published: number; deliveriesQueued: number; drained: DrainRun }
export type LatencyRun = Times & { rate: number | null; events: number; publishP50: number; publishP99: number }

/**
 * Measures the ceilings again and again, because the machine's speed drifts within minutes: `beside` runs a part between two
 * measurements of its own. `all` has every one that was made.
 */
export async function createCeilings(bench: Bench, post: Helper<'post'>) {
  const { database, receiver, load, receiverPort, receiverOrigin, quick } = bench
  const seconds = quick ? 2 : 3
  await makeTable(database)
  // The generator against a server that does next to nothing: it must be far above what it measures.
  await receiver.ask('expect', { count: 0, seconds: 0 })
  const generated = await load.ask(
    'run',
    request(bench, { ports: [receiverPort], connections: 256, stop: { seconds: 2 } }),
  )
  const generator = generated.requests / generated.seconds
  const all: Ceilings = { commits: [], commitsBy: '', oneCommit: [], posts: [], usualPosts: [], generator }
  const measureOnce = {
    async commits() {
      const { tool, perSecond } = await measureCommits(database, { clients: 16, seconds, payloadBytes: PAYLOAD_BYTES })
      all.commitsBy = tool
      return perSecond
    },
    oneCommit: () => measureOneCommit(database, quick ? 500 : 1000, PAYLOAD_BYTES),
    posts: () => countPosts('dispatch'),
    usualPosts: () => countPosts('request'),
  }
  async function countPosts(by: Posting['by'], during = seconds): Promise<number> {
    await receiver.ask('expect', { count: 0, seconds: 0 })
    const run = await post.ask('run', {
      origin: receiverOrigin,
      inFlight: 200,
      seconds: during,
      payloadBytes: PAYLOAD_BYTES,
      by,
    })
    return run.posts / run.seconds
  }
  // V8 compiles meanwhile: the first ones would be a third below those that follow.
  for (const by of ['dispatch', 'request'] as const) await countPosts(by, 1)

  /** What was measured last and may stand for the present moment. */
  const fresh = new Map<Ceiling, number>()

  async function measure(kind: Ceiling): Promise<number> {
    const value = await measureOnce[kind]()
    all[kind].push(value)
    fresh.set(kind, value)
    return value
  }

  return {
    all,
    async beside<Run>(kinds: Ceiling[], part: () => Promise<Run>): Promise<Beside<Run>> {
      const before: number[] = []
      for (const kind of kinds) before.push(fresh.get(kind) ?? (await measure(kind)))
      fresh.clear()
      const run = await part()
      const ceilings: Partial<Record<Ceiling, number>> = {}
      for (const [nth, kind] of kinds.entries()) ceilings[kind] = ((before[nth] as number) + (await measure(kind))) / 2
      return { ...run, ceilings }
    },
  }
}

/** A tenant with a key, and what calls the API with that. */
export async function createTenant(services: Services, tenant_id: string, limits: object = {}) {
  const url = `http://127.0.0.1:${services.ports()[0]}`
  const admin = createClient(url, services.adminKey)
  await admin('POST', '/v1/admin/tenants', { tenant_id, tenant_slug: tenant_id, limits })
  const { api_key } = await admin<{ api_key: string }>('POST', '/v1/admin/api-keys', { tenant_id, name: 'bench' })
  return { key: api_key, call: createClient(url, api_key) }
}

/** A tenant whose endpoints, one for each path, subscribe to the path's event type; answers with its key. */
async function registerTenant(services: Services, receiver: string, tenant_id: string, paths: [string, string][]) {
  const { key, call } = await createTenant(services, tenant_id, { max_endpoints: Math.max(100, paths.length) })
  const one = ([path, type]: [string, string]) =>
    call('POST', '/v1/endpoints', { url: `${receiver}/${path}`, subscribed_events: [type] })
  for (let nth = 0; nth < paths.length; nth += 10) await Promise.all(paths.slice(nth, nth + 10).map(one))
  return key
}

/** One tenant, one endpoint for `bench.one`, ten for `bench.ten`. */
export function register(services: Services, receiver: string): Promise<string> {
  const ten = Array.from({ length: FANOUT }, (_, nth): [string, string] => [`ten/${nth + 1}`, 'bench.ten'])
  return registerTenant(services, receiver, 'bench', [['one', 'bench.one'], ...ten])
}

/** `TENANTS` more, with an endpoint each for `bench.one`; answers with their keys. */
async function registerMore({ services, receiverOrigin }: Bench): Promise<string[]> {
  const one = (nth: number) => registerTenant(services, receiverOrigin, `bench-${nth}`, [[`of/${nth}`, 'bench.one']])
  const keys: string[] = []
  while (keys.length < TENANTS)
    keys.push(...(await Promise.all(Array.from({ length: 10 }, (_, more) => one(keys.length + more)))))
  return keys
}

/**
 * Lets V8 compile what publishing runs, in each process: four that had 10,000 events each took a sixth longer than after 60,000.
 * Answers with how many events that took.
 */
export async function warmUp(bench: Bench): Promise<number> {
  const count = (bench.quick ? 20_000 : 40_000) * bench.services.ports().length
  const { requests } = await publish(bench, { connections: 256, stop: { count } })
  return requests
}

/** Publishing alone: the worker is not running. */
export async function measurePublish(bench: Bench, connections: number): Promise<PublishRun> {
  const counting = await countCost(bench)
  const result = await publish(bench, { connections, stop: { seconds: bench.quick ? 3 : 5 } })
  const cost = await counting(result.requests)
  return {
    connections,
    events: result.requests,
    perSecond: result.requests / result.seconds,
    ...times(result.latencies),
    cost,
  }
}

/**
 * Publishes until as many deliveries wait as are made before anything counts, while V8 compiles what workers run: enough for four of
 * them, and the same for one, since a database with more in it works more.
 */
export async function queueWarmUp(bench: Bench, waiting: number): Promise<void> {
  const missing = warmUpDeliveries(bench) - waiting
  if (missing > 0) await publish(bench, { connections: 256, stop: { count: missing } })
}

const warmUpDeliveries = ({ quick }: Bench) => (quick ? 20_000 : 120_000)

/** Publishes a backlog for a drain; answers with how many deliveries it is. */
async function queueBacklog(bench: Bench, wanted: Partial<Load> = {}, fanout = 1): Promise<number> {
  const deliveries = bench.quick ? 20_000 : 50_000
  await publish(bench, { connections: 256, ...wanted, stop: { count: deliveries / fanout } })
  return deliveries
}

/**
 * Delivering alone. The workers deliver what waits, so that they are warm; then they are halted while `queue` publishes the backlog
 * that counts, from its first delivery to its last. These are few seconds: what Postgres does once a minute would fall into one part
 * and not into another, so it is done before.
 */
export async function measureDrain(bench: Bench, queue = () => queueBacklog(bench)): Promise<DrainRun> {
  const { database, services, receiver, workers } = bench
  await services.start('worker', workers)
  await untilRecorded(bench)
  services.halt('worker')
  await database.pauseUpkeep()
  const deliveries = await queue()
  const receiving = receiver.ask('expect', { count: deliveries, seconds: 180 })
  const counting = await countCost(bench)
  const begun = nowMicros()
  services.goOn('worker')
  const received = await receiving
  if (received.deliveries < deliveries)
    throw new Error(`only ${received.deliveries} of ${deliveries} deliveries arrived`)
  await untilRecorded(bench)
  const cost = await counting(deliveries)
  await database.resumeUpkeep()
  await services.stop('worker')
  return {
    deliveries,
    again: received.requests - deliveries,
    perSecond: deliveries / ((received.lastMicros - begun) / 1e6),
    cost,
  }
}

/** Starts the workers until nothing waits any more. */
export async function deliverAll(bench: Bench): Promise<void> {
  await bench.services.start('worker', bench.workers)
  await untilRecorded(bench)
  await bench.services.stop('worker')
}

export async function measureBoth(bench: Bench): Promise<BothRun> {
  const { services, receiver, workers, quick } = bench
  await services.start('worker', workers)
  const receiving = receiver.ask('expect', { count: Number.POSITIVE_INFINITY, seconds: quick ? 5 : 10 })
  const result = await publish(bench, { connections: 256, stop: { seconds: quick ? 5 : 10 } })
  const during = await receiving
  const begun = nowMicros()
  await untilReceived(bench, result.requests)
  await untilRecorded(bench)
  await services.stop('worker')
  const { p50, p99 } = times(result.latencies)
  return {
    published: result.requests / result.seconds,
    delivered: during.deliveries / (quick ? 5 : 10),
    publishP50: p50,
    publishP99: p99,
    backlogSeconds: (nowMicros() - begun) / 1e6,
  }
}

export async function measureFanout(bench: Bench): Promise<FanoutRun> {
  const events = warmUpDeliveries(bench) / FANOUT
  const result = await publish(bench, { connections: 256, eventTypes: ['bench.ten'], stop: { count: events } })
  const published = result.requests / result.seconds
  const drained = await measureDrain(bench, () => queueBacklog(bench, { eventTypes: ['bench.ten'] }, FANOUT))
  return { fanout: FANOUT, published, deliveriesQueued: published * FANOUT, drained }
}

/** Hardly two events of a batch are the same tenant's, so that each has counters of its own to move. */
export async function measureTenants(bench: Bench): Promise<TenantsRun> {
  const apiKeys = await registerMore(bench)
  const count = warmUpDeliveries(bench) / 3
  const { requests, seconds, latencies } = await publish(bench, { connections: 256, apiKeys, stop: { count } })
  const drained = await measureDrain(bench, () => queueBacklog(bench, { apiKeys }))
  return { tenants: TENANTS, published: requests / seconds, ...times(latencies), drained }
}

/** A backlog of a few deliveries for each of thousands of endpoints. */
export async function measureEndpoints(bench: Bench): Promise<EndpointsRun> {
  const fanout = ENDPOINTS_OF_A_TYPE
  const eventTypes = Array.from({ length: ENDPOINTS / fanout }, (_, nth) => `bench.many.${nth}`)
  const paths = eventTypes.flatMap((type) =>
    Array.from({ length: fanout }, (_, nth): [string, string] => [`${type}/${nth}`, type]),
  )
  const key = await registerTenant(bench.services, bench.receiverOrigin, 'bench-many', paths)
  const wanted = { apiKeys: [key], eventTypes }
  await publish(bench, { connections: 256, ...wanted, stop: { count: warmUpDeliveries(bench) / 3 / fanout } })
  const drained = await measureDrain(bench, () => queueBacklog(bench, wanted, fanout))
  return { endpoints: ENDPOINTS, fanout, drained }
}

/** From the intended moment of publishing to the receipt: one at a time, or in an open loop of `rate` a second. */
export async function measureLatency(bench: Bench, rate: number | null): Promise<LatencyRun> {
  const { services, receiver, workers, quick } = bench
  await services.start('worker', workers)
  // The worker's first claims and connections are not what is asked for.
  const warmUp = receiver.ask('expect', { count: 50, seconds: 30 })
  await publish(bench, { connections: 1, stop: { count: 50 } })
  await warmUp
  const events = rate === null ? (quick ? 100 : 400) : rate * (quick ? 5 : 20)
  const receiving = receiver.ask('expect', { count: events, seconds: 120 })
  const pace = rate === null ? { connections: 1, pauseMs: 50 } : { connections: 16, rate }
  const { latencies: answered } = await publish(bench, { ...pace, stop: { count: events } })
  const { latencies: arrived } = await receiving
  await untilRecorded(bench)
  await services.stop('worker')
  const { p50: publishP50, p99: publishP99 } = times(answered)
  return { rate, events: arrived.length, ...times(arrived), publishP50, publishP99 }
}

/** Whether anything grows while nothing changes. */
export async function measureSteady(bench: Bench): Promise<SteadyRun> {
  const { services, receiver, workers, quick } = bench
  const seconds = quick ? 60 : 600
  await services.start('worker', workers)
  const mostMiB = { api: Array<number>(10).fill(0), worker: Array<number>(10).fill(0) }
  const begun = nowMicros()
  const watching = setInterval(() => {
    const tenth = Math.floor(((nowMicros() - begun) / 1e6 / seconds) * 10)
    if (tenth >= 10) return
    for (const role of ['api', 'worker'] as const) {
      mostMiB[role][tenth] = Math.max(mostMiB[role][tenth] ?? 0, services.memory(role))
    }
  }, 500)
  const receiving = receiver.ask('expect', { count: STEADY_RATE * seconds, seconds: seconds + 60 })
  await publish(bench, { connections: 16, rate: STEADY_RATE, stop: { count: STEADY_RATE * seconds } })
  const { latencies } = await receiving
  clearInterval(watching)
  await untilRecorded(bench)
  await services.stop('worker')
  return { rate: STEADY_RATE, seconds, ...times(latencies), mostMiB }
}

export type Times = ReturnType<typeof times>

/** In milliseconds. */
export const times = (micros: ArrayLike<number>) => ({
  p50: percentile(micros, 0.5) / 1000,
  p99: percentile(micros, 0.99) / 1000,
  max: percentile(micros, 1) / 1000,
})

type Wanted = { connections: number; stop: { count: number } | { seconds: number } } & Partial<Load>

const request = (bench: Bench, wanted: Wanted) => ({
  ports: bench.services.ports(),
  apiKeys: [bench.apiKey],
  payloadBytes: PAYLOAD_BYTES,
  eventTypes: ['bench.one'],
  rate: null,
  ...wanted,
})

export async function publish(bench: Bench, wanted: Wanted): Promise<LoadResult> {
  const result = await bench.load.ask('run', request(bench, wanted))
  if (result.refused > 0) {
    throw new Error(`${result.refused} publishes were refused, the first with:\n${result.firstRefusal}`)
  }
  return result
}

async function untilReceived({ receiver }: Bench, deliveries: number): Promise<void> {
  const arrived = async () => (await receiver.ask('count', null)) >= deliveries
  await waitFor(arrived, { ...PATIENCE, what: 'all deliveries to arrive' })
}

/** The last receipt comes before its record. */
export async function untilRecorded({ database }: Bench): Promise<void> {
  await waitFor(async () => (await database.queued()) === 0, { ...PATIENCE, what: 'all attempts to be recorded' })
}
