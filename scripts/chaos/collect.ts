// Preloaded, with --expose-gc, into a process whose memory is watched: on SIGUSR2 it collects all garbage, and logs what
// is left.

process.on('SIGUSR2', () => {
  globalThis.gc?.({ type: 'major', execution: 'sync', flavor: 'last-resort' })
  process.stdout.write(`${JSON.stringify({ msg: 'memory', ...process.memoryUsage() })}\n`)
})
