/**
 * The CPU time of the longest turn of this thread's event loop, in milliseconds, from now until the returned function is called:
 * whoever else is busy does not count.
 */
export function watchTurns(): () => number {
  let longest = 0
  let before = process.threadCpuUsage()
  const look = () => {
    const { user, system } = process.threadCpuUsage(before)
    longest = Math.max(longest, (user + system) / 1000)
    before = process.threadCpuUsage()
  }
  const looking = setInterval(look, 1)
  return () => {
    look()
    clearInterval(looking)
    return longest
  }
}

const TEXT = JSON.stringify(Array.from({ length: 20_000 }, (_, nth) => ({ id: nth.toString(36), nth })))

/**
 * The CPU time, in milliseconds, that parsing 480 KB of JSON takes at present: some 5 on a machine that is not slow. Whoever compares
 * a turn with it asks the same of every machine.
 */
export function parsingTime(): number {
  const once = () => {
    const before = process.threadCpuUsage()
    JSON.parse(TEXT)
    const { user, system } = process.threadCpuUsage(before)
    return (user + system) / 1000
  }
  return Array.from({ length: 9 }, once).sort((a, b) => a - b)[4] as number
}

/** Node's flags for a program that writes to stderr how long each turn took that took 20 ms of CPU or more. */
export const TELL_TURNS = [
  '--import',
  `data:text/javascript,${encodeURIComponent(`
    let before = process.threadCpuUsage()
    setInterval(() => {
      const { user, system } = process.threadCpuUsage(before)
      before = process.threadCpuUsage()
      if (user + system > 20_000) process.stderr.write('turn ' + Math.round((user + system) / 1000) + '\\n')
    }, 1).unref()`)}`,
]

/** The longest turn, in milliseconds, that a program started with TELL_TURNS has written of since its stderr was `before`. */
export const longestTurn = (stderr: string, before: string): number =>
  Math.max(0, ...[...stderr.slice(before.length).matchAll(/^turn (\d+)$/gm)].map(([, ms]) => Number(ms)))
