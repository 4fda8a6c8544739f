import type { Cost } from './cost.ts'
import type { HeldRun } from './held.ts'
import type { Neighbours } from './neighbours.ts'
import type {
  Beside,
  BothRun,
  Ceilings,
  DrainRun,
  EndpointsRun,
  FanoutRun,
  LatencyRun,
  PublishRun,
  SteadyRun,
  TenantsRun,
} from './parts.ts'
import type { Turns } from './turns.ts'

export type Report = {
  at: string
  /** `busyBefore`: the share of the cores that others kept busy before the start. */
  machine: { cores: number; node: string; postgres: string; busyBefore: number }
  processes: { apis: number; workers: number }
  /** Whether deliveries and bare requests went out over it. */
  tls: boolean
  seconds: number
  ceilings?: Ceilings
  publish?: Beside<PublishRun>[]
  drain?: Beside<DrainRun>
  both?: Beside<BothRun>
  fanout?: Beside<FanoutRun>
  tenants?: Beside<TenantsRun>
  endpoints?: Beside<EndpointsRun>
  latency?: LatencyRun[]
  steady?: SteadyRun
  held?: HeldRun
  neighbours?: Neighbours
  turns?: Turns[]
  /** The most that one process held; of Postgres, all its processes together as seen between the parts. */
  peakMiB?: Record<'api' | 'worker' | 'postgres', number>
  cpuSeconds?: Record<'api' | 'worker', number>
}

type Row = [what: string, figure: string, ratio?: string]

const whole = (value: number) => Math.round(value).toLocaleString('en-US')
const rate = (value: number) => `${whole(value)}/s`
const ms = (value: number) => `${value.toFixed(value < 10 ? 2 : 1)} ms`
const times = (p50: number, p99: number) => `p50 ${ms(p50)}, p99 ${ms(p99)}`

export function printReport(report: Report): void {
  const { machine, processes, ceilings } = report
  const ratio = (value: number, ceiling: number | undefined, name: string) =>
    ceiling === undefined ? undefined : `${(value / ceiling).toFixed(2)} × ${name}`
  const ofCommits = (value: number, run: Beside<unknown>) => ratio(value, run.ceilings.commits, 'commits')
  const ofPosts = (value: number, run: Beside<unknown>) =>
    ratio(value, run.ceilings.posts, 'POSTs')?.concat(
      run.ceilings.usualPosts === undefined ? '' : `, ${ratio(value, run.ceilings.usualPosts, 'usual ones')}`,
    )
  const rows: Row[] = []
  const add = (what: string, figure: string, ratio?: string) =>
    rows.push(ratio ? [what, figure, ratio] : [what, figure])

  if (ceilings) {
    const range = (values: number[], show: (value: number) => string) =>
      values.length > 0 ? `${show(Math.min(...values))} to ${show(Math.max(...values))}` : 'not measured'
    add(`ceiling: single-row commits, 16 connections (${ceilings.commitsBy})`, range(ceilings.commits, rate))
    add('ceiling: p50 of one bare commit, one node client', range(ceilings.oneCommit, ms))
    add('ceiling: raw signed POSTs, 200 in flight (undici)', range(ceilings.posts, rate))
    add('the same made the usual way (its pool, request)', range(ceilings.usualPosts, rate))
    add('load generator against a trivial server', rate(ceilings.generator))
  }
  for (const run of report.publish ?? []) {
    add(
      `publish, ${run.connections} connection${run.connections === 1 ? '' : 's'}`,
      `${rate(run.perSecond)}, ${times(run.p50, run.p99)}`,
      run.connections === 1 ? ratio(run.p50, run.ceilings.oneCommit, 'one commit') : ofCommits(run.perSecond, run),
    )
  }
  if (report.drain)
    add(
      `drain of ${whole(report.drain.deliveries)}`,
      rate(report.drain.perSecond),
      ofPosts(report.drain.perSecond, report.drain),
    )
  if (report.both) {
    const { published, delivered, publishP50, publishP99, backlogSeconds } = report.both
    add(
      'both at once: publish, 256 connections',
      `${rate(published)}, ${times(publishP50, publishP99)}`,
      ofCommits(published, report.both),
    )
    add('both at once: delivered meanwhile', rate(delivered), ofPosts(delivered, report.both))
    add('both at once: backlog gone after', `${backlogSeconds.toFixed(1)} s`)
  }
  if (report.fanout) {
    const { fanout, published, deliveriesQueued, drained } = report.fanout
    add(
      `fan-out ${fanout}: publish, 256 connections`,
      `${rate(published)}, ${rate(deliveriesQueued)} deliveries queued`,
    )
    add(
      `fan-out ${fanout}: drain of ${whole(drained.deliveries)}`,
      rate(drained.perSecond),
      ofPosts(drained.perSecond, report.fanout),
    )
  }
  if (report.tenants) {
    const { tenants, published, p50, p99, drained } = report.tenants
    add(
      `${whole(tenants)} tenants in turn: publish, 256 connections`,
      `${rate(published)}, ${times(p50, p99)}`,
      ofCommits(published, report.tenants),
    )
    add(
      `${whole(tenants)} tenants in turn: drain of ${whole(drained.deliveries)}`,
      rate(drained.perSecond),
      ofPosts(drained.perSecond, report.tenants),
    )
  }
  if (report.endpoints) {
    const { endpoints, drained } = report.endpoints
    add(
      `${whole(endpoints)} endpoints of a tenant: drain of ${whole(drained.deliveries)}`,
      rate(drained.perSecond),
      ofPosts(drained.perSecond, report.endpoints),
    )
  }
  for (const run of report.latency ?? []) {
    const what = run.rate === null ? 'idle' : `${run.rate}/s open loop`
    add(`publish to receipt, ${what}`, `${times(run.p50, run.p99)}, max ${ms(run.max)}`)
    add(`publish answered, ${what}`, times(run.publishP50, run.publishP99))
  }
  if (report.steady) {
    const { rate: perSecond, seconds, p50, p99, mostMiB } = report.steady
    const what = `${whole(perSecond)}/s for ${seconds / 60} min`
    add(`publish to receipt, ${what}`, times(p50, p99))
    for (const role of ['api', 'worker'] as const) {
      const [first, ...later] = mostMiB[role]
      add(
        `most memory of the ${role}, first tenth, then each`,
        `${whole(first ?? 0)}, ${later.map(whole).join(' ')} MiB`,
      )
    }
  }
  if (report.held) {
    const { held, without, withThem } = report.held
    const both = (part: 'publish' | 'claim') => `${whole(withThem[part])} µs, with none ${whole(without[part])} µs`
    const slower = (part: 'publish' | 'claim') => `${(withThem[part] / without[part]).toFixed(2)} ×`
    add(`publishing an event beside ${whole(held)} held`, both('publish'), slower('publish'))
    add(`claiming a delivery beside ${whole(held)} held`, both('claim'), slower('claim'))
  }
  const crowd = report.publish?.at(-1)
  if (crowd) addCost(add, `an event at ${crowd.connections} connections`, crowd.cost)
  if (report.drain) addCost(add, 'a delivery while draining', report.drain.cost)
  if (crowd && report.drain) {
    const sum = (part: (cost: Cost) => number) => whole(part(crowd.cost) + part(report.drain?.cost as Cost))
    add('WAL per delivered event', `${sum((cost) => cost.walBytes)} bytes`)
    add(
      'tables and indexes per delivered event',
      `${sum((cost) => cost.tableBytes)} bytes, queue ${sum((cost) => cost.queueBytes)}`,
    )
  }
  if (report.tenants) addCost(add, 'a delivery of many tenants', report.tenants.drained.cost)
  if (report.peakMiB) {
    const { api, worker, postgres } = report.peakMiB
    add('peak memory', `API ${whole(api)} MiB, worker ${whole(worker)} MiB, Postgres ${whole(postgres)} MiB`)
  }
  if (report.drain && report.drain.again > 0) add('sent more than once while draining', whole(report.drain.again))

  const costs = [...(report.publish ?? []), ...(report.drain ? [report.drain] : [])].map(({ cost }) => cost)
  const others = Math.max(0, ...costs.map((cost) => cost.othersShare ?? 0))
  if (others > 0.1) add('TOO LOW: other processes took', `up to ${whole(others * 100)} % of the cores`)

  const widths = [0, 1].map((column) => Math.max(...rows.map((row) => row[column]?.length ?? 0)))
  process.stdout.write(
    `\n${machine.cores} cores shared by everything, Node ${machine.node}, Postgres ${machine.postgres} (fsync and synchronous_commit on), ` +
      `${processes.apis} API and ${processes.workers} worker processes, ${report.tls ? 'TLS, ' : ''}${report.seconds.toFixed(0)} s\n\n`,
  )
  for (const [what, figure, ratio = ''] of rows) {
    process.stdout.write(
      `${what.padEnd(widths[0] ?? 0)}  ${figure.padEnd(widths[1] ?? 0)}  ${ratio}`.trimEnd().concat('\n'),
    )
  }
}

function addCost(add: (what: string, figure: string) => void, what: string, cost: Cost): void {
  const cpu = Object.entries(cost.cpuMicros)
    .filter(([, micros]) => micros !== null && micros >= 1)
    .map(([name, micros]) => `${name} ${whole(micros ?? 0)}`)
  add(`CPU for ${what}, µs`, cpu.join(', '))
  add(`statements for ${what}`, cost.statements === null ? 'unknown' : cost.statements.toFixed(3))
  add(`WAL for ${what}`, `${whole(cost.walBytes)} bytes`)
}
