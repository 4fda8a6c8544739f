import {
  COLLECTING,
  filesLeft,
  judgeTable,
  type Memory,
  risePerHour,
  startBacklog,
  watchJobs,
  watchProcess,
} from './drift.ts'
import type { Experiment } from './experiment.ts'
import type { Running } from './fleet.ts'
import { failed, terminate } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const RATE = 25
const MAX_MIB_PER_HOUR = 2
/** What a pool may have opened since, and keeps for some minutes; one for each fault would be three times as many. */
const MAX_FILES_MORE = 5
const MINUTES = 30
/** Before that, as busy: caches, pools and pages fill up to what the load takes, and V8 compiles what runs now and then. */
const WARM_UP_MINUTES = 20
const FAULT_EVERY_MS = 60_000
const OUTAGE_MS = 5000

const soaked: Experiment = {
  id: 'F44',
  title: `a soak: ${MINUTES} minutes of load after ${WARM_UP_MINUTES} to warm up, and F1, F7 or F8 by chance in each`,
  setup: { workers: 0, flags: COLLECTING },
  limitSeconds: (WARM_UP_MINUTES + MINUTES + 5) * 60,
  async run(world) {
    // As many as are delivered within a minute.
    const release = await startBacklog(world, RATE * 2.5 * 60)
    const [api] = world.fleet.running('api')
    const [survivor] = await Promise.all([world.fleet.start('worker'), world.fleet.start('worker')])
    const watches = [watchProcess(world, api!), watchProcess(world, survivor)]
    const table = watchJobs(world)
    const load = world.load({ rate: RATE })
    const made: Record<keyof typeof FAULTS, number> = { F1: 0, F7: 0, F8: 0 }
    const [every, warmUp, lasts] = world.quick
      ? [20_000, 45_000, 90_000]
      : [FAULT_EVERY_MS, WARM_UP_MINUTES * 60_000, (WARM_UP_MINUTES + MINUTES) * 60_000]
    const begun = Date.now()
    // The last minute is calm, to show what is left.
    for (let from = begun; from + every < begun + lasts; from += every) {
      await sleep(from + world.random.integer(0, every - 2 * OUTAGE_MS) - Date.now())
      const fault = world.random.pick(Object.keys(FAULTS) as (keyof typeof FAULTS)[])
      await FAULTS[fault](world, survivor)
      made[fault]++
      await sleep(from + every - Date.now())
    }
    await sleep(begun + lasts - Date.now())
    const steady = <T extends { at: number }>(noted: T[]) => noted.filter(({ at }) => at >= begun + warmUp)
    const [ofApi, ofWorker] = (await Promise.all(watches.map(({ stop }) => stop()))).map(steady)
    const jobs = judgeTable(steady(await table.stop()))
    await load.stop()
    await release()
    await world.quiesce()
    const memory = { api: riseOf(ofApi!, 'rss'), worker: riseOf(ofWorker!, 'rss') }
    const used = { api: riseOf(ofApi!, 'used'), worker: riseOf(ofWorker!, 'used') }
    const code = { api: riseOf(ofApi!, 'code'), worker: riseOf(ofWorker!, 'code') }
    const files = { api: filesLeft(ofApi!), worker: filesLeft(ofWorker!) }
    return {
      figures: {
        faults: Object.entries(made)
          .map(([id, times]) => `${times} × ${id}`)
          .join(' '),
        failed_publishes: failed(world.published.flatMap(({ tries }) => tries)),
        api_MiB_per_h: `${memory.api.rise} ± ${memory.api.off}`,
        api_heap_MiB_per_h: `${used.api.rise} ± ${used.api.off}`,
        api_code_MiB_per_h: `${code.api.rise} ± ${code.api.off}`,
        worker_MiB_per_h: `${memory.worker.rise} ± ${memory.worker.off}`,
        worker_heap_MiB_per_h: `${used.worker.rise} ± ${used.worker.off}`,
        worker_code_MiB_per_h: `${code.worker.rise} ± ${code.worker.off}`,
        api_files_more: files.api,
        worker_files_more: files.worker,
        ...jobs.figures,
      },
      conditions: {
        'no publish is refused': world.published.every(({ eventId }) => eventId !== null),
        // A short run is all warm-up.
        ...(!world.quick && {
          'memory grows by at most 2 MiB an hour': Math.max(memory.api.rise, memory.worker.rise) <= MAX_MIB_PER_HOUR,
          'no files stay open': Math.max(files.api, files.worker) <= MAX_FILES_MORE,
          ...jobs.conditions,
        }),
      },
    }
  },
}

const riseOf = (noted: Memory[], what: 'rss' | 'used' | 'code') => risePerHour(noted.map((one) => [one.at, one[what]]))

/** Each leaves everything as it was, but for what was in flight. */
const FAULTS = {
  async F1(world: World, survivor: Running) {
    const at = Date.now()
    await Promise.all(
      world.fleet
        .running('worker')
        .filter((one) => one !== survivor)
        .map(world.fleet.kill),
    )
    world.fault(at)
    await world.fleet.start('worker')
  },
  async F7(world: World) {
    const at = Date.now()
    await world.cluster.stop('immediate')
    world.fault(at)
    await sleep(OUTAGE_MS)
    await world.cluster.start()
  },
  async F8(world: World) {
    const at = Date.now()
    if ((await terminate(world)) === 0) throw new Error('there was no connection to end')
    world.fault(at)
  },
}

export const soakExperiments = [soaked]
