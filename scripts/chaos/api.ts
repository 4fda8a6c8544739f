import { percentile } from '../bench/helper.ts'
import type { Experiment } from './experiment.ts'
import { triesIn } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const killed: Experiment = {
  id: 'F3',
  title: 'kill -9 of the API with 200 publishes in flight',
  async run(world) {
    const kills = world.quick ? 2 : 5
    world.load({ rate: 50 })
    for (let nth = 0; nth < kills; nth++) {
      const [api] = world.fleet.running('api')
      await sleep(world.random.integer(300, 1000))
      const burst = Array.from({ length: 200 }, (_, n) => world.publish({ key: `burst-${nth}-${n}` }))
      await sleep(world.random.integer(5, 60))
      await world.fleet.kill(api!)
      await world.fleet.start('api')
      await Promise.all(burst)
    }
    await world.quiesce()
    const unknown = world.published.flatMap(({ tries }) => tries).filter(({ status }) => status === null)
    return {
      figures: { kills, requests_without_answer: unknown.length },
      conditions: {
        'requests were cut off': unknown.length > 0,
        'each publish is accepted in the end': world.published.every(({ eventId }) => eventId !== null),
      },
    }
  },
}

const restarted: Experiment = {
  id: 'F6',
  title: 'rolling restarts under load: 2 APIs, 2 workers',
  setup: { apis: 2, workers: 2 },
  async run(world) {
    const rounds = world.quick ? 1 : 5
    world.load({ rate: 50 })
    await sleep(1000)
    const calm = Date.now()
    await sleep(5000)
    const begun = Date.now()
    const exits = new Set<number | null>()
    for (let nth = 0; nth < rounds; nth++) {
      for (const one of world.fleet.running()) {
        // Behind a load balancer the new one is there before the old one goes.
        await world.fleet.start(one.mode)
        exits.add((await world.fleet.stop(one)).code)
      }
    }
    const ended = Date.now()
    await world.quiesce()
    const tries = triesIn(world, begun, ended)
    const [before, during] = [p99(world, calm, begun), p99(world, begun, ended)]
    return {
      figures: {
        restarts: rounds * 4,
        refused_connections: tries.filter(({ status }) => status === null).length,
        publish_p99_ms: during,
        publish_p99_ms_before: before,
      },
      conditions: {
        'every process ends with 0': exits.size === 1 && exits.has(0),
        'no publish fails': world.published.every(({ eventId }) => eventId !== null),
        'no request is answered with an error': tries.every(({ status }) => status === null || status < 300),
      },
    }
  },
}

/** From the first request of a publish to its acceptance, repeats included. */
function p99(world: World, from: number, to: number): number {
  const times = world.published
    .filter(({ tries }) => tries[0] !== undefined && tries[0].at >= from && tries[0].at < to)
    .map(({ tries, acceptedAt }) => (acceptedAt ?? to) - tries[0]!.at)
  return percentile(
    times.sort((a, b) => a - b),
    0.99,
  )
}

export const apiExperiments = [killed, restarted]
