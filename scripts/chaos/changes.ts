import { waitFor } from '../../test/support/wait.ts'
import type { Experiment } from './experiment.ts'
import type { Endpoint, Receipt } from './ledger.ts'
import { publishMany } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const WAITING = 1000
/** What workers may have been given before the change besides. */
const IN_HAND = 200
/** For so long they may keep what they were given, and send it as it was. */
const IN_HAND_MS = 2000
const PAUSE_MS = 3000
const OVERLAP_S = 20
const NOT_DUE = 'not-due'

const changed: Experiment = {
  id: 'F42',
  title: `an endpoint paused, moved, resubscribed, its secret rotated: each with ${WAITING} deliveries waiting`,
  setup: { apis: 2, workers: 2, env: { ENDPOINT_CONCURRENCY: '10', ROTATION_OVERLAP_SECONDS: String(OVERLAP_S) } },
  async run(world) {
    const { isDue } = world
    world.isDue = (publish, endpoint) =>
      isDue(publish, endpoint) && !(publish.key.startsWith(NOT_DUE) && endpoint.types.includes(publish.type))
    world.load({ rate: 20 })
    const [paused, moved, resubscribed, rotated] = [
      await pause(world),
      await move(world),
      await resubscribe(world),
      await rotate(world),
    ]
    const all = [paused, moved, resubscribed, rotated]
    return {
      figures: {
        waiting_min: Math.min(...all.map(({ waited }) => waited)),
        sent_of_those: `${all.map(({ waited, later }) => `${later.length} of ${waited}`).join(', ')}`,
      },
      conditions: {
        [`${WAITING} waited, and each came once`]: all.every(
          ({ waited, later }) =>
            waited >= WAITING && later.length === waited && new Set(later.map((one) => one.deliveryId)).size === waited,
        ),
        'nothing is sent to an endpoint that is paused, and all that waited afterwards': paused.held,
        'all that waited is sent to the new address': moved.later.every(({ endpoint }) => endpoint === moved.target),
        'all that waited opens with the old secret and with the new one': rotated.later.every(
          ({ opened }) => opened.length === 2,
        ),
        'after the overlap the old one opens nothing': rotated.last.every(
          ({ opened }) => opened.join() === rotated.secret,
        ),
      },
    }
  },
}

/** Changes an endpoint for which deliveries wait, and lets them come once workers have nothing left from before. */
async function amid(world: World, type: string, change: (endpoint: Endpoint) => Promise<unknown>) {
  const first = world.random.integer(1, 50)
  const gate = Promise.withResolvers<void>()
  let arrived = 0
  const reply = async () => {
    if (++arrived > first) await gate.promise
    return 200
  }
  const endpoint = await world.addEndpoint(`/${type}`, { types: [type], reply })
  const sent = () => world.ledger.receipts.filter((receipt) => receipt.endpoint.endpointId === endpoint.endpointId)
  await publishMany(world, WAITING + IN_HAND, type)
  await waitFor(() => arrived > first, { what: `the first deliveries of ${type}` })
  await change(endpoint)
  await sleep(IN_HAND_MS)
  const before = sent().length
  gate.resolve()
  const waited = WAITING + IN_HAND - before
  return {
    endpoint,
    waited,
    /** What has come since, and once all of it has. */
    later: () => sent().slice(before),
    async all(): Promise<Receipt[]> {
      await waitFor(() => sent().length - before >= waited, { timeoutMs: 60_000, what: `all that waited of ${type}` })
      return sent().slice(before)
    },
  }
}

const patch = async (world: World, { endpointId }: Endpoint, body: object) => {
  const { status, text } = await world.call('PATCH', `/v1/endpoints/${endpointId}`, { body })
  if (status !== 200) throw new Error(`PATCH was answered ${status}: ${text}`)
}

async function publishNotDue(world: World, type: string) {
  for (let nth = 0; nth < 10; nth++) await world.publish({ type, key: `${NOT_DUE}-${type}-${nth}` })
}

async function pause(world: World) {
  const { endpoint, waited, later, all } = await amid(world, 'paused', (one) => patch(world, one, { is_active: false }))
  await publishNotDue(world, 'paused')
  await sleep(PAUSE_MS)
  const held = later().length === 0
  await patch(world, endpoint, { is_active: true })
  return { waited, held, later: await all() }
}

async function move(world: World) {
  let target: Endpoint | undefined
  const { waited, all } = await amid(world, 'moved', async (endpoint) => {
    target = { ...endpoint, url: world.ledger.url('/moved-to') }
    world.ledger.attach(target)
    await patch(world, endpoint, { url: target.url })
  })
  return { waited, target, later: await all() }
}

async function resubscribe(world: World) {
  const { endpoint, waited, all } = await amid(world, 'resubscribed', (one) =>
    patch(world, one, { subscribed_events: ['resubscribed.to'] }),
  )
  const later = await all()
  endpoint.types = ['resubscribed', 'resubscribed.to']
  await publishNotDue(world, 'resubscribed')
  const { eventId } = await world.publish({ type: 'resubscribed.to' })
  const next = () => world.ledger.receipts.some((one) => one.eventId === eventId && one.endpoint === endpoint)
  await waitFor(next, { what: 'an event of the new subscription' })
  return { waited, later }
}

async function rotate(world: World) {
  let secret = ''
  let over = 0
  const { endpoint, waited, all } = await amid(world, 'rotated', async (one) => {
    const { status, body, text } = await world.call('POST', `/v1/endpoints/${one.endpointId}/rotate-secret`)
    if (status !== 200) throw new Error(`a rotation was answered ${status}: ${text}`)
    over = Date.now() + OVERLAP_S * 1000
    secret = body.signing_secret
    one.secrets.push(secret)
  })
  const later = await all()
  await sleep(over + IN_HAND_MS - Date.now())
  const since = Date.now()
  await publishMany(world, 10, 'rotated')
  const last = () => world.ledger.at(endpoint).filter(({ at }) => at > since)
  await waitFor(() => last().length >= 10, { what: 'deliveries after the overlap' })
  return { waited, later, secret, last: last() }
}

export const changeExperiments = [changed]
