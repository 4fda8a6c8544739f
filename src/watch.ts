import { Line } from './line.ts'

/**
 * Returns a function that calls `look` every `everyMs` or so, until what it returns is called. All share one timer: one for each step
 * of a request would cost as much as routing it. They look in a turn's end: where the process stood still, what came meanwhile is read
 * first.
 */
export function createWatch(everyMs: number): (look: () => void) => () => void {
  const looks = new Line<() => void>()
  let timer: NodeJS.Timeout | undefined
  const lookAtAll = () => {
    for (const look of [...looks]) look()
    if (looks.size > 0) return
    clearInterval(timer)
    timer = undefined
  }
  return (look) => {
    const place = looks.join(look)
    timer ??= setInterval(() => setImmediate(lookAtAll), everyMs)
    return () => looks.leave(place)
  }
}
