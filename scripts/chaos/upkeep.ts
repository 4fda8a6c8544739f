import { waitFor } from '../../test/support/wait.ts'
import { percentile } from '../percentile.ts'
import { judgeTable, startBacklog, watchJobs } from './drift.ts'
import type { Experiment } from './experiment.ts'
import type { Running } from './fleet.ts'
import { jobTable, latencies, resentAfter, round, slowAtFirst, triesMs } from './measure.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

const RATE = 80
/** Of these, each event goes to two or three endpoints. */
const DELIVERIES_A_MINUTE = RATE * 2.5 * 60
const CALM_MS = 8000

const churned: Experiment = {
  id: 'F37',
  title: `${DELIVERIES_A_MINUTE / 60} deliveries a second for ten minutes, and as many waiting as a minute brings`,
  setup: { workers: 0 },
  limitSeconds: 900,
  async run(world) {
    const lasts = world.quick ? 60_000 : 600_000
    const window = lasts / 6
    const release = await startBacklog(world, DELIVERIES_A_MINUTE)
    await world.fleet.start('worker')
    const load = world.load({ rate: RATE })
    // Until it is vacuumed for the first time, the table can only grow.
    await sleep(lasts / 6)
    const begun = Date.now()
    const table = watchJobs(world)
    await sleep(lasts)
    const ended = Date.now()
    const jobs = judgeTable(await table.stop())
    await load.stop()
    await release()
    await world.quiesce()
    const [first, last] = [latencies(world, begun, begun + window), latencies(world, ended - window, ended)]
    // Publishing shares the machine, and claims nothing.
    const publishes = (from: number) => triesMs(world, from, from + window, 0.5)
    const [publishFirst, publishLast] = [publishes(begun), publishes(ended - window)]
    return {
      figures: {
        ...jobs.figures,
        publish_to_receipt_p50_ms: percentile(last, 0.5),
        p50_ms_at_first: percentile(first, 0.5),
        publish_p50_ms: publishLast,
        publish_p50_ms_at_first: publishFirst,
        publish_to_receipt_p99_ms: percentile(last, 0.99),
        p99_ms_at_first: percentile(first, 0.99),
      },
      conditions: {
        ...jobs.conditions,
        'from publish to receipt it takes at most twice as long in the end, in the middle, held against publishing alone':
          percentile(last, 0.5) / publishLast <= (2 * percentile(first, 0.5)) / publishFirst,
      },
    }
  },
}

/** What the queue's part of a claim takes, in the middle of a hundred that are rolled back. */
async function claimMs({ database: { sql } }: World): Promise<number> {
  const undone = new Error('undone')
  const times: number[] = []
  for (let nth = 0; nth < 100; nth++) {
    const claim = sql.begin(async (tx) => {
      const begun = performance.now()
      await tx`select count(*) from waybill.claim_due(false, false, 100, 1000000000)`
      times.push(performance.now() - begun)
      throw undone
    })
    await claim.catch((error) => {
      if (error !== undone) throw error
    })
    await sleep(20)
  }
  return round(percentile(times, 0.5))
}

/** Counters are rows that every batch makes a new version of; all of them are stepped over as well. */
const MAX_WITH_OLD_SNAPSHOT_MS = 250

const pinned: Experiment = {
  id: 'F38',
  title: 'an old snapshot held open: nothing is vacuumed',
  async run(world) {
    const { sql } = world.database
    const heldMs = world.quick ? 20_000 : 40_000
    const load = world.load({ rate: 80 })
    // Plans, connections and caches are made in the first seconds.
    await sleep(3000)
    const begun = Date.now()
    const claimBefore = await claimMs(world)
    await sleep(CALM_MS)
    const held = Date.now()
    let claim = Number.NaN
    const dead = await sql.begin(async (snapshot) => {
      await snapshot`set transaction isolation level repeatable read`
      await snapshot`select count(*) from waybill.tenants`
      await sleep(heldMs)
      claim = await claimMs(world)
      return (await jobTable(world)).dead
    })
    const released = Date.now()
    await load.stop()
    await world.quiesce()
    const [calm, old] = [latencies(world, begun, held), latencies(world, released - CALM_MS, released)]
    return {
      figures: {
        held_s: heldMs / 1000,
        dead_jobs: dead,
        claim_p50_ms: claim,
        claim_p50_ms_before: claimBefore,
        publish_to_receipt_p50_ms: percentile(old, 0.5),
        p50_ms_before: percentile(calm, 0.5),
        p99_ms: percentile(old, 0.99),
        p99_ms_before: percentile(calm, 0.99),
      },
      conditions: {
        // A job leaves two dead rows, and up to sixteen deliveries share one.
        'what has gone through the queue is still in its table': dead >= world.ledger.receipts.length / 8,
        'claiming takes at most 3 times as long, in the middle': claim <= 3 * claimBefore,
        'from publish to receipt it takes 250 ms at most, in the middle':
          percentile(old, 0.5) <= MAX_WITH_OLD_SNAPSHOT_MS,
      },
    }
  },
}

const WORKERS = 3
/** How often the schedules are looked at. */
const CRON_SECONDS = 30

const bereft: Experiment = {
  id: 'F39',
  title: 'kill -9 of the worker that does what one does for all',
  setup: { workers: 0 },
  async run(world) {
    const rounds = world.quick ? 1 : 3
    await noteUpkeep(world)
    const names = new Map<string, Running>()
    const startNamed = async () => {
      const name = `worker-${names.size}`
      const url = new URL(world.database.url)
      url.searchParams.set('options', `-c chaos.worker=${name}`)
      // As libpq reads it, a plus sign is no space.
      names.set(name, await world.fleet.start('worker', { databaseUrl: url.href.replaceAll('+', '%20') }))
    }
    while (names.size < WORKERS) await startNamed()
    slowAtFirst(world, 500)
    world.load({ rate: 20 })
    const supervised: number[] = []
    const late: number[] = []
    const resent: number[] = []
    for (let nth = 0; nth < rounds; nth++) {
      const since = Date.now()
      const leader = await waitFor(async () => (await upkeepSince(world, 'cron', since))[0], {
        timeoutMs: 60_000,
        what: 'a worker to look at the schedules',
      })
      await sleep(world.random.integer(0, 1000))
      const worker = names.get(leader.worker)
      if (worker === undefined) throw new Error(`${leader.worker} is none of the workers`)
      const orphans = world.ledger.open()
      const at = Date.now()
      await world.fleet.kill(worker)
      world.fault(at)
      const first = async (work: string) => {
        const [next] = await upkeepSince(world, work, at + 100)
        return next && (next.at - at) / 1000
      }
      const taken = async () => (await first('cron')) !== undefined && (await first('supervision')) !== undefined
      await waitFor(taken, { timeoutMs: 120_000, intervalMs: 500, what: 'another worker to take over' })
      supervised.push((await first('supervision'))!)
      late.push((await first('cron'))! - CRON_SECONDS + (at - leader.at) / 1000)
      resent.push(...resentAfter(world, orphans, at).filter(Number.isFinite))
      await startNamed()
    }
    await world.quiesce()
    return {
      figures: {
        kills: rounds,
        queue_supervised_after_max_s: round(Math.max(...supervised)),
        schedules_late_max_s: round(Math.max(...late)),
        resent_max_s: round(Math.max(0, ...resent)),
      },
      conditions: {
        'another worker looks after the queue within 75 s': Math.max(...supervised) <= 75,
        'and after the schedules within 5 s of when it is time': Math.max(...late) <= 5,
      },
    }
  },
}

/** Lets the database note which worker looks after the queue and the schedules, and when. */
const noteUpkeep = ({ database: { sql } }: World) =>
  sql.text(`
    create table public.upkeep (work text, worker text, at timestamptz default clock_timestamp());
    create function public.note() returns trigger language plpgsql as $$ begin
      insert into public.upkeep values (tg_argv[0], current_setting('chaos.worker'));
      return null;
    end $$;
    create trigger note after update of cron_on on pgboss.version for each row execute function public.note('cron');
    create trigger note after update of monitor_claim_on on pgboss.queue for each row execute function public.note('supervision')`)

async function upkeepSince({ database: { sql } }: World, work: string, since: number) {
  const rows = await sql<{ worker: string; at: Date }[]>`
    select worker, at from public.upkeep where work = ${work} and at > ${new Date(since)} order by at`
  return rows.map(({ worker, at }) => ({ worker, at: at.getTime() }))
}

export const upkeepExperiments = [churned, pinned, bereft]
