import { CronExpressionParser } from 'cron-parser'
import { z } from 'zod'
import { readDatabaseUrl } from './db/url.ts'
import { parseRange } from './egress/address.ts'

/** Of `MAX_PAYLOAD_BYTES`, and of a tenant's own. */
export const LARGEST_PAYLOAD_BYTES = 16_777_216
/** Of `MAX_FANOUT_ENDPOINTS`, and of a tenant's own: storing an event for so many takes half a second, for which its batch waits. */
export const MOST_FANOUT = 10_000

const wholeNumber = (min: number, max: number, fallback: number) =>
  z
    .string()
    .regex(/^\d+$/, 'must be a whole number')
    .transform(Number)
    .pipe(z.number().min(min, `must be at least ${min}`).max(max, `must be at most ${max}`))
    .default(fallback)

const commaSeparated = (value: string) =>
  value
    .split(',')
    .map((part) => part.trim())
    .filter((part) => part !== '')

const encryptionKey = z.string().transform((text, ctx) => {
  const key = Buffer.from(text, 'base64')
  // Buffer.from skips what it cannot read; comparing the round trip catches a mistyped key.
  if (key.length !== 32 || key.toString('base64').replace(/=+$/, '') !== text.replace(/=+$/, '')) {
    ctx.addIssue({ code: 'custom', message: 'each key must be 32 bytes in base64 (openssl rand -base64 32)' })
    return z.NEVER
  }
  return key
})

const cidr = z.string().transform((text, ctx) => {
  const range = parseRange(text)
  if (range === null) {
    ctx.addIssue({ code: 'custom', message: `${JSON.stringify(text)} is not a CIDR such as 127.0.0.0/8 or ::1/128` })
    return z.NEVER
  }
  return range
})

/** Whether its %-escapes can be decoded, as they will be: a password may have any character. */
function isEncoded(address: string): boolean {
  try {
    decodeURIComponent(address)
    return true
  } catch {
    return false
  }
}

/**
 * Whether it is read as it was meant. A #, ? or / in a password ends the user and password early if what precedes it could be a
 * host and port, and the rest of the password would be taken for something that may be logged.
 */
const isWhole = (address: string) => !address.includes('#') && !/^[^/]*\/\/[^/?@]*[/?][^=]*@/.test(address)

const webAddress = (protocols: string[]) =>
  z
    .string()
    .trim()
    .refine((value) => protocols.some((protocol) => value.toLowerCase().startsWith(protocol)), {
      error: `must be an address that starts with ${protocols.map((protocol) => `${protocol}//`).join(' or ')}`,
      abort: true,
    })
    .refine((value) => URL.canParse(value) && isWhole(value), {
      error:
        'cannot be read: it must name exactly one host, and special characters before it must be encoded: / is %2F',
      abort: true,
    })
    .refine(isEncoded, { error: 'must have its special characters encoded: % is %25', abort: true })

const hasNoQuery = (address: string) => new URL(address).search === ''
const hasNoUser = (address: string) => new URL(address).username === ''

/** As pg-boss reads it, which runs the schedule. */
function isCron(text: string): boolean {
  try {
    CronExpressionParser.parse(text, { tz: 'UTC' })
    // An H would stand for another time each time that it is read.
    return /^\S+( \S+){4}$/.test(text) && !/\bH/i.test(text)
  } catch {
    return false
  }
}

/**
 * The wall between the environment and the program. Empty variables count as absent. Units are in the names;
 * every bound is checked here and nowhere else.
 */
const environment = z.object({
  DATABASE_URL: webAddress(['postgres:', 'postgresql:'])
    .superRefine((url, context) => {
      try {
        readDatabaseUrl(url)
      } catch (error) {
        context.addIssue({ code: 'custom', message: (error as Error).message })
      }
    })
    .optional(),
  ADMIN_API_KEY: z
    .string()
    .regex(/^[\x21-\x7e]{16,}$/, 'must be at least 16 visible ASCII characters')
    .optional(),
  ENCRYPTION_KEY: z
    .string()
    .transform(commaSeparated)
    .pipe(z.array(encryptionKey).min(1, 'must be at least one key'))
    .optional(),
  HOST: z.string().default('0.0.0.0'),
  PORT: wholeNumber(0, 65535, 8080),
  LOG_LEVEL: z.enum(['fatal', 'error', 'warn', 'info', 'debug', 'trace', 'silent']).default('info'),
  BASE_URL: webAddress(['http:', 'https:'])
    .refine(hasNoQuery, 'must have no query')
    .refine(hasNoUser, 'must have no user or password: everybody may read it')
    .transform((url) => url.replace(/\/+$/, ''))
    .optional(),
  WEBHOOK_HEADER_PREFIX: z
    .string()
    .toLowerCase()
    .regex(/^[a-z0-9]+(-[a-z0-9]+)*$/, 'must be words of letters and digits joined by -')
    .max(64, 'must be at most 64 characters')
    .default('service'),
  EGRESS_ALLOW: z.string().default('').transform(commaSeparated).pipe(z.array(cidr)),
  EGRESS_PROXY_URL: webAddress(['http:', 'https:']).refine(hasNoQuery, 'must have no query').optional(),
  ATTEMPT_TIMEOUT_SECONDS: wholeNumber(1, 300, 15),
  RETRY_LIMIT: wholeNumber(0, 100, 14),
  RETRY_DELAY_SECONDS: wholeNumber(1, 86_400, 5),
  RETRY_DELAY_MAX_SECONDS: wholeNumber(1, 604_800, 36_000),
  WORKER_CONCURRENCY: wholeNumber(1, 10_000, 200),
  ENDPOINT_CONCURRENCY: wholeNumber(1, 10_000, 50),
  BREAKER_FAILURES: wholeNumber(1, 1_000_000, 10),
  BREAKER_SECONDS: wholeNumber(0, 86_400, 60),
  BREAKER_PROBE_SECONDS: wholeNumber(1, 3600, 5),
  BREAKER_PROBE_MAX_SECONDS: wholeNumber(1, 86_400, 300),
  ENDPOINT_DISABLE_DAYS: wholeNumber(0, 3650, 5),
  MAX_PAYLOAD_BYTES: wholeNumber(2, LARGEST_PAYLOAD_BYTES, 262_144),
  MAX_ENDPOINTS: wholeNumber(0, 100_000, 100),
  MAX_FANOUT_ENDPOINTS: wholeNumber(0, MOST_FANOUT, 100),
  MONTHLY_EVENT_LIMIT: wholeNumber(0, Number.MAX_SAFE_INTEGER, 1_000_000),
  MONTHLY_ATTEMPT_LIMIT: wholeNumber(0, Number.MAX_SAFE_INTEGER, 5_000_000),
  RATE_LIMIT_WINDOW_SECONDS: wholeNumber(1, 86_400, 60),
  RATE_LIMIT_EVENTS_WRITE: wholeNumber(0, 1_000_000_000, 6000),
  RATE_LIMIT_ENDPOINTS_WRITE: wholeNumber(0, 1_000_000_000, 600),
  RATE_LIMIT_DELIVERIES_REPLAY: wholeNumber(0, 1_000_000_000, 600),
  RATE_LIMIT_READ: wholeNumber(0, 1_000_000_000, 6000),
  ROTATION_OVERLAP_SECONDS: wholeNumber(0, 2_592_000, 86_400),
  RETENTION_DAYS: wholeNumber(1, 3650, 30),
  RETENTION_CRON: z
    .string()
    .transform((text) => text.trim().replaceAll(/\s+/g, ' '))
    .refine(isCron, 'must be a cron expression of five fields')
    .default('17 3 * * *'),
  SHUTDOWN_GRACE_SECONDS: wholeNumber(0, 600, 20),
})

export type Config = Readonly<z.infer<typeof environment>>

/** What a process does, as its command line says: everything, requests only, or deliveries only. */
export const MODES = ['all', 'api', 'worker'] as const
export type Mode = (typeof MODES)[number]

/**
 * Reads the whole configuration from `env`, once. Throws a ConfigError that lists every bad variable, never only the
 * first. With a DATABASE_URL its keys are required (`needsKeys`); the embedded database generates its own.
 */
export function readConfig(env: Record<string, string | undefined>, { needsKeys = true } = {}): Config {
  const present = Object.fromEntries(Object.entries(env).filter(([, value]) => value !== undefined && value !== ''))
  const parsed = environment.safeParse(present)
  const problems = (parsed.error?.issues ?? []).map((issue) => `${String(issue.path[0])}: ${issue.message}`)
  for (const name of ['ADMIN_API_KEY', 'ENCRYPTION_KEY']) {
    if (needsKeys && present.DATABASE_URL && !present[name]) problems.push(`${name}: is required with DATABASE_URL`)
  }
  if (!parsed.success || problems.length > 0) throw new ConfigError([...new Set(problems)])
  return Object.freeze(parsed.data)
}

/** The configuration, or what is asked on the command line, cannot be used; each problem is a line for the operator. */
export class ConfigError extends Error {
  readonly problems: string[]
  constructor(problems: string[]) {
    super(`bad configuration: ${problems.join('; ')}`)
    this.name = 'ConfigError'
    this.problems = problems
  }
}

/** Tells the operator why the program does not start, as text on stderr, and lets it exit with 1. */
export function endWithProblems(error: unknown): void {
  const lines = error instanceof ConfigError ? error.problems : [String(error)]
  process.stderr.write(`${lines.map((line) => `waybill: ${line}`).join('\n')}\n`)
  process.exitCode = 1
}

/** The configuration as it may be logged: keys and passwords masked, and the proxy's user, which may be a token. */
export function maskConfig(config: Config): Record<string, unknown> {
  const masked: Record<string, unknown> = { ...config, EGRESS_ALLOW: config.EGRESS_ALLOW.map((range) => range.text) }
  for (const name of ['ADMIN_API_KEY', 'ENCRYPTION_KEY']) if (masked[name] !== undefined) masked[name] = '***'
  for (const name of ['DATABASE_URL', 'EGRESS_PROXY_URL'] as const) {
    const value = config[name]
    if (value === undefined) continue
    const url = new URL(value)
    if (url.password) url.password = '***'
    if (url.username && name === 'EGRESS_PROXY_URL') url.username = '***'
    for (const parameter of url.searchParams.keys())
      if (/pass|key/i.test(parameter)) url.searchParams.set(parameter, '***')
    masked[name] = url.href
  }
  return masked
}
