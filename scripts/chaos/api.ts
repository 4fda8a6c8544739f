import { lock, waitingFor } from '../../test/support/database.ts'
import { waitFor } from '../../test/support/wait.ts'
import { percentile } from '../percentile.ts'
import type { Experiment } from './experiment.ts'
import type { Running } from './fleet.ts'
import { round, triesIn } from './measure.ts'
import { type Publish, sleep } from './publisher.ts'
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

const bequeathed: Experiment = {
  id: 'F18',
  title: 'keys held by requests of an API that is killed with -9, also in the middle of their commit',
  async run(world) {
    const rounds = world.quick ? 1 : 5
    world.load({ rate: 20 })
    const cut = { running: [] as number[], stored: [] as number[] }
    for (let nth = 0; nth < rounds; nth++) {
      cut.running.push(...(await killWhileRunning(world)))
      cut.stored.push(...(await killWhileStored(world)))
    }
    await world.quiesce()
    return {
      figures: {
        kills: rounds * 2,
        cut_off: cut.running.length,
        cut_off_in_commit: cut.stored.length,
        accepted_after_max_s: round(Math.max(...cut.running)),
        accepted_after_max_s_in_commit: round(Math.max(...cut.stored)),
      },
      conditions: {
        'requests were cut off, in the middle of a commit as well': cut.running.length > 0 && cut.stored.length > 0,
        'each key is good for its retry at another API within 5 s': Math.max(...cut.running, ...cut.stored) <= 5,
      },
    }
  },
}

const burst = (world: World) => Array.from({ length: 100 }, () => world.publish())

/** The first of the burst is answered when the API dies; after a drawn time all of them could be. */
async function killWhileRunning(world: World): Promise<number[]> {
  const [api] = world.fleet.running('api')
  await world.fleet.start('api')
  const publishes = burst(world)
  await Promise.race(publishes)
  return await killAndWait(world, api!, publishes)
}

/** Keys are inserted, and the rest of the transaction waits for a lock, when the API dies. */
async function killWhileStored(world: World): Promise<number[]> {
  const { sql } = world.database
  const [api] = world.fleet.running('api')
  // Before the lock: on a slow machine a start takes longer than publishes wait.
  await world.fleet.start('api')
  const unlock = await lock(sql, 'waybill.events in share row exclusive mode')
  const publishes = burst(world)
  const waiting = async () => (await waitingFor(sql, 'waybill.events')) >= world.fleet.running('api').length
  await waitFor(waiting, { what: 'publishes of both to wait for the lock' })
  const seconds = killAndWait(world, api!, publishes)
  await sleep(world.random.integer(0, 2000))
  await unlock()
  return await seconds
}

/** Seconds from the kill until each publish that it cut off is accepted. */
async function killAndWait(world: World, api: Running, publishes: Promise<Publish>[]): Promise<number[]> {
  const at = Date.now()
  await world.fleet.kill(api)
  const cut = (await Promise.all(publishes)).filter(({ tries }) => tries[0]?.status === null)
  return cut.map(({ acceptedAt }) => ((acceptedAt ?? Number.POSITIVE_INFINITY) - at) / 1000)
}

const restarted: Experiment = {
  id: 'F6',
  title: 'rolling restarts under load: 2 APIs, 2 workers',
  setup: { apis: 2, workers: 2 },
  // On a busy machine a start takes ten seconds and more.
  limitSeconds: 900,
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
    const cut = tries.filter(({ status, sent }) => status === null && sent)
    const [before, during] = [p99(world, calm, begun), p99(world, begun, ended)]
    return {
      figures: {
        restarts: rounds * 4,
        repeated_for_no_connection: tries.filter(({ sent }) => !sent).length,
        cut_off: cut.length,
        publish_p99_ms: during,
        publish_p99_ms_before: before,
      },
      conditions: {
        'every process ends with 0': exits.size === 1 && exits.has(0),
        'no publish fails': world.published.every(({ eventId }) => eventId !== null),
        // A client may send on a kept connection just as it is closed.
        'no request is cut off, but one in each stop of an API': cut.length <= 2 * rounds,
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
  return percentile(times, 0.99)
}

export const apiExperiments = [killed, restarted, bequeathed]
