import type { Receipt } from './ledger.ts'
import { sleep } from './publisher.ts'
import type { World } from './world.ts'

// What several experiments do and look at.

/** Lets every receiver take its time over a delivery that it sees for the first time, and none afterwards. */
export function slowAtFirst(world: World, ms: number): void {
  for (const endpoint of world.active) {
    endpoint.reply = async (_receipt, nth) => {
      if (nth === 1) await sleep(ms)
      return 200
    }
  }
}

/** Seconds from a fault until each of the requests that were open then came again; infinite for one that never did. */
export function resentAfter(world: World, orphans: Receipt[], since: number): number[] {
  return orphans.map((orphan) => {
    const again = world.ledger.of(orphan.deliveryId).find((receipt) => receipt !== orphan && receipt.at > since)
    return again ? (again.at - since) / 1000 : Number.POSITIVE_INFINITY
  })
}

/** The requests to publish that were under way between two moments. */
export const triesIn = (world: World, from: number, to: number) =>
  world.published.flatMap(({ tries }) => tries).filter(({ at, ms }) => at + ms >= from && at <= to)

type Answer = { status: number | null; shaped: boolean }

/** How many requests were not answered with 2xx. */
export const failed = (tries: Answer[]) => tries.filter(({ status }) => status === null || status >= 300).length

/** Whether a request to publish was answered, with success or with a 500 in the error shape. */
export const isAnswered = ({ status, shaped }: Answer) => shaped && [200, 202, 500].includes(status ?? 0)

/** Asks the first API for its health, ten times a second. */
export function watchHealth(world: World) {
  const seen = { slowestMs: 0, unhealthy: 0 }
  let stopped = false
  const url = `${world.fleet.urls()[0]}/health`
  async function watch(): Promise<void> {
    while (!stopped) {
      const asked = Date.now()
      const status = await fetch(url).then(
        async (response) => {
          await response.arrayBuffer()
          return response.status
        },
        () => 0,
      )
      seen.slowestMs = Math.max(seen.slowestMs, Date.now() - asked)
      if (status !== 200) seen.unhealthy++
      await sleep(100)
    }
  }
  const watching = watch()
  return {
    async stop() {
      stopped = true
      await watching
      return seen
    },
  }
}

/** The table of the jobs. Its dead rows are counted since the last crash of Postgres. */
export async function jobTable({ database: { sql } }: World) {
  const [table] = await sql<{ live: number; dead: number; kib: number }[]>`
    select n_live_tup::int as live, n_dead_tup::int as dead, (pg_relation_size(relid) / 1024)::int as kib
    from pg_stat_user_tables
    where relid = (select format('pgboss.%I', table_name)::regclass from pgboss.queue where name = 'deliveries')`
  return table!
}

export const round = (value: number) => Math.round(value * 100) / 100
