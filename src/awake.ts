const TICK_MS = 250
const LONGEST_GAP_MS = 500

let ms = 0
let lastTick = performance.now()

const sinceTick = () => Math.min(performance.now() - lastTick, LONGEST_GAP_MS)

setInterval(() => {
  ms += sinceTick()
  lastTick = performance.now()
}, TICK_MS).unref()

/**
 * A clock, in milliseconds, for what others may take their time over: of a time in which this process stood still it counts half a second.
 * While thousands of connections bring megabytes each, one turn of the event loop can take seconds (libuv), and no answer is late for that.
 */
export const awakeMs = (): number => ms + sinceTick()
