import { setTimeout as sleep } from 'node:timers/promises'
import { type Bench, PATIENCE, publish, untilRecorded } from './parts.ts'
import { nowMicros } from './serve.ts'
import type { Running } from './services.ts'

// Two checkouts of the program on one database, by turns so short that the machine, whose speed may double within minutes, is the
// same for both. Only this tells some hundredths apart.

const TURN_MS = 400
/** Answers to what a worker that is halted has sent are still on their way for so long. */
const REST_MS = 15
/** The first turns are those of processes that have just been warmed up or halted. */
const UNCOUNTED = 4
const WARM_UP_SECONDS = 10
/** How many times as many are queued as the turns would take at the pace of the warm-up. */
const MARGIN = 2
const ENDPOINTS = { one: 1, ten: 10 }

/** `ratio`: how many times as fast this checkout is as the other one, ± `margin`, twice its standard error. */
export type Turns = {
  what: string
  turns: number
  perSecond: [this: number, other: number]
  ratio: number
  margin: number
}

/** Of this checkout, and of the other one. */
type Both = [Running, Running]

/** Publishing over 64 connections, and delivering to one endpoint and to ten, beside the checkout in `folder`. */
export async function measureAgainst(bench: Bench, folder: string, say: (what: string) => void): Promise<Turns[]> {
  const turns = bench.quick ? 12 : 34
  const { services } = bench
  const startBoth = async (role: 'api' | 'worker') =>
    [...(await services.start(role, 1)), ...(await services.start(role, 1, folder))] as Both

  say('publish')
  await services.stop('api')
  const apis = await startBoth('api')
  await publish(bench, { connections: 64, stop: { seconds: WARM_UP_SECONDS } })
  const publishing = async ({ port }: Running) => {
    const run = await publish(bench, { connections: 64, ports: [port], stop: { seconds: TURN_MS / 1000 } })
    return run.requests / run.seconds
  }
  const runs = [compare('publish, 64 connections', await byTurns(turns, apis, publishing))]

  for (const name of ['one', 'ten'] as const) {
    say(`drain, ${name}`)
    const queue = (stop: { count: number } | { seconds: number }) =>
      publish(bench, { connections: 256, eventTypes: [`bench.${name}`], stop })
    await queue({ seconds: WARM_UP_SECONDS })
    const queued = await bench.database.queued()
    const warmUpBegun = nowMicros()
    const workers = await startBoth('worker')
    await untilRecorded(bench)
    const perSecond = queued / ((nowMicros() - warmUpBegun) / 1e6)
    services.halt('worker')
    await bench.database.pauseUpkeep()
    const seconds = 2 * (UNCOUNTED + turns) * (TURN_MS / 1000)
    await queue({ count: Math.ceil((MARGIN * seconds * perSecond) / ENDPOINTS[name]) })
    void bench.receiver.ask('expect', { count: Number.POSITIVE_INFINITY, seconds: PATIENCE.timeoutMs / 1000 })
    const delivering = async ({ pid }: Running) => {
      const before = await bench.receiver.ask('count', null)
      const begun = nowMicros()
      process.kill(pid, 'SIGCONT')
      await sleep(TURN_MS)
      process.kill(pid, 'SIGSTOP')
      const seconds = (nowMicros() - begun) / 1e6
      await sleep(REST_MS)
      return ((await bench.receiver.ask('count', null)) - before) / seconds
    }
    runs.push(compare(`deliver, endpoints: ${ENDPOINTS[name]}`, await byTurns(turns, workers, delivering)))
    if ((await bench.database.queued()) === 0) throw new Error('the backlog did not last for all turns')
    services.goOn('worker')
    await untilRecorded(bench)
    await bench.database.resumeUpkeep()
    await services.stop('worker')
  }
  return runs
}

/** In pairs of turns, each the other way round than the last; answers with the rates of those that count. */
async function byTurns(turns: number, processes: Both, take: (process: Running) => Promise<number>) {
  const rates: [number, number][] = []
  for (let nth = 0; nth < UNCOUNTED + turns; nth++) {
    const pair: [number, number] = [0, 0]
    for (const side of nth % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const)) pair[side] = await take(processes[side])
    if (nth >= UNCOUNTED) rates.push(pair)
  }
  return rates
}

function compare(what: string, rates: [number, number][]): Turns {
  const mean = (values: number[]) => values.reduce((sum, value) => sum + value, 0) / values.length
  const logs = rates.map(([own, other]) => Math.log(own / other))
  const middle = mean(logs)
  const error = Math.sqrt(mean(logs.map((log) => (log - middle) ** 2)) / (logs.length - 1))
  const perSecond: Turns['perSecond'] = [mean(rates.map(([own]) => own)), mean(rates.map(([, other]) => other))]
  return { what, turns: rates.length, perSecond, ratio: Math.exp(middle), margin: 2 * error }
}

export function printTurns(runs: Turns[]): void {
  for (const { what, turns, perSecond, ratio, margin } of runs) {
    const [own, other] = perSecond.map((rate) => `${Math.round(rate).toLocaleString('en-US')}/s`)
    process.stdout.write(
      `${what.padEnd(24)}  ${own}, the other ${other}: ${ratio.toFixed(3)} ± ${margin.toFixed(3)} × (${turns} turns)\n`,
    )
  }
}
