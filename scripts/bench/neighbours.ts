import { setTimeout as sleep } from 'node:timers/promises'
import type { Pool } from '../../src/db/open.ts'
import { connect } from '../../test/support/database.ts'
import { waitFor } from '../../test/support/wait.ts'
import type { Behaviour } from './crowd.ts'
import { holdMany } from './held.ts'
import type { Helper } from './helper.ts'
import { type Bench, createTenant, PATIENCE, type Times, times } from './parts.ts'

// Whether anybody waits for someone else's broken endpoint: tenant B and tenant A's own healthy endpoint, each with 20
// events a second, while something is wrong with another endpoint of A.

const RATE = 20
const FLOOD = 20_000
const MANY = 500
const SLOW: Behaviour = { kind: 'answer', status: 200, delayMs: 2000 }
const OK: Behaviour = { kind: 'answer', status: 200, delayMs: 0 }

type Scenario = { name: string; b: Times; own: Times }
type Outage = { waiting: number; mostInFlight: number; worstSecondOverMean: number; seconds: number }
type Share = { tenant: string; queued: number; share: number }
export type Neighbours = { baseline: Scenario; scenarios: Scenario[]; outage: Outage; shares: Share[] }

type Helpers = { crowd: Helper<'crowd'>; lonely: Helper<'receiver'>; loadOfA: Helper<'load'>; flood: Helper<'load'> }

export async function measureNeighbours(
  bench: Bench,
  helpers: Helpers,
  say: (what: string) => void,
): Promise<Neighbours> {
  const { services, database, workers, quick } = bench
  const seconds = quick ? 10 : 30
  const sql = connect(database.url, 2)
  const { port: ownPort } = await helpers.lonely.ask('listen', null)

  async function tenant(id: string, limits = {}) {
    const { key, call } = await createTenant(services, id, limits)
    const endpoint = async (port: number, type: string) =>
      (
        await call<{ endpoint_id: string }>('POST', '/v1/endpoints', {
          url: `http://127.0.0.1:${port}/${type}`,
          subscribed_events: [type],
        })
      ).endpoint_id
    return { key, call, endpoint }
  }
  const load = (apiKey: string, eventType: string, more: object) => ({
    ports: services.ports(),
    apiKeys: [apiKey],
    eventTypes: [eventType],
    payloadBytes: 250,
    connections: 4,
    rate: null,
    ...more,
  })

  const a = await tenant('neighbour-a')
  const b = await tenant('neighbour-b')
  await a.endpoint(ownPort, 'a.own')
  await b.endpoint(bench.receiverPort, 'b.own')
  await services.start('worker', workers)

  /** What B and A's own endpoint see for a while. */
  async function watch(name: string): Promise<Scenario> {
    const count = RATE * seconds
    const receipts = [bench.receiver, helpers.lonely].map((one) => one.ask('expect', { count, seconds: seconds + 60 }))
    await Promise.all([
      bench.load.ask('run', load(b.key, 'b.own', { rate: RATE, stop: { count } }) as never),
      helpers.loadOfA.ask('run', load(a.key, 'a.own', { rate: RATE, stop: { count } }) as never),
    ])
    const [ofB, ofA] = await Promise.all(receipts)
    return { name, b: times(ofB?.latencies ?? []), own: times(ofA?.latencies ?? []) }
  }
  const floodOf = (type: string, count: number) =>
    helpers.flood.ask('run', load(a.key, type, { connections: 32, stop: { count } }) as never)

  say('neighbours: warming up')
  await watch('warm-up')
  say('neighbours: baseline')
  const baseline = await watch('baseline')
  const scenarios: Scenario[] = []
  const troubles: [string, Behaviour, number][] = [
    ['blackhole, 20,000 deliveries', { kind: 'blackhole' }, FLOOD],
    ['answers 500, 2,000 deliveries', { kind: 'answer', status: 500, delayMs: 0 }, 2000],
    ['slow (2 s), 2,000 deliveries', SLOW, 2000],
    ['connection refused, 2,000 deliveries', { kind: 'refuse' }, 2000],
  ]
  for (const [nth, [name, behaviour, count]] of troubles.entries()) {
    say(`neighbours: ${name}`)
    const type = `a.trouble.${nth}`
    const id = await a.endpoint(await helpers.crowd.ask('listen', behaviour), type)
    // The flood itself would be measured with the trouble: its publishing costs what it costs without one.
    await floodOf(type, count)
    scenarios.push(await watch(name))
    await a.call('PATCH', `/v1/endpoints/${id}`, { is_active: false })
    await untilHeld(sql, id)
  }

  say('neighbours: 500 endpoints that hang')
  const many = await tenant('neighbour-many', { max_endpoints: MANY, max_fanout_endpoints: MANY })
  const trap = await helpers.crowd.ask('listen', { kind: 'blackhole' })
  for (let n = 0; n < MANY; n++) await many.endpoint(trap, 'many.trap')
  await many.call('POST', '/v1/events', { event_type: 'many.trap', payload: {} })
  scenarios.push(await watch('500 endpoints that hang'))
  await many.call('POST', '/v1/events', { event_type: 'many.trap', payload: {} })
  scenarios.push(await watch('500 endpoints that hang, once more'))
  await sql`update waybill.endpoints set is_active = false where tenant_id = 'neighbour-many'`

  const held = quick ? 50_000 : 200_000
  const heldName = `${held.toLocaleString('en')} held for an inactive endpoint`
  say(`neighbours: ${heldName}`)
  const inactive = await a.endpoint(ownPort, 'a.inactive')
  await a.call('PATCH', `/v1/endpoints/${inactive}`, { is_active: false })
  await holdMany(sql, 'neighbour-a', inactive, held)
  scenarios.push(await watch(heldName))

  say('neighbours: the herd after an outage')
  const port = await helpers.crowd.ask('listen', { kind: 'answer', status: 503, delayMs: 0 })
  await a.endpoint(port, 'a.outage')
  await floodOf('a.outage', 5000)
  scenarios.push(await watch('an outage, 5,000 deliveries'))
  await helpers.crowd.ask('behave', { port, behaviour: { kind: 'answer', status: 200, delayMs: 5 } })
  const watching = watch('the herd after an outage, 5,000 waiting')
  const delivered = async () => ((await helpers.crowd.ask('look', port))?.requests ?? 0) >= 5000
  await waitFor(delivered, { ...PATIENCE, what: 'the backlog of the outage to be delivered' })
  scenarios.push(await watching)
  const outage = herd((await helpers.crowd.ask('look', port)) ?? { mostInFlight: 0, per100Ms: [] })

  say('neighbours: ten tenants of different demand')
  const shares = await measureShares()
  await services.stop('worker')
  await sql.end()
  return { baseline, scenarios, outage, shares }

  /** The worker starts upon backlogs of very different size; each tenant's part of what is delivered while all have one. */
  async function measureShares(): Promise<Share[]> {
    await services.stop('worker')
    const queued: [string, number][] = []
    const crowdPort = await helpers.crowd.ask('listen', OK)
    for (let nth = 0; nth < 10; nth++) {
      const id = `share-${nth}`
      const one = await tenant(id)
      await one.endpoint(crowdPort, 'share')
      const count = (quick ? 1000 : 2000) * (1 + (nth % 5) * 2)
      queued.push([id, count])
      await helpers.flood.ask('run', load(one.key, 'share', { connections: 32, stop: { count } }) as never)
    }
    await services.start('worker', workers)
    const smallest = Math.min(...queued.map(([, count]) => count))
    const delivered = () =>
      sql<{ tenant_id: string; n: number }[]>`
        select tenant_id, delivered::float8 as n from waybill.endpoint_stats where tenant_id like 'share-%' order by 1`
    for (;;) {
      const rows = await delivered()
      const most = Math.max(...rows.map(({ n }) => n))
      if (most > smallest * 0.5) {
        const mean = rows.reduce((sum, { n }) => sum + n, 0) / rows.length
        return queued.map(([id, count]) => ({
          tenant: id,
          queued: count,
          share: (rows.find((row) => row.tenant_id === id)?.n ?? 0) / mean,
        }))
      }
      await sleep(20)
    }
  }
}

function herd({ mostInFlight, per100Ms }: { mostInFlight: number; per100Ms: number[] }): Outage {
  const first = per100Ms.findIndex((n) => n > 0)
  const buckets = per100Ms.slice(first)
  const waiting = buckets.reduce((sum, n) => sum + n, 0)
  const seconds = Math.max(1, buckets.length / 10)
  let worst = 0
  for (let at = 0; at < buckets.length; at++)
    worst = Math.max(
      worst,
      buckets.slice(at, at + 10).reduce((sum, n) => sum + n, 0),
    )
  return { waiting, mostInFlight, worstSecondOverMean: worst / (waiting / seconds), seconds }
}

async function untilHeld(sql: Pool, endpointId: string): Promise<void> {
  const isHeld = async () => {
    await sql`update pgboss.job set start_after = now(), priority = waybill.retry_priority(now())
      where name = 'deliveries' and state < 'active' and start_after > now()`
    return (
      (await sql`select from waybill.endpoint_stats where endpoint_id = ${endpointId} and retrying + pending = held`)
        .length > 0
    )
  }
  await waitFor(isHeld, { ...PATIENCE, what: 'its deliveries to be held' })
}

export function printNeighbours({ baseline, scenarios, outage, shares }: Neighbours): void {
  const ms = (value: number) => value.toFixed(1).padStart(8)
  const line = ({ name, b, own }: Scenario) => {
    const most = Math.max(2 * baseline.b.p99, 150)
    const verdict = b.p99 <= most && own.p99 <= Math.max(2 * baseline.own.p99, 150) ? '' : '  ABOVE ITS BOUND'
    process.stdout.write(`${name.padEnd(42)} ${ms(b.p50)} ${ms(b.p99)} ${ms(own.p50)} ${ms(own.p99)}${verdict}\n`)
  }
  process.stdout.write(`\npublish to receipt, ms, while …              B p50    B p99  own p50  own p99\n`)
  for (const scenario of [baseline, ...scenarios]) line(scenario)
  process.stdout.write(
    `\nafter the outage: ${outage.waiting} delivered in ${outage.seconds.toFixed(1)} s, at most ${outage.mostInFlight} in flight, busiest second ${outage.worstSecondOverMean.toFixed(2)} × the mean\n`,
  )
  process.stdout.write(
    `shares of ten tenants (fair: 1.00): ${shares.map(({ queued, share }) => `${share.toFixed(2)} (${queued})`).join(', ')}\n`,
  )
}
