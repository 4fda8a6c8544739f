import fs from 'node:fs'
import { pino } from 'pino'
import { createIsoTime } from './iso-time.ts'

export type Log = pino.Logger

/** A write costs as much as several lines: under load they go out by the page, else after this long. */
const PAGE_BYTES = 32_768
const DELAY_MS = 20
/** What waits where stdout takes nothing for a while. */
const MOST_WAITING = 8 * 1024 * 1024
/** How long the last lines are tried. */
const LAST_MS = 500

/**
 * One JSON object a line on stdout, written while the program goes on, and at once when it exits. Where stdout takes nothing, the
 * program goes on as well: 8 MiB of lines wait, then as many as come are left out, and counted in a line `log.dropped`. A field
 * that could carry a secret is cut here as a second wall: the first is that no line is given one.
 */
export function createLog(level: string): Log {
  const isoTime = createIsoTime()
  const toldAt = level === 'error' ? 'error' : 'warn'
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
  const destination = pino.destination({
    dest: 1,
    sync: false,
    minLength: PAGE_BYTES,
    maxWrite: 2 * PAGE_BYTES,
    maxLength: MOST_WAITING,
    periodicFlush: DELAY_MS,
  })
  const log: Log = pino(
    options,
    inPages(destination, (lines) => log[toldAt]({ lines }, 'log.dropped')),
  )
  return log
}

type Destination = ReturnType<typeof pino.destination>

/** The destination measures its whole page anew for each line that it gets, which took half of logging it. */
function inPages(destination: Destination, tellDropped: (lines: number) => void) {
  let page = ''
  let waiting: NodeJS.Timeout | undefined
  let dropped = 0
  destination.on('drop', (lines: string) => {
    dropped += lines.split('\n').length - 1
  })
  // Of a full disk, say: it is tried again with what comes next, and the program goes on.
  destination.on('error', () => {})
  const turn = () => {
    clearTimeout(waiting)
    waiting = undefined
    const before = dropped
    if (page !== '') destination.write(page)
    page = ''
    if (dropped === 0 || dropped > before) return
    dropped = 0
    tellDropped(before)
  }
  const turnAtOnce = () => {
    turn()
    destination.flush()
  }
  // Before the destination's own, which must find nothing left.
  process.prependListener('exit', () => {
    flushSync(destination)
    Object.assign(destination, { minLength: Number.MAX_SAFE_INTEGER })
    turn()
    flushSync(destination)
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
      flushSync(destination)
    },
  }
}

/** The destination would try for ever, even where nobody reads any more, and the program would never end. */
function flushSync(destination: Destination): void {
  const { writeSync } = fs
  const over = performance.now() + LAST_MS
  const writeInTime = (fd: number, text: string) => {
    try {
      return writeSync(fd, text)
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'EAGAIN' && performance.now() < over) throw error
      return Buffer.byteLength(text)
    }
  }
  Object.assign(fs, { writeSync: writeInTime })
  try {
    destination.flushSync()
  } finally {
    Object.assign(fs, { writeSync })
  }
}
