import fs from 'node:fs'
import { pino } from 'pino'
import { createIsoTime } from './iso-time.ts'

export type Log = pino.Logger

/** A write costs as much as several lines, so lines are written when a page is full, or after this long. */
const PAGE_BYTES = 32_768
const DELAY_MS = 20
/** How much may wait while stdout takes nothing. */
const MAX_WAITING = 8 * 1024 * 1024
/** The fields of a database error that hold prose, and the forms by which parameters or a row in it are recognised. */
const WORDS = ['where', 'detail']
const VALUES = /\$\d+ = |^JSON data|^Failing row/m
/** How long writing the last lines may take in all, how long none may be taken, and how long a full pipe is left alone. */
const LAST_MS = 5000
const STUCK_MS = 500
const AGAIN_MS = 5
/** What `Atomics.wait` waits on, only to let time pass: nobody notifies it. */
const NOBODY = new Int32Array(new SharedArrayBuffer(4))

/**
 * Writes one JSON object per line to stdout, asynchronously, and synchronously at exit. If stdout takes nothing, the program
 * goes on: 8 MiB of lines wait, further ones are dropped, and a line `log.dropped` says how many. Fields that could carry a
 * secret are masked as a second wall; the first is that no line is given one.
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
      // err.client: pg attaches the whole connection, with its secrets, to its errors. err.where: where it is told to
      // (log_parameter_max_length_on_error), the database names all parameters there. err.detail: a row that it refuses.
      paths: ['authorization', 'signing_secret', 'api_key', 'payload', 'err.client', 'err.where', 'err.detail'],
      censor: (value, path) => (WORDS.includes(String(path.at(-1))) && !VALUES.test(String(value)) ? value : '***'),
    },
  }
  const destination = pino.destination({
    // Asked for its number, stdout stops blocking if it is a pipe: a write that nobody reads would keep the process from ending.
    dest: process.stdout.fd,
    sync: false,
    minLength: PAGE_BYTES,
    maxWrite: 2 * PAGE_BYTES,
    maxLength: MAX_WAITING,
    periodicFlush: DELAY_MS,
    // Otherwise a full pipe is tried again after 100 ms, and not with the next page.
    retryEAGAIN: () => false,
  })
  const log: Log = pino(
    options,
    inPages(destination, (lines) => log[toldAt]({ lines }, 'log.dropped')),
  )
  return log
}

type Destination = ReturnType<typeof pino.destination>

/** Collects lines into pages: the destination would measure its whole page again for every line, half of what a line costs. */
function inPages(destination: Destination, tellDropped: (lines: number) => void) {
  let page = ''
  let waiting: NodeJS.Timeout | undefined
  let dropped = 0
  destination.on('drop', (lines: string) => {
    dropped += lines.split('\n').length - 1
  })
  // A full disk, say. The next write tries again.
  destination.on('error', () => {})
  const put = () => {
    if (page !== '') destination.write(page)
    page = ''
  }
  const turn = () => {
    clearTimeout(waiting)
    waiting = undefined
    const before = dropped
    put()
    if (dropped === 0 || dropped > before) return
    dropped = 0
    tellDropped(before)
    // At once, as a whole page may not fit.
    put()
    if (dropped > 0) dropped = before
  }
  const turnAtOnce = () => {
    turn()
    destination.flush()
  }
  /** Writes all there is, in the order in which it came. */
  const writeAll = () => {
    flushSync(destination)
    Object.assign(destination, { minLength: Number.MAX_SAFE_INTEGER })
    turn()
    flushSync(destination)
  }
  // Before the destination's own listener, which must find nothing left.
  process.prependListener('exit', writeAll)
  return {
    write(line: string) {
      page += line
      if (page.length >= PAGE_BYTES) turn()
      else waiting ??= setTimeout(turnAtOnce, DELAY_MS).unref()
    },
    /** Called by pino for fatal lines. */
    flushSync: writeAll,
  }
}

/**
 * Writes what is left while somebody takes it. The destination's own `flushSync` would try for ever when nobody does, and the program
 * would never end.
 */
function flushSync(destination: Destination): void {
  const { writeSync } = fs
  const end = performance.now() + LAST_MS
  let over = performance.now() + STUCK_MS
  const writeInTime = (fd: number, text: string) => {
    while (performance.now() < over) {
      try {
        const written = writeSync(fd, text)
        over = Math.min(end, performance.now() + STUCK_MS)
        return written
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === 'EAGAIN') Atomics.wait(NOBODY, 0, 0, AGAIN_MS)
        else over = 0
      }
    }
    return Buffer.byteLength(text)
  }
  Object.assign(fs, { writeSync: writeInTime })
  try {
    destination.flushSync()
  } finally {
    Object.assign(fs, { writeSync })
  }
}
