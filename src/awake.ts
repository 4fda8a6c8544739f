const TICK_MS = 250
const LONGEST_GAP_MS = 1000

let ms = 0
let lastTick = performance.now()

const sinceTick = () => Math.min(performance.now() - lastTick, LONGEST_GAP_MS)

setInterval(() => {
  ms += sinceTick()
  lastTick = performance.now()
}, TICK_MS).unref()

/**
 * A clock, in milliseconds, for what the database may take its time over: a time in which this process stood still counts for a second at
 * most. While thousands of connections bring megabytes each, one turn of the event loop takes seconds (libuv).
 */
export const awakeMs = (): number => ms + sinceTick()
