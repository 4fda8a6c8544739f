import { availableParallelism } from 'node:os'
import type { BenchDatabase, Bytes, Statement } from './database.ts'
import type { Helper } from './helper.ts'
import { nowMicros } from './serve.ts'
import type { Services } from './services.ts'
import { busySeconds, cpuSeconds, cpuSecondsOfTree } from './usage.ts'

/** The processes whose work is counted. */
export type Measured = {
  database: BenchDatabase
  services: Services
  receiver: Helper<'receiver'>
  load: Helper<'load'>
}

export type Cost = {
  /** Microseconds of CPU per event or delivery. */
  cpuMicros: Record<'api' | 'worker' | 'postgres' | 'receiver' | 'load', number | null>
  statements: number | null
  walBytes: number
  tableBytes: number
  queueBytes: number
  topStatements: Statement[] | null
  /** The share of the cores that went to processes that are not the bench's. */
  othersShare: number | null
}

const sumOf = (cpu: Record<string, number | null>) =>
  Object.values(cpu).reduce<number>((sum, seconds) => sum + (seconds ?? Number.NaN), 0)

function sharedOut(from: { now: number; busy: number }, to: { now: number; busy: number }, ownSeconds: number) {
  const available = ((to.now - from.now) / 1e6) * availableParallelism()
  const share = (to.busy - from.busy - ownSeconds) / available
  return Number.isNaN(share) ? null : Math.max(share, 0)
}

/** How many of these clients sent: the checks of foreign keys, which Postgres makes by itself, are listed among them. */
const sent = (statements: Statement[]): number =>
  statements.filter(({ query }) => !query.endsWith('FOR KEY SHARE OF x')).reduce((sum, { calls }) => sum + calls, 0)

/** Counts what happens from now on; the returned function tells what it came to per item. */
export async function countCost(bench: Measured): Promise<(items: number) => Promise<Cost>> {
  const { database, services } = bench
  const cpu = () => ({
    api: services.cpu('api'),
    worker: services.cpu('worker'),
    postgres: cpuSecondsOfTree(database.pid),
    receiver: cpuSeconds(bench.receiver.pid),
    load: cpuSeconds(bench.load.pid),
  })
  const clock = () => ({ now: nowMicros(), busy: busySeconds() })
  await database.resetStatements()
  const bytesBefore: Bytes = await database.bytes()
  const cpuBefore = cpu()
  const clockBefore = clock()
  return async (items) => {
    const cpuAfter = cpu()
    const clockAfter = clock()
    const bytes = await database.bytes()
    const statements = await database.statements()
    const per = (name: keyof typeof cpuAfter) => {
      const [before, after] = [cpuBefore[name], cpuAfter[name]]
      return before === null || after === null ? null : ((after - before) * 1e6) / items
    }
    return {
      cpuMicros: {
        api: per('api'),
        worker: per('worker'),
        postgres: per('postgres'),
        receiver: per('receiver'),
        load: per('load'),
      },
      statements: statements && sent(statements) / items,
      walBytes: (bytes.wal - bytesBefore.wal) / items,
      tableBytes: (bytes.tables - bytesBefore.tables) / items,
      queueBytes: (bytes.queue - bytesBefore.queue) / items,
      topStatements: statements?.slice(0, 10) ?? null,
      othersShare: sharedOut(clockBefore, clockAfter, sumOf(cpuAfter) - sumOf(cpuBefore)),
    }
  }
}
