import { createClient } from '../demo/client.ts'
import { type Commits, makeTable, measureCommits, measureOneCommit } from './ceilings.ts'
import { type Cost, countCost, type Measured } from './cost.ts'
import { type Helper, nowMicros, percentile } from './helper.ts'
import type { Load, LoadResult } from './load.ts'
import type { Received } from './receiver.ts'
import type { Services } from './services.ts'

const PAYLOAD_BYTES = 250
const FANOUT = 10

export type Bench = Measured & {
  receiverPort: number
  workers: number
  quick: boolean
  apiKey: string
}

export type Ceilings = { commits: Commits; oneCommitMs: number; posts: number; generator: number }
export type PublishRun = {
  connections: number
  events: number
  perSecond: number
  p50: number
  p99: number
  cost: Cost
}
export type DrainRun = { deliveries: number; perSecond: number; requests: number; cost: Cost }
export type BothRun = {
  published: number
  delivered: number
  publishP50: number
  publishP99: number
  backlogSeconds: number
}
export type FanoutRun = { fanout: number; published: number; deliveriesQueued: number; drained: DrainRun }
export type LatencyRun = {
  rate: number | null
  events: number
  p50: number
  p99: number
  max: number
  publishP50: number
  publishP99: number
}

/** What the same cores can do without the service. */
export async function measureCeilings(bench: Bench, post: Helper<'post'>): Promise<Ceilings> {
  const { database, receiver, load, receiverPort, quick } = bench
  const seconds = quick ? 3 : 5
  await makeTable(database)
  const commits = await measureCommits(database, { clients: 16, seconds, payloadBytes: PAYLOAD_BYTES })
  const oneCommitMs = await measureOneCommit(database, quick ? 500 : 1000, PAYLOAD_BYTES)
  await receiver.ask('expect', { count: 0, seconds: 0 })
  const run = await post.ask('run', { port: receiverPort, inFlight: 200, seconds, payloadBytes: PAYLOAD_BYTES })
  // The generator against a server that does next to nothing: it must be far above what it measures.
  const generated = await load.ask(
    'run',
    request(bench, { ports: [receiverPort], connections: 256, stop: { seconds: 2 } }),
  )
  return { commits, oneCommitMs, posts: run.posts / run.seconds, generator: generated.requests / generated.seconds }
}

/** One tenant, one endpoint for `bench.one`, ten for `bench.ten`. */
export async function register(services: Services, receiverPort: number): Promise<string> {
  const url = `http://127.0.0.1:${services.ports()[0]}`
  const admin = createClient(url, services.adminKey)
  await admin('POST', '/v1/admin/tenants', { tenant_id: 'bench', tenant_slug: 'bench' })
  const { api_key } = await admin<{ api_key: string }>('POST', '/v1/admin/api-keys', {
    tenant_id: 'bench',
    name: 'bench',
  })
  const tenant = createClient(url, api_key)
  const endpoint = (path: string, type: string) =>
    tenant('POST', '/v1/endpoints', { url: `http://127.0.0.1:${receiverPort}/${path}`, subscribed_events: [type] })
  await endpoint('one', 'bench.one')
  for (let nth = 1; nth <= FANOUT; nth++) await endpoint(`ten/${nth}`, 'bench.ten')
  return api_key
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

/** Delivering alone: `deliveries` are waiting when the worker starts. */
export async function measureDrain(bench: Bench, deliveries: number): Promise<DrainRun> {
  const counting = await countCost(bench)
  const received = await drain(bench, deliveries)
  return {
    deliveries,
    requests: received.requests,
    perSecond: (deliveries - 1) / ((received.lastMicros - received.firstMicros) / 1e6),
    cost: await counting(deliveries),
  }
}

/** Fills the queue up to `deliveries` that wait; answers with how many do. */
export async function fill(bench: Bench, waiting: number, deliveries: number): Promise<number> {
  const missing = deliveries - waiting
  if (missing > 0) await publish(bench, { connections: 256, stop: { count: missing } })
  return Math.max(waiting, deliveries)
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
  const events = bench.quick ? 1000 : 2000
  const result = await publish(bench, { connections: 256, eventType: 'bench.ten', stop: { count: events } })
  const published = result.requests / result.seconds
  const drained = await measureDrain(bench, events * FANOUT)
  return { fanout: FANOUT, published, deliveriesQueued: published * FANOUT, drained }
}

/** From the intended moment of publishing to the receipt: one at a time, or in an open loop of `rate` a second. */
export async function measureLatency(bench: Bench, rate: number | null): Promise<LatencyRun> {
  const { services, receiver, workers, quick } = bench
  await services.start('worker', workers)
  // The worker's first claims and connections are not what is asked for.
  const warmUp = receiver.ask('expect', { count: 50, seconds: 30 })
  await publish(bench, { connections: 1, stop: { count: 50 } })
  await warmUp
  const events = rate === null ? 100 : rate * (quick ? 5 : 20)
  const receiving = receiver.ask('expect', { count: events, seconds: 120 })
  const pace = rate === null ? { connections: 1, pauseMs: 50 } : { connections: 16, rate }
  const { latencies: answered } = await publish(bench, { ...pace, stop: { count: events } })
  const { latencies: arrived } = await receiving
  await untilRecorded(bench)
  await services.stop('worker')
  const sorted = Float64Array.from(arrived).sort()
  const { p50: publishP50, p99: publishP99 } = times(answered)
  return { rate, events: arrived.length, ...times(sorted), max: (sorted.at(-1) ?? 0) / 1000, publishP50, publishP99 }
}

const times = (sortedMicros: Float64Array) => ({
  p50: percentile(sortedMicros, 0.5) / 1000,
  p99: percentile(sortedMicros, 0.99) / 1000,
})

type Wanted = { connections: number; stop: { count: number } | { seconds: number } } & Partial<Load>

const request = (bench: Bench, wanted: Wanted) => ({
  ports: bench.services.ports(),
  apiKey: bench.apiKey,
  payloadBytes: PAYLOAD_BYTES,
  eventType: 'bench.one',
  rate: null,
  ...wanted,
})

async function publish(bench: Bench, wanted: Wanted): Promise<LoadResult> {
  const result = await bench.load.ask('run', request(bench, wanted))
  if (result.refused > 0) {
    throw new Error(`${result.refused} publishes were refused, the first with:\n${result.firstRefusal}`)
  }
  return result
}

async function drain(bench: Bench, deliveries: number): Promise<Received> {
  const { services, receiver, workers } = bench
  const receiving = receiver.ask('expect', { count: deliveries, seconds: 180 })
  await services.start('worker', workers)
  const received = await receiving
  if (received.deliveries < deliveries)
    throw new Error(`only ${received.deliveries} of ${deliveries} deliveries arrived`)
  await untilRecorded(bench)
  await services.stop('worker')
  return received
}

async function untilReceived({ receiver }: Bench, deliveries: number): Promise<void> {
  await poll('all deliveries to arrive', async () => (await receiver.ask('count', null)) >= deliveries)
}

/** The last receipt comes before its record. */
async function untilRecorded({ database }: Bench): Promise<void> {
  await poll('all attempts to be recorded', async () => (await database.queued()) === 0)
}

async function poll(what: string, check: () => Promise<boolean>): Promise<void> {
  for (const deadline = Date.now() + 120_000; !(await check()); ) {
    if (Date.now() > deadline) throw new Error(`waited too long for ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}
