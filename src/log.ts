import { pino } from 'pino'
import { createIsoTime } from './iso-time.ts'

export type Log = pino.Logger

/** A write costs as much as several lines: under load they go out by the page, else after this long. */
const PAGE_BYTES = 32_768
const DELAY_MS = 20

/**
 * One JSON object a line on stdout, written while the program goes on, and at once when it exits. A field that could carry
 * a secret is cut here as a second wall: the first is that no line is given one.
 */
export function createLog(level: string): Log {
  const isoTime = createIsoTime()
  const options: pino.LoggerOptions = {
    level,
    base: null,
    timestamp: () => `,"time":"${isoTime(Date.now())}"`,
    formatters: { level: (label) => ({ level: label }) },
    redact: {
      // err.client: what pg hangs on its errors, the whole connection with its secrets.
      paths: ['authorization', 'signing_secret', 'api_key', 'payload', 'err.client'],
      censor: '***',
    },
  }
  return pino(
    options,
    inPages(
      pino.destination({
        dest: 1,
        sync: false,
        minLength: PAGE_BYTES,
        maxWrite: 2 * PAGE_BYTES,
        periodicFlush: DELAY_MS,
      }),
    ),
  )
}

/** The destination measures its whole page anew for each line that it gets, which took half of logging it. */
function inPages(destination: ReturnType<typeof pino.destination>) {
  let page = ''
  let waiting: NodeJS.Timeout | undefined
  const turn = () => {
    clearTimeout(waiting)
    waiting = undefined
    if (page !== '') destination.write(page)
    page = ''
  }
  const turnAtOnce = () => {
    turn()
    destination.flush()
  }
  // Before the destination's own, which then writes what it holds: it must not begin a write that nobody waits for.
  process.prependListener('exit', () => {
    destination.flushSync()
    Object.assign(destination, { minLength: Number.MAX_SAFE_INTEGER })
    turn()
  })
  return {
    write(line: string) {
      page += line
      if (page.length >= PAGE_BYTES) turn()
      else waiting ??= setTimeout(turnAtOnce, DELAY_MS).unref()
    },
    /** For what is fatal. */
    flushSync() {
      turn()
      destination.flushSync()
    },
  }
}
