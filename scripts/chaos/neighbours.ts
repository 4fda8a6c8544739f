import { waitFor } from '../../test/support/wait.ts'
import { percentile } from '../percentile.ts'
import type { Experiment } from './experiment.ts'
import type { Endpoint, Receipt } from './ledger.ts'
import { latencies, mostAtOnce, publishMany, replyAfter, round } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

// What README promises of endpoints in trouble, with the defaults of the settings.
const SLOTS = 200
const CAP = 50

const RATE = 10
const WARM_MS = 3000
const CALM_MS = 10_000
const WATCH_MS = 15_000
/** The rest of the machine is busy as well. */
const NOISE_MS = 150

type Tenant = World['tenant']
type While = { from: number; to: number }

const noisy: Experiment = {
  id: 'F30',
  title: '10,000 deliveries of a tenant to an endpoint that never answers, beside another tenant',
  setup: { env: { ATTEMPT_TIMEOUT_SECONDS: '5' } },
  async run(world) {
    const count = world.quick ? 2000 : 10_000
    const noise = await world.addTenant()
    const hole = await world.addEndpoint('/hole', { tenant: noise, reply: () => new Promise(() => {}) })
    const { calm, watched } = await watchBeside(world, world.tenant, () =>
      publishMany(world, count, 'order.paid', noise),
    )
    // What waits for an answer by then waits until its time is over.
    const kept = mostAtOnce(world.ledger.at(hole), 4750)
    hole.reply = () => 200
    await world.quiesce()
    const p99 = p99sOf(world, world.active, calm, watched)
    return {
      figures: { noise: count, slots_kept: kept, ...p99 },
      conditions: {
        'it gets slots, and a quarter of them at most': kept > SLOTS / 20 && kept <= SLOTS / 4,
        'the other tenant waits at most twice as long as before, or 150 ms': isBearable(p99),
      },
    }
  },
}

const slow: Experiment = {
  id: 'F31',
  title: '5,000 deliveries to an endpoint that takes 5 s for each, beside another of the tenant',
  async run(world) {
    // Its ramp takes the same few seconds whatever is due, which is not what is measured.
    const count = world.quick ? 2000 : 5000
    const owner = await world.addTenant()
    const slowOne = await world.addEndpoint('/slow', { tenant: owner, types: ['report.made'], reply: replyAfter(5000) })
    const own = await world.addEndpoint('/own', { tenant: owner, types: ['order.paid'] })
    const { calm, watched } = await watchBeside(world, owner, () => publishMany(world, count, 'report.made', owner))
    const most = mostAtOnce(world.ledger.at(slowOne), 5000)
    slowOne.reply = () => 200
    await world.quiesce()
    const p99 = p99sOf(world, [own], calm, watched)
    return {
      figures: { queued: count, most_at_the_slow_one: most, ...p99 },
      conditions: {
        'the slow one has some requests, and its cap at most': most > CAP / 5 && most <= CAP,
        'the other waits at most twice as long as before, or 150 ms': isBearable(p99),
      },
    }
  },
}

/** A few events of a tenant for a while, before and after something that brings a backlog. */
async function watchBeside(world: World, tenant: Tenant, disturb: () => Promise<void>) {
  const load = world.load({ rate: RATE, types: ['order.paid'], tenant })
  const during = async (ms: number): Promise<While> => {
    const from = Date.now()
    await sleep(ms)
    return { from, to: Date.now() }
  }
  await sleep(WARM_MS)
  const calm = await during(CALM_MS)
  await disturb()
  const watched = await during(WATCH_MS)
  await load.stop()
  return { calm, watched }
}

/** From publish to receipt. */
function p99sOf(world: World, endpoints: Endpoint[], calm: While, watched: While) {
  const at = (share: number, { from, to }: While) => percentile(latencies(world, from, to, endpoints), share)
  return { p50_ms: at(0.5, watched), p99_ms: at(0.99, watched), p99_ms_before: at(0.99, calm) }
}

const isBearable = ({ p99_ms, p99_ms_before }: ReturnType<typeof p99sOf>) =>
  p99_ms <= Math.max(2 * p99_ms_before, NOISE_MS)

const HERD_ANSWER_MS = 100

const herd: Experiment = {
  id: 'F32',
  title: 'an endpoint that was down comes back, with 5,000 due',
  // What takes minutes otherwise.
  setup: {
    env: {
      BREAKER_SECONDS: '5',
      BREAKER_PROBE_SECONDS: '2',
      BREAKER_PROBE_MAX_SECONDS: '4',
      RETRY_DELAY_MAX_SECONDS: '10',
    },
  },
  async run(world) {
    // Its ramp takes the same few seconds whatever is due, which is not what is measured.
    const count = world.quick ? 2000 : 5000
    const owner = await world.addTenant()
    const down = () => 503
    const plain = await world.addEndpoint('/plain', { tenant: owner, types: ['order.paid'], reply: down })
    const ordered = await world.addEndpoint('/ordered', { tenant: owner, types: ['order.sent'], reply: down })
    const patch = { key: owner.key, body: { ordered: true } }
    await world.call('PATCH', `/v1/endpoints/${ordered.endpointId}`, patch)
    await publishMany(world, 200, 'order.sent', owner)
    await publishMany(world, count, 'order.paid', owner)
    const held = () =>
      world.database
        .sql`select from waybill.endpoint_stats where endpoint_id = ${plain.endpointId} and held >= ${count * 0.99}`
    // But for those that have been probes and wait for their next retry.
    await waitFor(async () => (await held()).length > 0, { timeoutMs: 60_000, what: 'all to be held' })
    const up = Date.now()
    ordered.reply = () => 200
    plain.reply = replyAfter(HERD_ANSWER_MS)
    await world.quiesce()
    const came = world.ledger.at(plain).filter(({ answered }) => answered === 200)
    const inOrder = world.ledger.at(ordered).filter(({ answered }) => answered === 200)
    const seconds = (came.at(-1)!.at - came[0]!.at) / 1000
    const buckets = Map.groupBy(came, ({ at }) => Math.floor((at - came[0]!.at) / 1000))
    const busiest = Math.max(...buckets.values().map((bucket) => bucket.length)) / (came.length / seconds)
    // Times are whole milliseconds: the one that follows an answer must not seem to be beside it.
    const most = mostAtOnce(came, HERD_ANSWER_MS - 5)
    const order = orderOf(came)
    return {
      figures: {
        due: count,
        first_after_s: round((came[0]!.at - up) / 1000),
        drained_in_s: round(seconds),
        most_at_once: most,
        busiest_second_over_mean: round(busiest),
        order_by_rank: order.correlation,
        furthest_out_of_place: order.furthest,
      },
      conditions: {
        'it has more than one request at once, and its cap at most': most > 1 && most <= CAP,
        'the busiest second is at most three times the mean': busiest <= 3,
        'none is delivered twice': new Set(came.map(({ deliveryId }) => deliveryId)).size === came.length,
        'all come within three times what the cap allows':
          came.length === count && seconds <= 3 * (count * (HERD_ANSWER_MS / 1000 / CAP)),
        'the oldest come first, nearly': order.correlation >= 0.9,
        'and in their order, where that is promised': inOrder.length === 200 && orderOf(inOrder).furthest === 0,
      },
    }
  },
}

/** How the order of arrival agrees with that of the ids, which is that of the commits: 1 is the same order (Spearman). */
function orderOf(receipts: Receipt[]) {
  const ids = receipts.map(({ deliveryId }) => deliveryId).sort()
  const places = new Map(ids.map((id, place) => [id, place]))
  const off = receipts.map(({ deliveryId }, index) => Math.abs(index - places.get(deliveryId)!))
  const n = receipts.length
  const squares = off.reduce((sum, one) => sum + one ** 2, 0)
  return { correlation: round(1 - (6 * squares) / (n * (n ** 2 - 1))), furthest: Math.max(...off) }
}

export const neighbourExperiments = [noisy, slow, herd]
