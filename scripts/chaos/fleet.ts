import { readdirSync } from 'node:fs'
import type { Scope } from '../../test/support/cleanup.ts'
import { type Exit, type LogLine, type Service, startService } from '../../test/support/service.ts'
import { asShipped, THIS_CHECKOUT } from '../as-shipped.ts'
import { peakMemory } from '../bench/usage.ts'

export type Running = Service & {
  mode: 'api' | 'worker'
  /** Open file descriptors when it was ready. */
  filesAtStart: number
  ended: Exit | null
}

/** What a process may open beyond what it has at its start: the connections of its pools, and a few that rest. */
const FILES_MORE = 30
const MAX_MIB = 512
const SHIPPED = asShipped(THIS_CHECKOUT)

export type Fleet = ReturnType<typeof createFleet>

/** The real program in processes of their own. One that ends without having been told to is a finding. */
export function createFleet(
  scope: Scope,
  databaseUrl: string,
  { env, flags = [] }: { env: Record<string, string>; flags: string[] | undefined },
) {
  const all: Running[] = []
  const told = new Set<Running>()
  let peak = 0

  const note = (one: Running) => {
    peak = Math.max(peak, peakMemory(one.pid) ?? 0)
  }

  const running = (mode?: Running['mode']) =>
    all.filter((one) => one.ended === null && !told.has(one) && (mode === undefined || one.mode === mode))

  return {
    running,
    /** Starts one more and resolves when it is ready. */
    async start(mode: Running['mode'], more: { env?: Record<string, string>; databaseUrl?: string } = {}) {
      const service = await startService(scope, {
        databaseUrl: more.databaseUrl ?? databaseUrl,
        mode,
        env: { ...SHIPPED.env, ...env, ...more.env },
        flags: [...SHIPPED.flags, ...flags],
      })
      const one: Running = { ...service, mode, filesAtStart: openFiles(service.pid) ?? 0, ended: null }
      void service.exited.then((exit) => {
        one.ended = exit
      })
      all.push(one)
      return one
    },
    /** kill -9. */
    async kill(one: Running): Promise<void> {
      note(one)
      told.add(one)
      await one.kill()
    },
    /** SIGTERM; resolves with how it ended. */
    async stop(one: Running): Promise<Exit> {
      note(one)
      told.add(one)
      return await one.stop('SIGTERM')
    },
    /** Where APIs run. */
    urls: () => running('api').map(({ url }) => url),
    /** The same as clients know it, who do not hear that one is being stopped. */
    addresses: () => all.filter((one) => one.mode !== 'worker' && one.ended === null).map(({ url }) => url),
    peakMiB: () => {
      for (const one of all) if (one.ended === null) note(one)
      return Math.round(peak)
    },
    /** What speaks against the processes: ended by themselves, noisy, or too big. */
    problems(): string[] {
      const found: string[] = []
      for (const one of all) {
        const name = `${one.mode} ${one.pid}`
        if (one.ended !== null && !told.has(one))
          found.push(`${name} ended by itself with ${JSON.stringify(one.ended)}`)
        if (one.stderr() !== '') found.push(`${name} wrote to stderr: ${one.stderr().slice(0, 300)}`)
        const error = one.logs.find(
          (line) => line.level === 'fatal' || (line.level === 'error' && !tellsOfDatabase(line)),
        )
        if (error) found.push(`${name} logged ${error.text.slice(0, 300)}`)
      }
      if (peak > MAX_MIB) found.push(`a process took ${Math.round(peak)} MiB`)
      return found
    },
    /** Processes that hold more files open than at their start, long after the last request. */
    leaks(): string[] {
      return all
        .filter(({ ended }) => ended === null)
        .map((one) => ({ ...one, files: openFiles(one.pid) ?? 0 }))
        .filter(({ files, filesAtStart }) => files > filesAtStart * 1.1 + FILES_MORE)
        .map((one) => `${one.mode} ${one.pid} has ${one.files} files open, ${one.filesAtStart} at its start`)
    },
  }
}

/** How it is called that the database is away, refuses everything or is slow: by SQLSTATE, or in words. */
const DATABASE = /^(08|25006|53|57)|ECONN|EPIPE|connection|the database|trying to connect/i

const tellsOfDatabase = ({ err }: LogLine) => {
  const { code = '', message = '' } = (err ?? {}) as { code?: string; message?: string }
  return DATABASE.test(`${code} ${message}`)
}

/** How many file descriptors a process has open; null when it is gone. */
export function openFiles(pid: number): number | null {
  try {
    return readdirSync(`/proc/${pid}/fd`).length
  } catch {
    return null
  }
}
