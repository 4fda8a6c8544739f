import { cleanUp } from '../../test/support/cleanup.ts'
import { connect, lock } from '../../test/support/database.ts'
import { waitFor } from '../../test/support/wait.ts'
import { percentile } from '../percentile.ts'
import { withSql } from './cluster.ts'
import type { Experiment } from './experiment.ts'
import { failed, goesOnAfter, isAnswered, round, slowest, terminate, triesIn, watchHealth } from './measure.ts'
import { sleep } from './publisher.ts'

const stopped: Experiment = {
  id: 'F7',
  title: 'Postgres stopped at once for 5 s',
  async run(world) {
    const load = world.load({ rate: 50 })
    await sleep(world.random.integer(2000, 3000))
    const asked = Date.now()
    const health = watchHealth(world)
    await world.cluster.stop('immediate')
    world.fault(asked)
    await sleep(5000)
    await world.cluster.start()
    const back = Date.now()
    const first = (await goesOnAfter(world, back)).delivered - back
    await sleep(2000)
    const looks = await health.stop()
    await load.stop()
    await world.quiesce()
    const during = triesIn(world, asked, back)
    const slowestMs = slowest(during)
    return {
      figures: {
        failed_publishes: failed(during),
        publish_max_ms: slowestMs,
        health_max_ms: slowest(looks),
        first_delivery_s: round(first / 1000),
      },
      conditions: {
        'each publish is answered within 5 s': slowestMs <= 5000,
        'each publish that fails is a 500 in the error shape': during.every(isAnswered),
        'health says so, within 1.5 s': looks.some(({ isWell }) => !isWell) && slowest(looks) <= 1500,
        'the first delivery comes within 5 s of the database': first <= 5000,
      },
    }
  },
}

const terminated: Experiment = {
  id: 'F8',
  title: 'every backend terminated, five times',
  async run(world) {
    const times = world.quick ? 3 : 5
    const load = world.load({ rate: 50 })
    let terminated = 0
    const begun = Date.now()
    for (let nth = 0; nth < times; nth++) {
      await sleep(world.random.integer(500, 2000))
      await waitFor(async () => {
        const at = Date.now()
        const gone = await terminate(world)
        if (gone > 0) world.fault(at)
        terminated += gone
        return gone > 0
      })
    }
    await sleep(1000)
    const ended = Date.now()
    // With those that are not answered yet, which may be the slowest.
    await load.stop()
    await world.quiesce()
    const tries = triesIn(world, begun, ended)
    const slowestMs = slowest(tries)
    return {
      figures: { terminated, failed_publishes: failed(tries), publish_max_ms: slowestMs },
      conditions: {
        'each publish is answered, in the error shape when it fails': tries.every(isAnswered),
      },
      inTime: {
        'connections are open again each time': terminated >= 5 * times,
        'each publish is answered within 5 s': slowestMs <= 5000,
      },
    }
  },
}

const forgotten: Experiment = {
  id: 'F9',
  title: 'connections to Postgres half-open, then nothing passes for 8 s',
  setup: { proxied: true },
  async run(world) {
    const load = world.load({ rate: 20 })
    await sleep(world.random.integer(2000, 3000))
    const health = watchHealth(world)
    const at = Date.now()
    world.proxy.freeze()
    world.proxy.thaw()
    const forgotten = world.proxy.frozen()
    world.fault(at)
    const { accepted, delivered } = await goesOnAfter(world, at + 100)
    const frozen = Date.now()
    world.proxy.freeze()
    await sleep(8000)
    await world.proxy.restore()
    world.fault(frozen)
    const back = Date.now()
    const again = (await goesOnAfter(world, back)).delivered - back
    await sleep(2000)
    const looks = await health.stop()
    const ended = Date.now()
    await load.stop()
    await world.quiesce()
    const tries = triesIn(world, at, ended)
    const slowestMs = slowest(tries)
    const [accept_s, deliver_s] = [(accepted - at) / 1000, (delivered - at) / 1000]
    return {
      figures: {
        connections_forgotten: forgotten,
        failed_while_nothing_passed: failed(triesIn(world, frozen, back)),
        accepted_after_s: round(accept_s),
        delivered_after_s: round(deliver_s),
        delivered_again_s: round(again / 1000),
        publish_max_ms: slowestMs,
        health_max_ms: slowest(looks),
      },
      conditions: {
        'connections were half-open, and nothing passed': forgotten > 0 && failed(triesIn(world, frozen, back)) > 0,
        'publishing goes on within 15 s': accept_s <= 15,
        'delivering goes on within 15 s': deliver_s <= 15,
        'delivering goes on within 5 s when everything passes again': again <= 5000,
        'each publish is answered within 5 s': slowestMs <= 5000 && tries.every(isAnswered),
        'health answers within 1.5 s': slowest(looks) <= 1500,
      },
    }
  },
}

const disturbed: Experiment = {
  id: 'F10',
  title: 'Postgres 200 ms away, connections reset',
  setup: { proxied: true },
  async run(world) {
    const load = world.load({ rate: 20 })
    await sleep(1000)
    world.proxy.disturb({ delayMs: 200, resets: 0.05, random: world.random.next })
    const begun = Date.now()
    await sleep(world.quick ? 5000 : 20_000)
    const ended = Date.now()
    await load.stop()
    const tries = triesIn(world, begun, ended)
    const at = Date.now()
    await world.proxy.restore()
    world.fault(at)
    await world.quiesce()
    const times = tries.map(({ ms }) => ms)
    const p99 = percentile(times, 0.99)
    return {
      figures: {
        resets: world.proxy.resets(),
        failed_publishes: failed(tries),
        publish_p50_ms: percentile(times, 0.5),
        publish_p99_ms: p99,
      },
      conditions: {
        'each round trip takes 200 ms, and connections were reset':
          percentile(times, 0.5) >= 200 && world.proxy.resets() > 0,
        'the p99 of publishing is at most 3 s': p99 <= 3000,
        'each publish that fails is a 500 in the error shape': tries.every(isAnswered),
      },
    }
  },
}

const exhausted: Experiment = {
  id: 'F11',
  title: '200 publishes at once, all connections taken',
  async run(world) {
    await world.publish()
    // 1. Every connection of the service waits for a lock that somebody holds.
    const unlock = await lock(world.database.sql, 'waybill.events in access exclusive mode')
    const asked = Date.now()
    const first = Array.from({ length: 200 }, () => world.publish())
    await sleep(8000)
    const during = triesIn(world, asked, Date.now())
    const open = world.published.filter(({ tries }) => tries.length === 0).length
    await unlock()
    const released = Date.now()
    await Promise.race(first)
    const recoveredMs = Date.now() - released
    await Promise.all(first)

    // 2. Postgres has no connection left.
    const hoard = connect(world.database.url, 200)
    cleanUp(world.scope, () => hoard.end(1000))
    const free = Promise.withResolvers<void>()
    let holding = true
    const hold = async () => {
      while (holding) await hoard.begin(() => free.promise).catch(() => sleep(200))
    }
    const isFull = () =>
      withSql(world.database.url, (sql) => sql`select`).then(
        () => false,
        () => true,
      )
    // The service would take a free connection as soon as it has lost one.
    const paused = world.fleet.running()
    for (const one of paused) one.signal('SIGSTOP')
    await terminate(world)
    const hoarding = Array.from({ length: 200 }, hold)
    await waitFor(isFull, { timeoutMs: 30_000, what: 'all connections to be taken' })
    for (const one of paused) one.signal('SIGCONT')
    const askedAgain = Date.now()
    const second = Array.from({ length: 200 }, () => world.publish())
    await sleep(6000)
    holding = false
    free.resolve()
    await Promise.all(hoarding)
    await hoard.end(1000)
    const freed = Date.now()
    const duringAgain = triesIn(world, askedAgain, freed)
    await Promise.all(second)
    const recoveredAgainMs = Date.now() - freed
    await world.quiesce()
    const tries = [...during, ...duringAgain]
    const slowestMs = slowest(tries)
    return {
      figures: {
        locked_failed: failed(during),
        locked_unanswered: open,
        full_failed: failed(duringAgain),
        publish_max_ms: slowestMs,
        recovered_ms: recoveredMs,
        recovered_all_ms: recoveredAgainMs,
      },
      conditions: {
        'all failed behind the lock, and without a connection': failed(during) >= 200 && failed(duringAgain) >= 200,
        'each publish waits at most 5 s': slowestMs <= 5000 && open === 0,
        'each that fails is a 500 in the error shape': tries.every(isAnswered),
        'publishing goes on within 2 s of the lock': recoveredMs <= 2000,
      },
    }
  },
}

const readOnly: Experiment = {
  id: 'F12',
  title: 'Postgres read-only for 5 s',
  async run(world) {
    const { sql } = world.database
    const set = async (value: string) => {
      await sql.text(`alter system ${value}`)
      await sql`select pg_reload_conf()`
    }
    cleanUp(world.scope, () => set('reset default_transaction_read_only'))
    const load = world.load({ rate: 50 })
    await sleep(world.random.integer(1000, 2000))
    const at = Date.now()
    await set('set default_transaction_read_only = on')
    // Statements that had begun before.
    await sleep(500)
    world.fault(at)
    const begun = Date.now()
    await sleep(5000)
    const ended = Date.now()
    await set('reset default_transaction_read_only')
    const { accepted, delivered } = await goesOnAfter(world, ended)
    await load.stop()
    await world.quiesce()
    const tries = triesIn(world, begun, ended).filter(({ at, ms }) => at > begun && at + ms < ended)
    const resumed = Math.max(accepted, delivered) - ended
    return {
      figures: {
        failed_publishes: failed(tries),
        publish_max_ms: slowest(tries),
        resumed_s: round(resumed / 1000),
      },
      conditions: {
        'nothing is accepted meanwhile, and each answer has the error shape':
          tries.length > 0 && tries.every((one) => isAnswered(one) && one.status === 500),
        'publishing and delivering go on within 5 s': resumed <= 5000,
      },
    }
  },
}

export const databaseExperiments = [stopped, terminated, forgotten, disturbed, exhausted, readOnly]
