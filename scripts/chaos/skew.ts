// Preloaded into a process whose clock is to be wrong, since before it started: by SKEW_MS milliseconds.

const skewMs = Number(process.env.SKEW_MS)
const { now } = Date

// pg-boss goes by it (STEADY_CLOCK in src/queue.ts).
Object.defineProperty(performance, 'timeOrigin', { value: performance.timeOrigin + skewMs })

globalThis.Date = new Proxy(Date, {
  construct: (real, given, target) => Reflect.construct(real, given.length === 0 ? [now() + skewMs] : given, target),
  get: (real, name) => (name === 'now' ? () => now() + skewMs : Reflect.get(real, name)),
})
