import { cleanUp } from '../../test/support/cleanup.ts'
import { waitFor } from '../../test/support/wait.ts'
import { residentMemory } from '../bench/usage.ts'
import type { Experiment } from './experiment.ts'
import { openFiles, type Running } from './fleet.ts'
import { failed, jobTable, round } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const MINUTES = 10
const FAULT_EVERY_MS = 60_000
const SAMPLE_MS = 1000
const OUTAGE_MS = 5000

const soaked: Experiment = {
  id: 'F44',
  title: 'a soak: ten minutes of load, and F1, F7 or F8 by chance in each',
  setup: { workers: 2 },
  limitSeconds: (MINUTES + 5) * 60,
  async run(world) {
    const [api] = world.fleet.running('api')
    const [survivor] = world.fleet.running('worker')
    const samples = [sample(world, api!), sample(world, survivor!)]
    const load = world.load({ rate: 25 })
    const made: Record<keyof typeof FAULTS, number> = { F1: 0, F7: 0, F8: 0 }
    const [every, lasts] = world.quick ? [20_000, 90_000] : [FAULT_EVERY_MS, MINUTES * 60_000]
    const begun = Date.now()
    // Perhaps in the middle of an outage.
    const half = sleep(lasts / 2).then(() => waitFor(() => jobTable(world), { what: 'the job table at half time' }))
    // The last minute is calm, to show what is left.
    for (let from = begun; from + every < begun + lasts; from += every) {
      await sleep(from + world.random.integer(0, every - 2 * OUTAGE_MS) - Date.now())
      const fault = world.random.pick(Object.keys(FAULTS) as (keyof typeof FAULTS)[])
      const at = Date.now()
      await FAULTS[fault](world, survivor!)
      world.fault(at)
      made[fault]++
      await sleep(from + every - Date.now())
    }
    await sleep(begun + lasts - Date.now())
    const [before, after] = [await half, await jobTable(world)]
    await load.stop()
    await world.quiesce()
    const [ofApi, ofWorker] = samples.map(({ stop }) => stop())
    return {
      figures: {
        faults: Object.entries(made)
          .map(([id, times]) => `${times} × ${id}`)
          .join(' '),
        failed_publishes: failed(world.published.flatMap(({ tries }) => tries)),
        api_MiB_per_h: ofApi!.mibPerHour,
        worker_MiB_per_h: ofWorker!.mibPerHour,
        api_files_per_h: ofApi!.filesPerHour,
        worker_files_per_h: ofWorker!.filesPerHour,
        jobs_live: after.live,
        jobs_dead: after.dead,
        jobs_table_KiB_at_half: before.kib,
        jobs_table_KiB: after.kib,
      },
      conditions: {
        'no publish is refused': world.published.every(({ eventId }) => eventId !== null),
        'the job table does not grow with what passes through it': after.kib <= 2 * before.kib,
      },
    }
  },
}

/** Each leaves everything as it was, but for what was in flight. */
const FAULTS = {
  async F1(world: World, survivor: Running) {
    await Promise.all(
      world.fleet
        .running('worker')
        .filter((one) => one !== survivor)
        .map(world.fleet.kill),
    )
    await world.fleet.start('worker')
  },
  async F7({ cluster }: World) {
    await cluster.stop('immediate')
    await sleep(OUTAGE_MS)
    await cluster.start()
  },
  async F8({ database: { sql } }: World) {
    await sql`
      select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name like 'waybill%'`
  },
}

/** Notes what a process takes, once a second. */
function sample({ scope }: World, { pid }: Running) {
  const seen: { hours: number; mib: number; files: number }[] = []
  const note = () =>
    seen.push({ hours: Date.now() / 3_600_000, mib: residentMemory(pid) ?? 0, files: openFiles(pid) ?? 0 })
  const timer = setInterval(note, SAMPLE_MS)
  cleanUp(scope, async () => clearInterval(timer))
  return {
    /** The slopes of the second half: the first fills caches and pools. A short run's say little. */
    stop() {
      clearInterval(timer)
      const later = seen.slice(seen.length / 2)
      const slopeOf = (what: 'mib' | 'files') => slope(later.map((one) => [one.hours, one[what]]))
      return { mibPerHour: slopeOf('mib'), filesPerHour: slopeOf('files') }
    },
  }
}

/** Of the straight line that lies closest (least squares). */
function slope(points: [x: number, y: number][]): number {
  const mean = (values: number[]) => values.reduce((sum, value) => sum + value, 0) / values.length
  const [midX, midY] = [mean(points.map(([x]) => x)), mean(points.map(([, y]) => y))]
  const along = mean(points.map(([x, y]) => (x - midX) * (y - midY)))
  return round(along / mean(points.map(([x]) => (x - midX) ** 2)))
}

export const soakExperiments = [soaked]
