/** Returns a function that runs what it is given, in order: at most `max` of them in one turn of the event loop. */
export function limitPerTurn(max: number): (run: () => void) => void {
  let count = 0
  let waiting: (() => void)[] = []
  const endTurn = () => {
    const next = waiting.slice(0, max)
    waiting = waiting.slice(max)
    count = next.length
    // In the next turn, each with what it leads to at once before the one after it.
    for (const run of next) setImmediate(run)
    if (count > 0) setImmediate(endTurn)
  }
  return (run) => {
    if (count === 0) setImmediate(endTurn)
    if (count < max) {
      count++
      run()
    } else waiting.push(run)
  }
}
