import { waitFor } from '../../test/support/wait.ts'
import type { Experiment } from './experiment.ts'
import { round, triesIn, watchHealth } from './measure.ts'
import { sleep } from './publisher.ts'

const stopped: Experiment = {
  id: 'F7',
  title: 'Postgres stopped at once for 5 s',
  async run(world) {
    const load = world.load({ rate: 50 })
    await sleep(world.random.integer(2000, 3000))
    world.allow(await world.inFlight())
    const asked = Date.now()
    const health = watchHealth(world)
    await world.cluster.stop('immediate')
    await sleep(5000)
    await world.cluster.start()
    const back = Date.now()
    await waitFor(() => world.ledger.receipts.some(({ at }) => at > back), { what: 'a delivery after the outage' })
    await sleep(2000)
    const { slowestMs, unhealthy } = await health.stop()
    await load.stop()
    await world.quiesce()
    const during = triesIn(world, asked, back)
    const slowest = Math.max(...during.map(({ ms }) => ms))
    const first = Math.min(...world.ledger.receipts.map(({ at }) => at).filter((at) => at > back)) - back
    return {
      figures: {
        failed_publishes: during.filter(({ status }) => status !== 202).length,
        publish_max_ms: slowest,
        health_max_ms: slowestMs,
        first_delivery_s: round(first / 1000),
      },
      conditions: {
        'each publish is answered within 5 s': slowest <= 5000,
        'each publish that fails is a 500 in the error shape': during.every(
          ({ status, shaped }) => status !== null && shaped && status <= 500,
        ),
        'health says so, within 1.5 s': unhealthy > 0 && slowestMs <= 1500,
        'the first delivery comes within 5 s of the database': first <= 5000,
      },
    }
  },
}

export const databaseExperiments = [stopped]
