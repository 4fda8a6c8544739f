import type { Config, Mode } from './config.ts'
import { openDb, type Pool } from './db/open.ts'
import { untilReachable } from './db/until-reachable.ts'
import { createSender } from './egress/send.ts'
import type { EndpointRules } from './flow/observe.ts'
import { createPublish } from './flow/publish.ts'
import { createApp } from './http/app.ts'
import { createAuth } from './http/auth.ts'
import { HEALTH_PATIENCE_MS } from './http/health.ts'
import type { RateLimits } from './http/rate-limit.ts'
import { createReads } from './http/reads.ts'
import { listen } from './http/server/listen.ts'
import type { Limits } from './http/tenant-limits.ts'
import type { Log } from './log.ts'
import { migrate, requireMigrated } from './migrate.ts'
import { connectionsPerSide } from './open-files.ts'
import { createBoss, stopBoss, updateQueues } from './queue.ts'
import { createSecretBox, type SecretBox } from './secrets.ts'
import type { Closers } from './shutdown.ts'
import { startMaintenance } from './upkeep/maintenance.ts'
import { startSweep } from './upkeep/sweep.ts'
import { VERSION } from './version.ts'
import { startWorker } from './worker.ts'

/** Connections for requests, and for recording, holding and releasing. Few are enough: Postgres itself saturates first. */
const API_CONNECTIONS = 10
const WORKER_CONNECTIONS = 4
/** How many of them may look up single records. */
const LOOK_UPS = 4
/** For lists, sums and payloads, on connections of their own. A request may have waited a second before (room.ts), and has 4 in all (http/deadline.ts). */
const READS = { max: 8, patienceMs: 2500 }
/** For scans of whole tables, which may take this long, on connections of their own. */
const UPKEEP = { max: 2, patienceMs: 30_000 }
/**
 * For retention, which counts a day at a time, and for summing counts up, those of many tenants at a time: as long as that takes on a
 * slow disk, or it would never be done.
 */
const RETENTION = { max: 2, patienceMs: 3_600_000 }

/** A database and the keys that belong to it. */
export type Database = { url: string; adminApiKey: string; encryptionKeys: Buffer[] }

type Options = {
  config: Config
  database: Database
  mode: Mode
  migrateFirst: boolean
  log: Log
  closers: Closers
  /** Aborted when attempts in flight are to be handed back at once. */
  hurry: AbortSignal
}

/** Opens a pool, named after the mode and `name`, which is closed with the rest. */
type OpenPool = (name: string, more: { max: number; patienceMs?: number; claims?: boolean }) => Pool

/**
 * Starts the parts that `mode` asks for and registers, in `closers`, how each is stopped: requests and attempts at once,
 * then connections. Throws when a part cannot start; what was started is then in `closers` all the same.
 */
export async function startService(options: Options): Promise<{ port: number }> {
  const { config, mode, log, closers } = options
  const database = { ...options.database, url: await untilReachable(options.database.url, log) }
  if (options.migrateFirst) await migrate(database.url, log, config)
  const secretBox = createSecretBox(database.encryptionKeys)
  const open: OpenPool = (name, more) => {
    const pool = openDb(database.url, { log, name: `waybill ${mode}${name}`, ...more })
    closers.add(`database${name}`, () => pool.end(2000))
    return pool
  }
  const pool = open('', { max: API_CONNECTIONS + (mode === 'api' ? 0 : WORKER_CONNECTIONS) })
  const reads = open(' reads', READS)
  const retention = open(' retention', RETENTION)
  const pulse = open(' health', { max: 1, patienceMs: HEALTH_PATIENCE_MS })
  if (!options.migrateFirst) await requireMigrated(pool)
  // On this pool, since it reads all endpoints, however many there are.
  await requireKeys(retention, secretBox)
  await warnUnlessDurable(pool, log)
  await warnUnlessOwned(pool, log)

  const auth = createAuth(pool, database.adminApiKey, serviceLimits(config))
  if (mode !== 'worker') await pool.listen('waybill_tenants', auth.forget)
  let port = config.PORT
  const app = createApp({
    pool,
    reads: createReads(reads, READS.max),
    lookUps: createReads(pool, LOOK_UPS),
    pulse,
    retention,
    auth,
    publish: createPublish(pool, {
      rate: config.RATE_LIMIT_EVENTS_WRITE,
      window_seconds: config.RATE_LIMIT_WINDOW_SECONDS,
      fanout: config.MAX_FANOUT_ENDPOINTS,
      monthly_events: config.MONTHLY_EVENT_LIMIT,
      monthly_attempts: config.MONTHLY_ATTEMPT_LIMIT,
    }),
    rateLimits: rateLimits(config),
    secretBox,
    allow: config.EGRESS_ALLOW,
    log,
    mode,
    baseUrl: () => config.BASE_URL ?? `http://localhost:${port}`,
    headerPrefix: config.WEBHOOK_HEADER_PREFIX,
    rotationOverlapSeconds: config.ROTATION_OVERLAP_SECONDS,
    retentionDays: config.RETENTION_DAYS,
  })
  // Before anything is claimed: the port may be taken.
  const maxClients = connectionsPerSide(mode === 'api' ? 1 : 2)
  const server = await listen(app, {
    hostname: config.HOST,
    port: config.PORT,
    maxClients,
    onFull: (refused) => log.warn({ connections: maxClients, refused }, 'http.full'),
  })
  port = server.port
  closers.add('http', () => server.close(config.SHUTDOWN_GRACE_SECONDS * 1000), { atOnce: true })

  if (mode !== 'api') await startDelivering(options, { url: database.url, secretBox, pool, retention, open })
  return { port }
}

/** The worker and, on pg-boss, what is scheduled. */
async function startDelivering(
  { config, log, closers, hurry }: Options,
  parts: { url: string; secretBox: SecretBox; pool: Pool; retention: Pool; open: OpenPool },
): Promise<void> {
  const { url, pool, retention } = parts
  const upkeep = parts.open(' upkeep', UPKEEP)
  const claims = parts.open(' claims', { max: 1, claims: true })
  const boss = createBoss(url, log)
  await boss.start()
  closers.add('queue', () => stopBoss(boss))
  // Whichever process made the queues may have had other settings; retries are the workers' business.
  await updateQueues(boss, config)
  const stopMaintenance = await startMaintenance({
    upkeep,
    retention,
    boss,
    retentionDays: config.RETENTION_DAYS,
    retentionCron: config.RETENTION_CRON,
    log,
  })
  closers.add('maintenance', stopMaintenance)
  const maxReceivers = connectionsPerSide(2)
  const slots = Math.min(config.WORKER_CONCURRENCY, maxReceivers)
  if (slots < config.WORKER_CONCURRENCY) log.warn({ concurrency: slots }, 'worker.few_files')
  const sender = createSender({
    allow: config.EGRESS_ALLOW,
    timeoutMs: config.ATTEMPT_TIMEOUT_SECONDS * 1000,
    maxConnections: maxReceivers,
    ...(config.EGRESS_PROXY_URL && { proxyUrl: config.EGRESS_PROXY_URL }),
  })
  closers.add('sender', sender.close)
  /** How long a probe may be under way before another takes its place. */
  const leaseSeconds = config.ATTEMPT_TIMEOUT_SECONDS + 10
  const worker = await startWorker({
    pool,
    claims,
    boss,
    sender,
    secretBox: parts.secretBox,
    log,
    slots,
    rules: endpointRules(config, slots),
    leaseSeconds,
    monthlyAttempts: config.MONTHLY_ATTEMPT_LIMIT,
    headerPrefix: config.WEBHOOK_HEADER_PREFIX,
    userAgent: `Waybill/${VERSION}`,
  })
  closers.add('worker', () => worker.stop(config.SHUTDOWN_GRACE_SECONDS * 1000), { atOnce: true })
  hurry.addEventListener('abort', () => void worker.stop(0))
  const sweep = startSweep({
    pool: upkeep,
    log,
    // A replay that is the next probe puts off the one after it by a minute (waybill.probe_now).
    longestWaitSeconds: Math.max(config.BREAKER_PROBE_MAX_SECONDS, leaseSeconds, 60),
  })
  closers.add('sweep', sweep.stop)
}

const endpointRules = (config: Config, slots: number): EndpointRules => ({
  cap: Math.min(config.ENDPOINT_CONCURRENCY, slots),
  failures: config.BREAKER_FAILURES,
  seconds: config.BREAKER_SECONDS,
  probeSeconds: config.BREAKER_PROBE_SECONDS,
  probeMaxSeconds: config.BREAKER_PROBE_MAX_SECONDS,
  disableAfterSeconds: config.ENDPOINT_DISABLE_DAYS * 86_400,
})

const serviceLimits = (config: Config): Limits => ({
  monthly_events: config.MONTHLY_EVENT_LIMIT,
  monthly_attempts: config.MONTHLY_ATTEMPT_LIMIT,
  max_endpoints: config.MAX_ENDPOINTS,
  max_fanout_endpoints: config.MAX_FANOUT_ENDPOINTS,
  max_payload_bytes: config.MAX_PAYLOAD_BYTES,
  events_write_rate: config.RATE_LIMIT_EVENTS_WRITE,
})

const rateLimits = (config: Config): RateLimits => ({
  windowSeconds: config.RATE_LIMIT_WINDOW_SECONDS,
  limits: {
    'endpoints:write': config.RATE_LIMIT_ENDPOINTS_WRITE,
    'deliveries:replay': config.RATE_LIMIT_DELIVERIES_REPLAY,
    read: config.RATE_LIMIT_READ,
  },
})

/** Throws if a stored signing secret needs another key: better now than at every attempt. */
async function requireKeys(pool: Pool, secretBox: SecretBox): Promise<void> {
  const rows = await pool<{ key_id: string }[]>`
    select distinct encode(substring(secret from 1 for 4), 'hex') as key_id
    from waybill.endpoints
    cross join lateral (values (signing_secret), (case when previous_secret_expires_at > now() then previous_secret end)) s (secret)
    where secret is not null`
  const missing = rows.map((row) => row.key_id).filter((keyId) => !secretBox.keyIds.includes(keyId))
  if (missing.length > 0) {
    throw new Error(
      `ENCRYPTION_KEY lacks the key that signing secrets are encrypted with (id ${missing.join(', ')}); add it after the new one. It is needed until ROTATION_OVERLAP_SECONDS after the last rotation`,
    )
  }
}

/** What is accepted is only as durable as the database's commits, so settings that weaken those are warned about. */
async function warnUnlessDurable(pool: Pool, log: Log): Promise<void> {
  const off = await pool<{ name: string }[]>`
    select name from pg_settings where name in ('fsync', 'full_page_writes', 'synchronous_commit') and setting = 'off' order by name`
  if (off.length > 0) log.warn({ settings: off.map(({ name }) => name) }, 'database.not_durable')
}

/** Only a table's owner may drop it: weeks later retention would fail, and a later version's migrations, as would making partitions. */
async function warnUnlessOwned(pool: Pool, log: Log): Promise<void> {
  const others = await pool<{ owner: string; tables: number }[]>`
    select relowner::regrole::text as owner, count(*)::int as tables from pg_class
    where relnamespace in ('waybill'::regnamespace, 'pgboss'::regnamespace) and relkind in ('r', 'p') and not pg_has_role(relowner, 'usage')
    group by 1`
  for (const other of others) log.warn(other, 'database.not_owned')
}
