/** The CPU time of this process that some work takes, in milliseconds, the least of so many times: whoever else is busy does not count. */
export function cpuTime(work: () => void, times = 1): number {
  const taken = Array.from({ length: times }, () => {
    const before = process.cpuUsage()
    work()
    const { user, system } = process.cpuUsage(before)
    return (user + system) / 1000
  })
  return Math.min(...taken)
}
