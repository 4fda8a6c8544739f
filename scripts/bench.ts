import { mkdirSync, writeFileSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { resolve } from 'node:path'
import { parseArgs } from 'node:util'
import { type BenchDatabase, startDatabase } from './bench/database.ts'
import { measureHeld } from './bench/held.ts'
import { type Helper, startHelper } from './bench/helper.ts'
import { measureNeighbours, printNeighbours } from './bench/neighbours.ts'
import {
  type Bench,
  type Beside,
  type Ceiling,
  createCeilings,
  deliverAll,
  measureBoth,
  measureDrain,
  measureEndpoints,
  measureFanout,
  measureLatency,
  measurePublish,
  measureSteady,
  measureTenants,
  queueWarmUp,
  register,
  warmUp,
} from './bench/parts.ts'
import { printReport, type Report } from './bench/report.ts'
import { createServices, type Services } from './bench/services.ts'
import { measureAgainst, printTurns } from './bench/turns.ts'
import { busyShare, memoryOfTree } from './bench/usage.ts'

const USAGE = `Usage: npm run bench -- [--quick] [--only PART,…] [--json FILE] [--tls] [--apis N] [--workers N]
                        [--profile FOLDER] [--against FOLDER]

  --quick            shorter runs and 20,000 deliveries to drain instead of 50,000
  --only PART,…      of ceilings, publish, drain, both, fanout, tenants, latency; ceilings are needed for the ratios;
                     endpoints, which runs only when named: a backlog for 5,000 endpoints of one tenant (2 minutes);
                     steady, likewise: ten minutes at one rate, and what memory does (--quick: one);
                     neighbours, likewise: what a tenant, and a tenant's healthy endpoint,
                     notice of another endpoint that hangs, fails, is slow, refuses, is inactive or comes back,
                     and how ten tenants share a saturated worker (up to 10 minutes; --quick: 5);
                     held, likewise: what publishing and claiming cost beside a million held deliveries (2 minutes)
  --json FILE        writes all figures there
  --tls              endpoints are https, and so are the bare requests (not in neighbours)
  --apis, --workers  processes of each, default 1
  --against FOLDER   instead of all parts: how many times as fast this checkout is as the one in FOLDER (after npm ci there), by turns
                     of 0.4 s, which tells some hundredths apart (up to 10 minutes; --quick: 5)
  --profile FOLDER   CPU profiles of the API and worker processes (open them with Chrome's developer tools)
`

const USUAL = ['ceilings', 'publish', 'drain', 'both', 'fanout', 'tenants', 'latency']
const PARTS = [...USUAL, 'endpoints', 'steady', 'held', 'neighbours']

const { values: flags } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    only: { type: 'string', default: USUAL.join() },
    json: { type: 'string' },
    tls: { type: 'boolean', default: false },
    apis: { type: 'string', default: '1' },
    workers: { type: 'string', default: '1' },
    against: { type: 'string' },
    profile: { type: 'string' },
    help: { type: 'boolean', default: false },
  },
})
const parts = flags.against ? [] : flags.only.split(',')
const unknown = parts.filter((part) => !PARTS.includes(part))
if (flags.help || unknown.length > 0) {
  process.stderr.write(unknown.length > 0 ? `bench: no such part: ${unknown.join(', ')}\n\n${USAGE}` : USAGE)
  process.exit(flags.help ? 0 : 1)
}

let database: BenchDatabase | undefined
let services: Services | undefined
const helpers: Helper<'receiver' | 'load' | 'post' | 'crowd'>[] = []
let cleaned: Promise<void> | undefined
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
  process.on(signal, () => void cleanUp().then(() => process.exit(130)))
}

try {
  await main()
} catch (error) {
  process.exitCode = 1
  if (!cleaned) process.stderr.write(`bench: ${(error as Error).message}\n`)
} finally {
  await cleanUp()
}
process.exit()

async function main(): Promise<void> {
  const begun = performance.now()
  const helper = <Name extends 'receiver' | 'load' | 'post' | 'crowd'>(name: Name) => {
    const one = startHelper(name)
    helpers.push(one as never)
    return one
  }
  const busy = await busyShare()
  if (busy > 0.1) say(`(others keep ${Math.round(busy * 100)} % of the cores busy: the figures will be too low)`)
  database = await startDatabase()
  const receiver = helper('receiver')
  const load = helper('load')
  const { port: receiverPort, securePort } = await receiver.ask('listen', null)
  const receiverOrigin = flags.tls ? `https://127.0.0.1:${securePort}` : `http://127.0.0.1:${receiverPort}`
  if (flags.profile) mkdirSync(flags.profile, { recursive: true })
  services = createServices(database, { profileTo: flags.profile && resolve(flags.profile) })
  const workers = Number(flags.workers)
  const bench: Bench = {
    database,
    services,
    receiver,
    load,
    receiverPort,
    receiverOrigin,
    workers,
    quick: flags.quick,
    apiKey: '',
  }
  const report: Report = {
    at: new Date().toISOString(),
    machine: { cores: availableParallelism(), node: process.version, postgres: database.version, busyBefore: busy },
    processes: { apis: Number(flags.apis), workers },
    tls: flags.tls,
    seconds: 0,
  }

  let beside = async <Run>(_kinds: Ceiling[], part: () => Promise<Run>): Promise<Beside<Run>> => ({
    ...(await part()),
    ceilings: {},
  })
  if (parts.includes('ceilings')) {
    const ceilings = await createCeilings(bench, helper('post'))
    report.ceilings = ceilings.all
    beside = ceilings.beside
  }
  await services.start('api', Number(flags.apis))
  await database.keepDays()
  bench.apiKey = await register(services, receiverOrigin)
  let memory = 0
  const noteMemory = () => {
    memory = Math.max(memory, memoryOfTree(database?.pid ?? 0) ?? 0)
  }
  /** Measures a part, if it is asked for. */
  async function part(name: string, measure: () => Promise<void>): Promise<void> {
    if (!parts.includes(name)) return
    say(name)
    await measure()
    noteMemory()
  }

  let waiting = 0
  if (parts.includes('publish')) {
    report.publish = []
    waiting += await warmUp(bench)
    for (const connections of [1, 64, 256]) {
      say(`publish, ${connections} connections`)
      const kind = connections === 1 ? 'oneCommit' : 'commits'
      const run = await beside([kind], () => measurePublish(bench, connections))
      report.publish.push(run)
      waiting += run.events
      noteMemory()
    }
  }
  if (parts.includes('drain')) {
    await queueWarmUp(bench, waiting)
    say('drain')
    report.drain = await beside(['posts', 'usualPosts'], () => measureDrain(bench))
    noteMemory()
  } else if (waiting > 0) await deliverAll(bench)
  await part('both', async () => {
    report.both = await beside(['commits', 'posts'], () => measureBoth(bench))
  })
  await part('fanout', async () => {
    report.fanout = await beside(['posts', 'usualPosts'], () => measureFanout(bench))
  })
  await part('tenants', async () => {
    report.tenants = await beside(['commits', 'posts', 'usualPosts'], () => measureTenants(bench))
  })
  await part('endpoints', async () => {
    report.endpoints = await beside(['posts', 'usualPosts'], () => measureEndpoints(bench))
  })
  await part('latency', async () => {
    report.latency = [await measureLatency(bench, null), await measureLatency(bench, 200)]
  })
  await part('steady', async () => {
    report.steady = await measureSteady(bench)
  })
  await part('held', async () => {
    report.held = await measureHeld(bench)
  })
  if (parts.includes('neighbours')) {
    const helpers = {
      crowd: helper('crowd'),
      lonely: helper('receiver'),
      loadOfA: helper('load'),
      flood: helper('load'),
    }
    report.neighbours = await measureNeighbours(bench, helpers, say)
  }
  if (flags.against) {
    report.turns = await measureAgainst(bench, resolve(flags.against), say)
    noteMemory()
  }
  report.peakMiB = { api: services.peak('api'), worker: services.peak('worker'), postgres: memory }
  report.cpuSeconds = { api: services.cpu('api'), worker: services.cpu('worker') }
  report.seconds = (performance.now() - begun) / 1000
  // Profiles are written by processes that end in order.
  await services.stop('api')
  printReport(report)
  if (report.neighbours) printNeighbours(report.neighbours)
  if (report.turns) printTurns(report.turns)
  if (flags.json) writeFileSync(flags.json, `${JSON.stringify(report, null, 2)}\n`)
}

function say(part: string): void {
  process.stderr.write(`measuring: ${part}\n`)
}

function cleanUp(): Promise<void> {
  cleaned ??= (async () => {
    services?.kill()
    for (const helper of helpers) helper.stop()
    await database?.stop()
  })()
  return cleaned
}
