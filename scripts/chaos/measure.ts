import { cleanUp, type Scope } from '../../test/support/cleanup.ts'
import { waitFor } from '../../test/support/wait.ts'
import { percentile } from '../percentile.ts'
import type { Endpoint, Receipt } from './ledger.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

// What several experiments do and look at.

/** Headers of a request on a connection for itself, which is not kept: the oracle counts those that are left. */
export const ALONE = { connection: 'close' }

/** Ends all connections of services to the database; answers with how many there were. */
export const terminate = async ({ database: { sql } }: World) =>
  (
    await sql`
      select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name like 'waybill%'`
  ).length

/** A reply that takes so long. */
export const replyAfter =
  (ms: number, status: number | null = 200) =>
  async () => {
    await sleep(ms)
    return status
  }

/** Lets every receiver take its time over a delivery that it sees for the first time, and none afterwards. */
export function slowAtFirst(world: World, ms: number): void {
  const late = replyAfter(ms)
  for (const endpoint of world.active) endpoint.reply = (_receipt, nth) => (nth === 1 ? late() : 200)
}

/** Seconds from a fault until each of the requests that were open then came again; infinite for one that never did. */
export function resentAfter(world: World, orphans: Receipt[], since: number): number[] {
  return orphans.map((orphan) => {
    const again = world.ledger.of(orphan.deliveryId).find((receipt) => receipt !== orphan && receipt.at > since)
    return again ? (again.at - since) / 1000 : Number.POSITIVE_INFINITY
  })
}

/** Milliseconds from the requests to publish of a while to each of their receipts (at some endpoints). */
export function latencies(world: World, from: number, to: number, at: Endpoint[] = world.endpoints): number[] {
  const asked = new Map(world.published.map(({ eventId, tries }) => [eventId, tries[0]?.at ?? 0]))
  return world.ledger.receipts
    .filter(({ endpoint }) => at.includes(endpoint))
    .map((receipt) => ({ since: asked.get(receipt.eventId) ?? 0, at: receipt.at }))
    .filter(({ since }) => since >= from && since < to)
    .map((one) => one.at - one.since)
}

/** How many requests an endpoint had at once, at most, when it keeps each for so long. */
export function mostAtOnce(receipts: Receipt[], keptMs: number): number {
  let first = 0
  return receipts.reduce((most, { at }, index) => {
    while ((receipts[first]?.at ?? at) <= at - keptMs) first++
    return Math.max(most, index - first + 1)
  }, 0)
}

/** The requests to publish that were under way between two moments. */
export const triesIn = (world: World, from: number, to: number) =>
  world.published.flatMap(({ tries }) => tries).filter(({ at, ms }) => at + ms >= from && at <= to)

/** In milliseconds, how long this share of these took at most; without, all but the slowest hundredth. */
export const triesMs = (world: World, from: number, to: number, share = 0.99) =>
  percentile(
    triesIn(world, from, to).map(({ ms }) => ms),
    share,
  )

/** Waits until publishing and delivering go on after a moment; resolves with when each of them did. */
export const goesOnAfter = (world: World, moment: number) =>
  waitFor(
    () => {
      const accepted = world.published.find(({ acceptedAt }) => (acceptedAt ?? 0) > moment)?.acceptedAt
      const delivered = world.ledger.receipts.find(({ at }) => at > moment)?.at
      return accepted && delivered ? { accepted, delivered } : undefined
    },
    { timeoutMs: 60_000, what: 'publishing and delivering to go on' },
  )

/** How long the slowest took, in milliseconds. */
export const slowest = (some: { ms: number }[]) => Math.max(...some.map(({ ms }) => ms))

type Answer = { status: number | null; shaped: boolean }

/** How many requests were not answered with 2xx. */
export const failed = (tries: Answer[]) => tries.filter(({ status }) => status === null || status >= 300).length

/** Whether a request to publish was answered, with success or with a 500 in the error shape. */
export const isAnswered = ({ status, shaped }: Answer) => shaped && [200, 202, 500].includes(status ?? 0)

type Noted<T> = T & { at: number }

/** Looks again and again until `stop`, which resolves with all that was seen. */
export function watch<T extends object>(scope: Scope, everyMs: number, look: () => Promise<T | undefined>) {
  const noted: Noted<T>[] = []
  const { promise: stopped, resolve: stop } = Promise.withResolvers<void>()
  let going = true
  async function run(): Promise<void> {
    for (let at = Date.now(); going; at = Math.max(at + everyMs, Date.now())) {
      await Promise.race([sleep(at - Date.now()), stopped])
      const seen = going && (await look())
      if (seen) noted.push({ ...seen, at: Date.now() })
    }
  }
  const running = run()
  // An experiment that fails says why itself.
  running.catch(() => {})
  const end = async () => {
    going = false
    stop()
    await running
    return noted
  }
  cleanUp(scope, () =>
    end().then(
      () => {},
      () => {},
    ),
  )
  return { stop: end }
}

/** Asks the first API for its health, ten times a second until `stop`. */
export function watchHealth(world: World) {
  const url = `${world.fleet.urls()[0]}/health`
  return watch(world.scope, 100, async () => {
    const asked = Date.now()
    const status = await fetch(url).then(
      async (response) => {
        await response.arrayBuffer()
        return response.status
      },
      () => 0,
    )
    return { ms: Date.now() - asked, isWell: status === 200 }
  })
}

export type JobTable = { live: number; dead: number; kib: number; indexesKib: number }

/** The table of the jobs: rows and KiB. Postgres's own count of dead rows would forget them in a crash, so they are counted. */
export async function jobTable({ database: { sql } }: World) {
  const [table] = await sql<JobTable[]>`
    select tuple_count::int as live, dead_tuple_count::int as dead, (pg_table_size(jobs) / 1024)::int as kib,
      (pg_indexes_size(jobs) / 1024)::int as "indexesKib"
    from (select format('pgboss.%I', table_name)::regclass as jobs from pgboss.queue where name = 'deliveries') named, pgstattuple(jobs)`
  return table!
}

/** Publishes so many events of a type, a few at a time. */
export async function publishMany(world: World, count: number, type: string, tenant = world.tenant): Promise<void> {
  let left = count
  const publisher = async () => {
    while (left-- > 0) await world.publish({ type, tenant })
  }
  await Promise.all(Array.from({ length: 32 }, publisher))
}

export const round = (value: number) => Math.round(value * 100) / 100
