import { ConfigError, endWithProblems, readConfig } from './config.ts'
import { untilReachable } from './db/until-reachable.ts'
import { startEmbedded } from './embedded.ts'
import { createLog } from './log.ts'
import { migrate } from './migrate.ts'

// Applies migrations and leaves: for deployments that migrate in a step of their own and start with --no-migrate.
try {
  // Otherwise who asks it for --help, or hopes for a dry run, has migrated.
  if (process.argv.length > 2) throw new ConfigError(['no flags are taken: configuration is environment variables'])
  const config = readConfig(process.env, { needsKeys: false })
  const log = createLog(config.LOG_LEVEL)
  const stops: (() => Promise<void>)[] = []
  try {
    const given = config.DATABASE_URL ?? (await startEmbedded(log, (stop) => stops.push(stop))).url
    const url = await untilReachable(given, log)
    await migrate(url, log, config)
    log.info('migrate.done')
  } finally {
    for (const stop of stops) await stop()
  }
} catch (error) {
  endWithProblems(error)
}
