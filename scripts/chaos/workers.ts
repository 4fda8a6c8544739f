import { waitFor } from '../../test/support/wait.ts'
import type { Experiment } from './experiment.ts'
import type { Receipt } from './ledger.ts'
import { resentAfter, round, slowAtFirst } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const killed: Experiment = {
  id: 'F1',
  title: 'kill -9 of a worker, again and again',
  async run(world) {
    const kills = world.quick ? 2 : 20
    slowAtFirst(world, 2000)
    world.load({ rate: 20 })
    let worker = world.fleet.running('worker')[0]!
    const faults: { at: number; orphans: Receipt[] }[] = []
    let since = await world.now()
    for (let nth = 0; nth < kills; nth++) {
      const last = faults.at(-1)?.at ?? 0
      // Those of the workers before are answered late, to nobody.
      const open = () => world.ledger.open().filter(({ at }) => at > last)
      await waitFor(() => open().length > 5, { what: 'deliveries to be under way' })
      await sleep(world.random.integer(0, 2000))
      const fault = { at: Date.now(), orphans: open() }
      await world.fleet.kill(worker)
      faults.push(fault)
      world.allow(await world.inFlight(since))
      since = await world.now()
      worker = await world.fleet.start('worker')
    }
    await world.quiesce()
    const seconds = faults.flatMap(({ at, orphans }) => resentAfter(world, orphans, at)).sort((a, b) => a - b)
    const most = seconds.at(-1) ?? 0
    return {
      figures: {
        kills,
        orphans: seconds.length,
        resent_p50_s: round(seconds[seconds.length >> 1] ?? 0),
        resent_max_s: round(most),
      },
      conditions: { 'every orphan is sent again within 15 s of the kill': most <= 15 },
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
    world.allow(await world.inFlight())
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

export const workerExperiments = [killed, drained]
