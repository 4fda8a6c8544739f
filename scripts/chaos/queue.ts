import type { Experiment } from './experiment.ts'
import { round } from './measure.ts'
import { sleep } from './publisher.ts'

/** Of one delivery: several may have shared the job. */
type Job = { id: string; state: string; start_after: Date }

const robbed: Experiment = {
  id: 'F40',
  title: 'all jobs deleted behind its back, under load',
  async run(world) {
    const { sql } = world.database
    for (const endpoint of world.active) {
      endpoint.reply = async (_receipt, nth) => {
        await sleep(300)
        return nth === 1 ? 500 : 200
      }
    }
    const load = world.load({ rate: 30 })
    await sleep(world.random.integer(4000, 6000))
    const at = Date.now()
    const jobs = await sql<Job[]>`
      with gone as (delete from pgboss.job where name = 'deliveries' returning *)
      select coalesce(members.id, gone.id::text) as id, state, start_after
      from gone left join lateral jsonb_array_elements_text(data -> 'ids') as members (id) on true`
    world.fault(at)
    await load.stop()
    await world.quiesce()
    const waiting = jobs.filter(({ state }) => state !== 'active')
    const late = jobs.map(({ id, start_after }) => {
      const again = world.ledger.of(id).find((receipt) => receipt.at > at)?.at ?? Number.POSITIVE_INFINITY
      return (again - Math.max(at, start_after.getTime())) / 1000
    })
    return {
      figures: { jobs_deleted: jobs.length, waiting: waiting.length, late_max_s: round(Math.max(...late)) },
      conditions: {
        'jobs of both kinds were deleted': waiting.length > 0 && waiting.length < jobs.length,
        'each is sent within 60 s of when it is due': Math.max(...late) <= 60,
        'what only waited comes no more often for it': waiting.every(({ id }) => world.ledger.of(id).length === 2),
      },
    }
  },
}

export const queueExperiments = [robbed]
