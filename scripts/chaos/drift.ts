import { waitFor } from '../../test/support/wait.ts'
import type { Finding } from './experiment.ts'
import { openFiles, type Running } from './fleet.ts'
import { type JobTable, jobTable, publishMany, round, watch } from './measure.ts'
import type { World } from './world.ts'

// What grows, and what only goes up and down.

/** For processes whose memory is watched. */
export const COLLECTING = ['--expose-gc', `--import=${new URL('./collect.ts', import.meta.url).href}`]

/** Each look throws away what is compiled and not running just then: the more of them, the more is compiled again, and kept. */
const MEMORY_EVERY_MS = 60_000
const OFTEN_MS = 10_000
const MIB = 2 ** 20

/**
 * Notes, every minute until `stop` (more often in a quick run), what a process takes. Resident memory goes up and down by
 * tens of MiB with the garbage in it, and where V8 has got to with that: no line through twenty minutes of it tells 2 MiB an
 * hour from none. So the process collects all of its garbage first (what leaks outlives that), and then tells its resident
 * memory, and the part that is in use; and of that what is code, of which V8 makes more for half an hour and longer, but not
 * for ever.
 */
export function watchProcess({ scope, quick }: World, one: Running) {
  return watch(scope, quick ? OFTEN_MS : MEMORY_EVERY_MS, async () => {
    const seen = one.logs.length
    one.signal('SIGUSR2')
    const memory = () => one.logs.slice(seen).find(({ msg }) => msg === 'memory')
    await waitFor(memory, { what: 'a process to tell its memory' })
    const { rss, heapUsed, external, code } = memory() as unknown as NodeJS.MemoryUsage & { code: number }
    return {
      rss: rss / MIB,
      used: (heapUsed + external) / MIB,
      code: code / MIB,
      files: openFiles(one.pid) ?? 0,
    }
  })
}

/** Notes, every ten seconds until `stop`, what the table of the jobs takes; nothing while the database is away. */
export const watchJobs = (world: World) => watch(world.scope, OFTEN_MS, () => jobTable(world).catch(() => undefined))

/**
 * Lets so many deliveries wait in the queue for their time, as after a failure: where all is sent at once, no row lives
 * long enough to hold the dead ones against. Before any worker runs. The function that it resolves with lets them go.
 */
export async function startBacklog(world: World, count: number) {
  const { sql } = world.database
  await publishMany(world, count, 'order.later')
  // Each with a job of its own, as after a failure.
  await sql`
    update pgboss.job set state = 'active', started_on = now(), heartbeat_on = now() where name = 'deliveries' and data ? 'ids'`
  await sql`
    select waybill.unbundle(array_agg(data ->> 'tenant_id'), array_agg(job.id), array_agg(members.id::uuid), false)
    from pgboss.job, jsonb_array_elements_text(data -> 'ids') as members (id) where name = 'deliveries' having count(*) > 0`
  // As retries, which alone may be due so late. By its count, the next attempt is the first.
  await sql`
    update pgboss.job set state = 'retry', retry_count = -1, started_on = now(), start_after = now() + interval '1 day',
      priority = waybill.retry_priority(now() + interval '1 day')
    where name = 'deliveries'`
  // Without the dead rows of this: what grows later has to be seen.
  const [queue] = await sql`select format('pgboss.%I', table_name) as jobs from pgboss.queue where name = 'deliveries'`
  await sql.text(`vacuum full ${queue!.jobs}`)
  return async () => {
    await sql`
      update pgboss.job set start_after = now(), priority = waybill.retry_priority(now())
      where name = 'deliveries' and start_after > now() + interval '1 hour'`
  }
}

export type Memory = { at: number; rss: number; used: number; code: number }
/**
 * What a queue that is once fuller than ever before leaves behind, since files do not shrink: some pages of each index. A quarter
 * of an hour in which nothing was used again would leave ten times as much.
 */
const FEW_KIB = 1024

/**
 * Of the job table over a while: what its dead rows are to the live ones, on average, since they pile up and are vacuumed;
 * and how much larger than in the first half it ever was in the second.
 */
export function judgeTable(noted: JobTable[]): Finding {
  const ratios = noted.map(({ dead, live }) => dead / live)
  const half = Math.ceil(noted.length / 2)
  const most = (what: 'kib' | 'indexesKib', from = 0, to?: number) =>
    Math.max(...noted.slice(from, to).map((one) => one[what]))
  const grown = (what: 'kib' | 'indexesKib') => round(most(what, half) / most(what, 0, half))
  const isLevel = (what: 'kib' | 'indexesKib') =>
    most(what, half) <= Math.max(1.2 * most(what, 0, half), most(what, 0, half) + FEW_KIB)
  const ratio = round(ratios.reduce((sum, one) => sum + one, 0) / ratios.length)
  return {
    figures: {
      jobs_dead_to_live: ratio,
      jobs_dead_to_live_max: round(Math.max(...ratios)),
      jobs_KiB: most('kib'),
      jobs_KiB_times: grown('kib'),
      jobs_indexes_KiB: most('indexesKib'),
      jobs_indexes_KiB_times: grown('indexesKib'),
    },
    conditions: {
      'half as many rows of the job table are dead as live, or fewer': ratio <= 0.5,
      'the job table and its indexes do not grow by more than a fifth, or a MiB':
        isLevel('kib') && isLevel('indexesKib'),
    },
  }
}

/** How many more files stay open in the last third than in the first: one that is never closed is there at every look. */
export function filesLeft(noted: { files: number }[]): number {
  const third = Math.ceil(noted.length / 3)
  const fewest = (some: { files: number }[]) => Math.min(...some.map(({ files }) => files))
  return fewest(noted.slice(-third)) - fewest(noted.slice(0, third))
}

/** How much it rises in an hour, by the straight line that lies closest, and how far off that may be (two standard errors). */
export function risePerHour(points: [at: number, value: number][]) {
  const mean = (values: number[]) => values.reduce((sum, value) => sum + value, 0) / values.length
  const [midX, midY] = [mean(points.map(([at]) => at)), mean(points.map(([, value]) => value))]
  const hours = (at: number) => (at - midX) / 3_600_000
  const spread = mean(points.map(([at]) => hours(at) ** 2))
  const rise = mean(points.map(([at, value]) => hours(at) * (value - midY))) / spread
  const rest = mean(points.map(([at, value]) => (value - midY - rise * hours(at)) ** 2))
  return { rise: round(rise), off: round(2 * Math.sqrt(rest / spread / points.length)) }
}
