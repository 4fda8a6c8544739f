import { isDeepStrictEqual } from 'node:util'
import { waitFor } from '../../test/support/wait.ts'
import { percentile } from '../percentile.ts'
import type { Experiment } from './experiment.ts'
import type { Receipt } from './ledger.ts'
import { resentAfter, round, slowAtFirst, slowest, triesIn } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const SURVIVORS = 1

const killed: Experiment = {
  id: 'F1',
  title: 'kill -9 of 4 workers of 5 at once, again and again',
  setup: { workers: 5 },
  async run(world) {
    const { sql } = world.database
    const rounds = world.quick ? 1 : 5
    slowAtFirst(world, 2000)
    world.load({ rate: 20 })
    const resent: number[] = []
    for (let nth = 0; nth < rounds; nth++) {
      await waitFor(() => world.ledger.open().length > 20, { what: 'deliveries to be under way' })
      await sleep(world.random.integer(0, 2000))
      const workers = world.fleet.running('worker')
      const open = world.ledger.open()
      const at = Date.now()
      await Promise.all(workers.slice(SURVIVORS).map(world.fleet.kill))
      world.fault(at)
      await Promise.all(workers.slice(SURVIVORS).map(() => world.fleet.start('worker')))
      const ids = open.map(({ deliveryId }) => deliveryId)
      const left = () =>
        sql`select from waybill.deliveries where delivery_id = any(${ids}::uuid[]) and status <> 'delivered'`
      await waitFor(async () => (await left()).length === 0, { timeoutMs: 60_000, what: 'orphans to be delivered' })
      // What the survivors had came once.
      resent.push(...resentAfter(world, open, at).filter(Number.isFinite))
    }
    const most = Math.max(...resent)
    return {
      figures: {
        kills: rounds * 4,
        orphans: resent.length,
        resent_p50_s: round(percentile(resent, 0.5)),
        resent_max_s: round(most),
      },
      conditions: { 'orphans are sent again': resent.length > 0 },
      inTime: { 'every orphan is sent again within 15 s of the kill': most <= 15 },
    }
  },
}

const killedUnrecorded: Experiment = {
  id: 'F2',
  title: 'kill -9 between the 200 and its record',
  setup: { workers: 0, proxied: true },
  async run(world) {
    const rounds = world.quick ? 1 : 3
    const perEvent = world.active.length
    let arrived = Promise.withResolvers<void>()
    let hold = Promise.withResolvers<void>()
    for (const endpoint of world.active) {
      endpoint.reply = async (receipt, nth) => {
        if (nth > 1) return 200
        if (world.ledger.open().filter(({ eventId }) => eventId === receipt.eventId).length === perEvent)
          arrived.resolve()
        await hold.promise
        return 200
      }
    }
    // The API must go on: only the worker's way to the database ends.
    const [api] = world.fleet.running('api')
    await world.fleet.start('api', { databaseUrl: world.database.url })
    await world.fleet.stop(api!)
    const faults: { at: number; orphans: Receipt[] }[] = []
    for (let nth = 0; nth < rounds; nth++) {
      arrived = Promise.withResolvers()
      hold = Promise.withResolvers()
      const worker = await world.fleet.start('worker')
      await world.publish()
      await arrived.promise
      const orphans = world.ledger.open()
      world.proxy.freeze()
      world.proxy.thaw()
      hold.resolve()
      await waitFor(() => world.ledger.open().length === 0, { what: 'all to be answered' })
      // Long enough for the answers to arrive, and far too short for a lost connection to be noticed.
      await sleep(world.random.integer(50, 300))
      faults.push({ at: Date.now(), orphans })
      await world.fleet.kill(worker)
      await world.proxy.restore()
      world.allowed += perEvent
      // The next one, which is killed as well, must not have these in hand.
      const successor = await world.fleet.start('worker')
      await world.quiesce()
      await world.fleet.stop(successor)
    }
    const ids = faults.flatMap(({ orphans }) => orphans.map(({ deliveryId }) => deliveryId))
    const seconds = faults.flatMap(({ at, orphans }) => resentAfter(world, orphans, at))
    const records = await Promise.all(
      ids.map(async (id) => {
        const { body } = await world.call('GET', `/v1/deliveries/${id}/attempts`)
        return body.data.map((attempt: Attempt) => [attempt.error, attempt.status_code])
      }),
    )
    return {
      figures: { rounds, resent_max_s: round(Math.max(...seconds)) },
      conditions: {
        'each delivery comes exactly twice': ids.every((id) => world.ledger.of(id).length === 2),
        'attempt 1 is shown as worker_lost, and 2 as delivered': records.every((record) =>
          isDeepStrictEqual(record, [
            ['worker_lost', null],
            [null, 200],
          ]),
        ),
        'each is sent again within 15 s of the kill': Math.max(...seconds) <= 15,
      },
    }
  },
}

type Attempt = { error: string | null; status_code: number | null }

const zombie: Experiment = {
  id: 'F4',
  title: 'SIGSTOP of a worker for 30 s, SIGCONT',
  async run(world) {
    const stolen = new Set<Receipt>()
    let isAlone = false
    for (const endpoint of world.active) {
      endpoint.reply = async (receipt, nth) => {
        if (isAlone) stolen.add(receipt)
        if (nth === 1) await sleep(2000)
        // What the sleeper finds when it wakes would dead-letter the delivery and set the endpoint inactive.
        return stolen.has(receipt) ? 410 : 200
      }
    }
    const load = world.load({ rate: 20 })
    const sleeper = world.fleet.running('worker')[0]!
    await waitFor(() => world.ledger.open().length > 20, { what: 'deliveries to be under way' })
    await sleep(world.random.integer(0, 1000))
    const at = Date.now()
    sleeper.signal('SIGSTOP')
    for (const receipt of world.ledger.open()) stolen.add(receipt)
    // What it had sent by then arrives.
    isAlone = true
    await sleep(1000)
    isAlone = false
    world.fault(at)
    await world.fleet.start('worker')
    await sleep(30_000)
    await load.stop()
    sleeper.signal('SIGCONT')
    const lines = () =>
      sleeper.logs.filter(({ msg, delivery_id }) => msg === 'delivery.attempted' && ids.has(String(delivery_id)))
    const ids = new Set([...stolen].map(({ deliveryId }) => deliveryId))
    await waitFor(() => lines().length >= stolen.size, { what: 'the sleeper to see what came of its requests' }).catch(
      () => {},
    )
    await world.quiesce()
    const seconds = resentAfter(world, [...stolen], at)
    const publishMs = slowest(triesIn(world, at, at + 30_000))
    const endpoints: { is_active: boolean; url: string }[] = (await world.call('GET', '/v1/endpoints?active_only=true'))
      .body.data
    return {
      figures: {
        stolen: stolen.size,
        zombie_records: lines().filter(({ settled }) => settled === true).length,
        resent_max_s: round(Math.max(...seconds)),
        publish_max_ms: publishMs,
      },
      conditions: {
        'the sleeper learns what came of its requests': lines().length > 0,
        'and records nothing of what was taken over': lines().every(({ settled }) => settled === false),
        'the endpoints are active: its answers of 410 did not count': endpoints.length === world.active.length,
        'each is sent again within 15 s': Math.max(...seconds) <= 15,
        'each publish meanwhile is answered within 5 s': publishMs <= 5000,
      },
    }
  },
}

const drained: Experiment = {
  id: 'F5',
  title: 'SIGTERM with 50 in flight for 3 s, and a second one',
  async run(world) {
    slowAtFirst(world, 3000)
    const load = world.load({ rate: 25 })
    await waitFor(() => world.ledger.open().length >= 50, { what: '50 deliveries to be under way' })
    const worker = world.fleet.running('worker')[0]!
    const inFlight = world.ledger.open().length
    const asked = Date.now()
    const exit = await world.fleet.stop(worker)
    const drainSeconds = (Date.now() - asked) / 1000
    const late = world.ledger.receipts.filter(({ at }) => at > asked + 100).length

    const second = await world.fleet.start('worker')
    await waitFor(() => world.ledger.open().length >= 50, { what: '50 more deliveries to be under way' })
    const orphans = world.ledger.open()
    const stopping = world.fleet.stop(second)
    await second.logged('service.stopping')
    const askedAgain = Date.now()
    const cut = await world.fleet.stop(second)
    const cutMs = Date.now() - askedAgain
    await stopping
    world.fault(askedAgain)
    await world.fleet.start('worker')
    await load.stop()
    await world.quiesce()
    const resent = Math.max(...resentAfter(world, orphans, askedAgain))
    return {
      figures: {
        in_flight: inFlight,
        drain_s: round(drainSeconds),
        claimed_late: late,
        cut_ms: cutMs,
        resent_max_s: round(resent),
      },
      conditions: {
        'SIGTERM ends it with 0': exit.code === 0,
        'it ends within the grace of 20 s': drainSeconds <= 20,
        'nothing is claimed from 100 ms after SIGTERM': late === 0,
        'none of the first 50 comes twice': countTwice(world, asked) === 0,
        'a second SIGTERM ends it with 1, at once': cut.code === 1 && cutMs < 1000,
        'what it left is sent again within 15 s': resent <= 15,
      },
    }
  },
}

/** Deliveries that came before a moment and more than once in all. */
const countTwice = (world: World, before: number) =>
  new Set(world.ledger.receipts.filter(({ at }) => at < before).map(({ deliveryId }) => deliveryId))
    .values()
    .filter((id) => world.ledger.of(id).length > 1)
    .toArray().length

export const workerExperiments = [killed, killedUnrecorded, zombie, drained]
