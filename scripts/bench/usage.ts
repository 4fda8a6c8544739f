import { readFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'

// What processes use, from /proc: null where there is none (only Linux has it).

const TICKS_PER_SECOND = 100

/** CPU seconds so far, those of ended and waited-for children included; null when unknown. */
export function cpuSeconds(pid: number): number | null {
  const stat = read(`/proc/${pid}/stat`)
  if (stat === null) return null
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ')
  const ticks = [11, 12, 13, 14].reduce((sum, index) => sum + Number(fields[index]), 0)
  return ticks / TICKS_PER_SECOND
}

/** The same of a process and the children it has now: for Postgres with its backends. */
export function cpuSecondsOfTree(pid: number): number | null {
  const own = cpuSeconds(pid)
  return own === null ? null : childrenOf(pid).reduce((sum, child) => sum + (cpuSeconds(child) ?? 0), own)
}

/** The most memory that a process ever held, in MiB. */
export const peakMemory = (pid: number): number | null => memoryLine(pid, 'VmHWM')

/** The memory that a process holds, in MiB. */
export const residentMemory = (pid: number): number | null => memoryLine(pid, 'VmRSS')

function memoryLine(pid: number, name: string): number | null {
  const size = read(`/proc/${pid}/status`)?.match(new RegExp(`${name}:\\s+(\\d+) kB`))?.[1]
  return size === undefined ? null : Number(size) / 1024
}

/** Memory of a process and its children in MiB, what they share counted once. */
export function memoryOfTree(pid: number): number | null {
  const shares = [pid, ...childrenOf(pid)].map(
    (one) => read(`/proc/${one}/smaps_rollup`)?.match(/^Pss:\s+(\d+) kB/m)?.[1],
  )
  if (shares[0] === undefined) return null
  return shares.reduce((sum, share) => sum + Number(share ?? 0), 0) / 1024
}

/** Seconds that all cores together have been busy since the machine's start. */
export const busySeconds = (): number =>
  cpus().reduce((sum, { times }) => sum + times.user + times.nice + times.sys + times.irq, 0) / 1000

/** The share of all cores that is busy during a second: before the start, that is what others take. */
export async function busyShare(): Promise<number> {
  const before = busySeconds()
  await sleep(1000)
  return (busySeconds() - before) / cpus().length
}

const childrenOf = (pid: number): number[] =>
  (read(`/proc/${pid}/task/${pid}/children`) ?? '').split(' ').filter(Boolean).map(Number)

function read(file: string): string | null {
  try {
    return readFileSync(file, 'utf8')
  } catch {
    return null
  }
}
