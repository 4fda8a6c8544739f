import type { Log } from '../log.ts'

export type Loop = {
  /** There may be something to do: run again now, instead of after the idle time. */
  wake(): void
  /** Starts no further run; resolves when the current one is over. */
  stop(): Promise<void>
}

/**
 * Runs `run` again and again: at once while it answers true, else after `idleMs`, or the time that it answers instead, or when woken. But
 * runs begin at least `pauseMs` after each other, which is asked for after each, and between two it rests for as long as the last one took,
 * up to `pauseMs`. A run that fails is logged, and the next one comes after the idle time, however often it is woken.
 */
export function startLoop(options: {
  name: string
  run: () => Promise<boolean | number>
  idleMs: number
  pauseMs?: () => number
  log: Log
}): Loop {
  const { pauseMs: pauseOf = () => 0 } = options
  let stopped = false
  let woken = false
  let failed = false
  let isPausing = false
  let alarm: (() => void) | undefined

  const sleep = (ms: number) =>
    new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, ms)
      alarm = () => {
        clearTimeout(timer)
        resolve()
      }
    })

  async function loop(): Promise<void> {
    while (!stopped) {
      woken = false
      failed = false
      let more: boolean | number = false
      const begun = performance.now()
      try {
        more = await options.run()
      } catch (error) {
        options.log.error({ err: error }, `${options.name}.failed`)
        failed = true
      }
      const took = performance.now() - begun
      const pauseMs = pauseOf()
      const restMs = Math.max(pauseMs - took, Math.min(took, pauseMs))
      isPausing = true
      if (restMs > 0 && !stopped) await sleep(restMs)
      isPausing = false
      const idleMs = typeof more === 'number' ? more : options.idleMs
      if ((failed || (more !== true && !woken)) && !stopped) await sleep(Math.max(0, idleMs - restMs))
    }
  }

  const running = loop()
  return {
    wake() {
      woken = true
      if (!failed && !isPausing) alarm?.()
    },
    stop() {
      stopped = true
      alarm?.()
      return running
    },
  }
}
