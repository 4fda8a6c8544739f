import { parseArgs } from 'node:util'
import { type Config, ConfigError, endWithProblems, MODES, type Mode, maskConfig, readConfig } from './config.ts'
import { startEmbedded } from './embedded.ts'
import { createLog, type Log } from './log.ts'
import { type Database, startService } from './service.ts'
import { type Closers, createClosers } from './shutdown.ts'
import { VERSION } from './version.ts'

const USAGE = `Usage: waybill [--mode all|api|worker] [--no-migrate]

  --mode MODE    all (default): API and worker in one process; api: requests only; worker: deliveries only
  --no-migrate   do not bring the database to this version's schema first
  --help         this text
  --version      the version

Configuration is environment variables; the README lists them all.
`

/** When a shutdown that hangs is ended by force, counted from the end of the grace. */
const FORCE_MS = 10_000
/** How long handing claims back may take after a second signal. */
const HURRY_MS = 1000
/** npm passes on, as soon as it can, a signal that a terminal or supervisor has sent to the whole group, so to this process already. */
const ECHO_MS = process.env.npm_lifecycle_event === 'start' ? 500 : 0

async function main(): Promise<void> {
  const flags = readFlags()
  if (flags.help) return void process.stdout.write(USAGE)
  if (flags.version) return void process.stdout.write(`${VERSION}\n`)
  const config = readConfig(process.env)
  const log = createLog(config.LOG_LEVEL)
  // A mistake of ours. Node's own words would show all that the error carries, and not on stdout.
  process.on('uncaughtException', (error) => {
    log.fatal({ err: error }, 'service.failed')
    process.exit(1)
  })
  // Where Node writes its warnings: that nobody reads them any more is no reason to end.
  process.stderr.on('error', () => {})
  const closers = createClosers()
  const stopped = stopOnSignal(config, log, closers)
  try {
    const database = await openDatabase(config, log, closers)
    log.info({ config: maskConfig(config), mode: flags.mode, version: VERSION }, 'service.starting')
    if (config.EGRESS_ALLOW.length > 0) {
      log.warn({ EGRESS_ALLOW: config.EGRESS_ALLOW.map((range) => range.text) }, 'egress.exempted')
    }
    const { port } = await startService({
      config,
      database,
      mode: flags.mode,
      migrateFirst: flags.migrate,
      log,
      closers,
      hurry: stopped.hurry,
    })
    log.info({ port, mode: flags.mode }, 'service.ready')
  } catch (error) {
    if (!stopped.begun()) {
      if (error instanceof ConfigError) throw error
      log.fatal({ err: error }, 'service.failed')
      await closers.closeAll(log, config.SHUTDOWN_GRACE_SECONDS * 1000)
      process.exit(1)
    }
  }
}

function readFlags(): { mode: Mode; migrate: boolean; help: boolean; version: boolean } {
  try {
    const { values } = parseArgs({
      options: {
        mode: { type: 'string', default: 'all' },
        migrate: { type: 'boolean', default: true },
        help: { type: 'boolean', default: false },
        version: { type: 'boolean', default: false },
      },
      allowNegative: true,
    })
    const mode = MODES.find((one) => one === values.mode)
    if (mode === undefined) throw new Error(`--mode must be all, api or worker, not ${values.mode}`)
    return { ...values, mode }
  } catch (error) {
    throw new ConfigError([(error as Error).message])
  }
}

/** The configured database, or an embedded one with keys of its own. */
async function openDatabase(config: Config, log: Log, closers: Closers): Promise<Database> {
  if (config.DATABASE_URL) {
    return {
      url: config.DATABASE_URL,
      adminApiKey: config.ADMIN_API_KEY ?? '',
      encryptionKeys: config.ENCRYPTION_KEY ?? [],
    }
  }
  const embedded = await startEmbedded(log, (stop) => closers.add('embedded Postgres', stop))
  if (!config.ADMIN_API_KEY)
    process.stderr.write(`Embedded Postgres in .waybill/. Admin key: ${embedded.adminApiKey}\n`)
  return {
    url: embedded.url,
    adminApiKey: config.ADMIN_API_KEY ?? embedded.adminApiKey,
    encryptionKeys: config.ENCRYPTION_KEY ?? [Buffer.from(embedded.encryptionKey, 'base64')],
  }
}

/**
 * The first SIGTERM, SIGINT or SIGHUP stops the service in order and exits 0; a second one cuts the grace short, and exits 1 as soon
 * as what is in flight has been handed back; a third one exits at once.
 */
function stopOnSignal(config: Config, log: Log, closers: Closers) {
  let begun = false
  let heardAt = -Infinity
  const hurry = new AbortController()
  const stop = (signal: string) => {
    if (performance.now() < heardAt + ECHO_MS) return
    heardAt = performance.now()
    if (hurry.signal.aborted) process.exit(1)
    if (begun) {
      hurry.abort()
      setTimeout(() => process.exit(1), HURRY_MS)
      return
    }
    begun = true
    log.info({ signal, grace_seconds: config.SHUTDOWN_GRACE_SECONDS }, 'service.stopping')
    const graceMs = config.SHUTDOWN_GRACE_SECONDS * 1000
    setTimeout(() => process.exit(1), graceMs + FORCE_MS).unref()
    void closers.closeAll(log, graceMs).then(() => {
      log.info('service.stopped')
      process.exit(hurry.signal.aborted ? 1 : 0)
    })
  }
  process.on('SIGTERM', stop)
  process.on('SIGINT', stop)
  // A terminal that is closed; its shell says so once more.
  process.on('SIGHUP', (signal) => begun || stop(signal))
  return { begun: () => begun, hurry: hurry.signal }
}

await main().catch(endWithProblems)
