// Preloaded into a process whose clock is to be wrong: by SKEW_MS milliseconds.

const skewMs = Number(process.env.SKEW_MS)
const { now } = Date

globalThis.Date = new Proxy(Date, {
  construct: (real, given, target) => Reflect.construct(real, given.length === 0 ? [now() + skewMs] : given, target),
  get: (real, name) => (name === 'now' ? () => now() + skewMs : Reflect.get(real, name)),
})
