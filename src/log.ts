import { pino } from 'pino'

export type Log = pino.Logger

/**
 * One JSON object a line on stdout. Anything that could carry a secret is cut here as a second wall: the first is
 * that no line is given one.
 */
export function createLog(level: string): Log {
  return pino({
    level,
    base: null,
    timestamp: pino.stdTimeFunctions.isoTime,
    formatters: { level: (label) => ({ level: label }) },
    redact: {
      paths: [
        'authorization',
        '*.authorization',
        'signing_secret',
        '*.signing_secret',
        'api_key',
        '*.api_key',
        'payload',
        // What pg hangs on its errors: the whole connection, its secrets included.
        'err.client',
      ],
      censor: '***',
    },
  })
}
