import { getHeapSpaceStatistics } from 'node:v8'

// Preloaded, with --expose-gc, into a process whose memory is watched: on SIGUSR2 it collects all garbage, and logs what
// is left, and what of it is compiled code.

const CODE = ['code_space', 'trusted_space']

process.on('SIGUSR2', () => {
  globalThis.gc?.({ type: 'major', execution: 'sync', flavor: 'last-resort' })
  const code = getHeapSpaceStatistics()
    .filter(({ space_name }) => CODE.includes(space_name))
    .reduce((sum, { space_used_size }) => sum + space_used_size, 0)
  process.stdout.write(`${JSON.stringify({ msg: 'memory', ...process.memoryUsage(), code })}\n`)
})
