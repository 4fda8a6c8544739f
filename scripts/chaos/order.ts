import type { Experiment } from './experiment.ts'
import type { Endpoint } from './ledger.ts'
import { terminate } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const ENDPOINTS = 4

/** Publishes to ordered endpoints, which answer every tenth first attempt with 500; `beside` counts those that found another under way. */
async function addOrdered(world: World) {
  const tenant = await world.addTenant()
  const seen = { beside: 0 }
  const endpoints = []
  for (let nth = 0; nth < ENDPOINTS; nth++) {
    const open = new Set<string>()
    const endpoint = await world.addEndpoint(`/ordered-${nth}`, {
      tenant,
      types: [`order.${nth}`],
      reply: async ({ deliveryId }, attempt) => {
        if ([...open].some((other) => other !== deliveryId)) seen.beside++
        open.add(deliveryId)
        await sleep(world.random.integer(5, 250))
        open.delete(deliveryId)
        return attempt === 1 && world.random.next() < 0.1 ? 500 : 200
      },
    })
    const path = `/v1/endpoints/${endpoint.endpointId}`
    const { status } = await world.call('PATCH', path, { key: tenant.key, body: { ordered: true } })
    if (status !== 200) throw new Error(`an endpoint could not be made ordered: ${status}`)
    world.load({ rate: 4, types: [`order.${nth}`], tenant })
    endpoints.push(endpoint)
  }
  return { endpoints, seen }
}

/** How many came first after one that was asked for only when they had been accepted already. */
function overtaken(world: World, endpoint: Endpoint): number {
  const publishes = new Map(world.published.map((publish) => [publish.eventId, publish]))
  let latest = 0
  let count = 0
  for (const receipt of world.ledger.at(endpoint)) {
    if (world.ledger.of(receipt.deliveryId)[0] !== receipt) continue
    const publish = publishes.get(receipt.eventId)
    if ((publish?.acceptedAt ?? Number.POSITIVE_INFINITY) < latest) count++
    latest = Math.max(latest, publish?.tries[0]?.at ?? 0)
  }
  return count
}

const FAULTS = {
  async killed(world: World) {
    const at = Date.now()
    await world.fleet.kill(world.random.pick(world.fleet.running('worker')))
    world.fault(at)
    await world.fleet.start('worker')
  },
  async stopped(world: World) {
    await world.fleet.stop(world.random.pick(world.fleet.running('worker')))
    await world.fleet.start('worker')
  },
  async paused(world: World) {
    const at = Date.now()
    const worker = world.random.pick(world.fleet.running('worker'))
    worker.signal('SIGSTOP')
    await sleep(world.random.integer(8000, 14_000))
    worker.signal('SIGCONT')
    world.fault(at)
  },
  async disconnected(world: World) {
    const at = Date.now()
    await terminate(world)
    world.fault(at)
  },
}

const ordered: Experiment = {
  id: 'F45',
  title: 'ordered endpoints, while workers are killed, stopped and paused, and connections ended',
  setup: { workers: 3, env: { RETRY_DELAY_SECONDS: '1', RETRY_DELAY_MAX_SECONDS: '2' } },
  limitSeconds: 900,
  async run(world) {
    const { endpoints, seen } = await addOrdered(world)
    const rounds = world.quick ? 1 : 3
    for (let round = 0; round < rounds; round++)
      for (const make of Object.values(FAULTS)) {
        await make(world)
        await sleep(world.random.integer(2000, 8000))
      }
    await world.quiesce(200_000)
    const early = endpoints.reduce((sum, endpoint) => sum + overtaken(world, endpoint), 0)
    const arrived = endpoints.map((endpoint) => world.ledger.at(endpoint).length)
    return {
      figures: { arrived: arrived.reduce((sum, n) => sum + n, 0), overtaken: early, side_by_side: seen.beside },
      conditions: {
        'they come to each endpoint': arrived.every((n) => n > 20),
        'they come in order': early === 0,
        'they come one at a time': seen.beside === 0,
      },
    }
  },
}

export const orderExperiments = [ordered]
