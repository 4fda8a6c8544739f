import assert from 'node:assert/strict'
import { createServer } from 'node:http'
import { connect } from 'node:net'
import { test } from 'node:test'
import { type Config, ConfigError, maskConfig, readConfig } from '../src/config.ts'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase } from './support/database.ts'
import { startReceiver } from './support/receiver.ts'
import { createTenant, startService } from './support/service.ts'
import { listen } from './support/tcp.ts'

const KEY = Buffer.alloc(32, 1).toString('base64')
const OWN = { DATABASE_URL: 'postgres://u:p@localhost/db', ADMIN_API_KEY: 'k'.repeat(16), ENCRYPTION_KEY: KEY }

function problems(env: Record<string, string>): string[] {
  try {
    readConfig(env)
  } catch (error) {
    assert.ok(error instanceof ConfigError)
    return error.problems
  }
  return []
}

test('an empty environment is good, and gives the documented defaults', () => {
  const { EGRESS_ALLOW, ...rest } = readConfig({})
  assert.deepEqual(EGRESS_ALLOW, [])
  assert.deepEqual(rest, {
    HOST: '0.0.0.0',
    PORT: 8080,
    LOG_LEVEL: 'info',
    WEBHOOK_HEADER_PREFIX: 'service',
    ATTEMPT_TIMEOUT_SECONDS: 15,
    RETRY_LIMIT: 14,
    RETRY_DELAY_SECONDS: 5,
    RETRY_DELAY_MAX_SECONDS: 36_000,
    WORKER_CONCURRENCY: 200,
    ENDPOINT_CONCURRENCY: 50,
    BREAKER_FAILURES: 10,
    BREAKER_SECONDS: 60,
    BREAKER_PROBE_SECONDS: 5,
    BREAKER_PROBE_MAX_SECONDS: 300,
    ENDPOINT_DISABLE_DAYS: 5,
    MAX_PAYLOAD_BYTES: 262_144,
    MAX_ENDPOINTS: 100,
    MAX_FANOUT_ENDPOINTS: 100,
    MONTHLY_EVENT_LIMIT: 1_000_000,
    MONTHLY_ATTEMPT_LIMIT: 5_000_000,
    RATE_LIMIT_WINDOW_SECONDS: 60,
    RATE_LIMIT_EVENTS_WRITE: 6000,
    RATE_LIMIT_ENDPOINTS_WRITE: 600,
    RATE_LIMIT_DELIVERIES_REPLAY: 600,
    RATE_LIMIT_READ: 6000,
    ROTATION_OVERLAP_SECONDS: 86_400,
    RETENTION_DAYS: 30,
    RETENTION_CRON: '17 3 * * *',
    SHUTDOWN_GRACE_SECONDS: 20,
  } satisfies Partial<Config>)
})

test('an empty variable counts as absent', () => {
  assert.equal(readConfig({ PORT: '', RETRY_LIMIT: '' }).PORT, 8080)
})

test('every bad variable is reported, not only the first', () => {
  const found = problems({
    ...OWN,
    PORT: 'abc',
    RETRY_LIMIT: '-1',
    LOG_LEVEL: 'loud',
    EGRESS_ALLOW: '10.0.0.0/8,example.com',
    BASE_URL: 'ftp://x',
  })
  const names = found.map((problem) => problem.split(':')[0]).sort()
  assert.deepEqual(names, ['BASE_URL', 'EGRESS_ALLOW', 'LOG_LEVEL', 'PORT', 'RETRY_LIMIT'])
})

const BAD: [name: string, value: string][] = [
  ['PORT', '80.5'],
  ['PORT', '0x50'],
  ['PORT', ' 80'],
  ['DATABASE_URL', 'mysql://x/y'],
  ['DATABASE_URL', 'not a url'],
  ['DATABASE_URL', 'postgres://user:secret@/waybill'],
  ['DATABASE_URL', 'postgres://user@one:5432,two:5432/waybill'],
  ['DATABASE_URL', 'postgres://user@/waybill?host=one,two'],
  ['DATABASE_URL', 'postgres:///waybill?host=one,two'],
  ['DATABASE_URL', 'postgres://user:a/b@localhost/waybill'],
  ['DATABASE_URL', 'postgres://user:50%@localhost/waybill'],
  ['DATABASE_URL', 'postgres://me:12#secret@localhost/waybill'],
  ['DATABASE_URL', 'postgres://me:12?secret@localhost/waybill'],
  ['DATABASE_URL', 'postgres://me:12/secret@localhost/waybill'],
  ['EGRESS_PROXY_URL', 'http://user:50%@proxy:3128'],
  ['EGRESS_PROXY_URL', 'http://user:12/secret@proxy:3128'],
  ['EGRESS_PROXY_URL', 'http://proxy:3128/?token=secret'],
  ['BASE_URL', 'https://user:secret@hooks.example.com'],
  ['BASE_URL', 'https://hooks.example.com/?a=b'],
  ['ADMIN_API_KEY', 'k'.repeat(15)],
  ['WEBHOOK_HEADER_PREFIX', 'p'.repeat(65)],
  ['ENCRYPTION_KEY', Buffer.alloc(31).toString('base64')],
  ['ENCRYPTION_KEY', Buffer.alloc(33).toString('base64')],
  ['ENCRYPTION_KEY', `${KEY};${KEY}`],
  ['ENCRYPTION_KEY', `${KEY.slice(0, -2)}!=`],
  ['ADMIN_API_KEY', ' '.repeat(20)],
  ['ADMIN_API_KEY', 'é'.repeat(20)],
  ['ENCRYPTION_KEY', `${KEY},nonsense`],
  ['ENCRYPTION_KEY', ','],
  ['WEBHOOK_HEADER_PREFIX', 'a_b'],
  ['WEBHOOK_HEADER_PREFIX', 'a\r\nb'],
  ['WEBHOOK_HEADER_PREFIX', '-a'],
  ['EGRESS_ALLOW', 'localhost'],
  ['EGRESS_ALLOW', '300.0.0.0/8'],
  ['RETRY_LIMIT', '1e3'],
  ['MONTHLY_EVENT_LIMIT', '9007199254740993'],
  ['RETENTION_CRON', 'daily'],
  ['RETENTION_CRON', 'a b c d e'],
  ['RETENTION_CRON', 'H H * * *'],
  ['RETENTION_CRON', '99 3 * * *'],
  ['RETENTION_CRON', '0 0 31 2 *'],
  ['RETENTION_CRON', '0 17 3 * * *'],
  ['SHUTDOWN_GRACE_SECONDS', '-5'],
]

for (const [name, value] of BAD) {
  test(`${name}=${JSON.stringify(value)} is refused by name`, () => {
    const found = problems({ ...OWN, [name]: value })
    assert.equal(found.length, 1)
    assert.match(found[0]!, new RegExp(`^${name}: .`))
  })
}

const BOUNDS: [name: string, min: number, max: number][] = [
  ['PORT', 0, 65_535],
  ['ATTEMPT_TIMEOUT_SECONDS', 1, 300],
  ['RETRY_LIMIT', 0, 100],
  ['RETRY_DELAY_SECONDS', 1, 86_400],
  ['RETRY_DELAY_MAX_SECONDS', 1, 604_800],
  ['WORKER_CONCURRENCY', 1, 10_000],
  ['ENDPOINT_CONCURRENCY', 1, 10_000],
  ['BREAKER_FAILURES', 1, 1_000_000],
  ['BREAKER_SECONDS', 0, 86_400],
  ['BREAKER_PROBE_SECONDS', 1, 3600],
  ['BREAKER_PROBE_MAX_SECONDS', 1, 86_400],
  ['ENDPOINT_DISABLE_DAYS', 0, 3650],
  ['MAX_PAYLOAD_BYTES', 2, 16_777_216],
  ['MAX_ENDPOINTS', 0, 100_000],
  ['MAX_FANOUT_ENDPOINTS', 0, 10_000],
  ['MONTHLY_EVENT_LIMIT', 0, Number.MAX_SAFE_INTEGER],
  ['MONTHLY_ATTEMPT_LIMIT', 0, Number.MAX_SAFE_INTEGER],
  ['RATE_LIMIT_WINDOW_SECONDS', 1, 86_400],
  ['RATE_LIMIT_EVENTS_WRITE', 0, 1_000_000_000],
  ['RATE_LIMIT_ENDPOINTS_WRITE', 0, 1_000_000_000],
  ['RATE_LIMIT_DELIVERIES_REPLAY', 0, 1_000_000_000],
  ['RATE_LIMIT_READ', 0, 1_000_000_000],
  ['ROTATION_OVERLAP_SECONDS', 0, 2_592_000],
  ['RETENTION_DAYS', 1, 3650],
  ['SHUTDOWN_GRACE_SECONDS', 0, 600],
]

test('each number is taken up to its bounds and not beyond', () => {
  for (const [name, min, max] of BOUNDS) {
    for (const value of [min, max]) assert.equal(Reflect.get(readConfig({ [name]: String(value) }), name), value, name)
    for (const value of [min - 1, max + 1]) {
      const [problem = '', ...others] = problems({ [name]: String(value) })
      assert.ok(problem.startsWith(`${name}: `) && others.length === 0, `${name}=${value}`)
    }
  }
  const numbers = Object.entries(readConfig({})).filter(([, value]) => typeof value === 'number')
  assert.deepEqual(numbers.map(([name]) => name).sort(), BOUNDS.map(([name]) => name).sort())
})

test('an own database needs its keys; the embedded one brings its own', () => {
  const names = problems({ DATABASE_URL: OWN.DATABASE_URL }).map((problem) => problem.split(':')[0])
  assert.deepEqual(names, ['ADMIN_API_KEY', 'ENCRYPTION_KEY'])
  assert.deepEqual(problems({}), [])
})

test('an address of a database may have an @ in the value of a parameter', () => {
  assert.deepEqual(problems({ ...OWN, DATABASE_URL: 'postgres://localhost/db?application_name=waybill@one' }), [])
})

test('several encryption keys are read in their order', () => {
  const second = Buffer.alloc(32, 2).toString('base64')
  const keys = readConfig({ ...OWN, ENCRYPTION_KEY: `${KEY}, ${second}` }).ENCRYPTION_KEY
  assert.deepEqual(
    keys?.map((key) => key.toString('base64')),
    [KEY, second],
  )
})

test('BASE_URL loses its trailing slashes', () => {
  assert.equal(readConfig({ BASE_URL: 'https://hooks.example.com/api//' }).BASE_URL, 'https://hooks.example.com/api')
})

test('a schedule may have blanks to spare', () => {
  assert.equal(readConfig({ ...OWN, RETENTION_CRON: ' 17  3 * *\t*' }).RETENTION_CRON, '17 3 * * *')
})

test('the configuration cannot be changed', () => {
  assert.throws(() => {
    ;(readConfig({}) as { PORT: number }).PORT = 1
  }, TypeError)
})

test('what is logged of the configuration holds no key and no password', () => {
  const config = readConfig({
    ...OWN,
    DATABASE_URL:
      'postgres://user:hunter2@db.internal:5432/waybill?sslpassword=hunter3&api_key=hunter8&application_name=x',
    ADMIN_API_KEY: 'admin-key-hunter4',
    EGRESS_ALLOW: '127.0.0.0/8',
    EGRESS_PROXY_URL: 'http://hunter5:hunter6@proxy.internal:3128',
  })
  const text = JSON.stringify(maskConfig(config))
  assert.doesNotMatch(text, /hunter/)
  assert.ok(!text.includes(KEY))
  assert.match(text, /user:\*\*\*@db\.internal/)
  assert.match(text, /\*\*\*@proxy\.internal/)
  const { EGRESS_PROXY_URL } = maskConfig(
    readConfig({ ...OWN, EGRESS_PROXY_URL: 'http://hunter7@proxy.internal:3128' }),
  )
  assert.equal(EGRESS_PROXY_URL, 'http://***@proxy.internal:3128/')
  assert.match(text, /127\.0\.0\.0\/8/)
})

test('the program hands on what it is set to', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const env = {
    BASE_URL: 'https://hooks.example.com',
    WEBHOOK_HEADER_PREFIX: 'X-Acme',
    ROTATION_OVERLAP_SECONDS: '60',
    RETENTION_CRON: '5 4 * * *',
    RATE_LIMIT_EVENTS_WRITE: '21',
    RATE_LIMIT_ENDPOINTS_WRITE: '22',
    RATE_LIMIT_DELIVERIES_REPLAY: '23',
    RATE_LIMIT_READ: '24',
  }
  const service = await startService(t, { databaseUrl, env })
  const tenant = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint(receiver.url())
  const { event_id } = await tenant.publish()
  const [receipt] = await receiver.until(1)
  assert.equal(receipt!.headers['x-acme-event-id'], event_id)
  assert.deepEqual((await service.call('GET', '/openapi.json')).body.servers, [{ url: env.BASE_URL }])
  const { egress_exemptions, rate_limits } = (await tenant.call('GET', '/v1/safety/limits')).body
  assert.deepEqual(egress_exemptions, ['127.0.0.0/8', '::1/128'])
  assert.deepEqual(
    Object.fromEntries(Object.entries<{ limit: number }>(rate_limits).map(([action, { limit }]) => [action, limit])),
    {
      'events:write': 21,
      'endpoints:write': 22,
      'deliveries:replay': 23,
      read: 24,
    },
  )
  const rotated = (await tenant.call('POST', `/v1/endpoints/${endpoint_id}/rotate-secret`)).body
  assert.equal(Date.parse(rotated.previous_secret_expires_at) - Date.parse(rotated.updated_at), 60_000)
  const schedules = await sql`select name, cron, timezone from pgboss.schedule order by name`
  assert.deepEqual(
    schedules.map((row) => ({ ...row })),
    [
      { name: 'attempt_counts', cron: '22 * * * *', timezone: 'UTC' },
      { name: 'partitions', cron: '7 * * * *', timezone: 'UTC' },
      { name: 'queue_clock', cron: '37 * * * *', timezone: 'UTC' },
      { name: 'retention', cron: env.RETENTION_CRON, timezone: 'UTC' },
    ],
  )
  assert.equal((await service.call('GET', '/health')).body.mode, 'all')
  assert.equal(
    (await (await startService(t, { databaseUrl, mode: 'worker' })).call('GET', '/health')).body.mode,
    'worker',
  )
})

test('with an egress proxy every delivery goes through it', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const asked: (string | undefined)[] = []
  const proxy = createServer().on('connect', ({ url }, socket) => {
    asked.push(url)
    const tunnel = connect(Number(new URL(receiver.url()).port), '127.0.0.1', () => {
      socket.write('HTTP/1.1 200 OK\r\n\r\n')
      tunnel.pipe(socket).pipe(tunnel)
    })
    socket.on('error', () => tunnel.destroy())
    tunnel.on('error', () => socket.destroy())
  })
  const { port, close } = await listen(proxy, 'unused', () => {})
  cleanUp(t, close)
  const tenant = await createTenant(
    await startService(t, { databaseUrl, env: { EGRESS_PROXY_URL: `http://127.0.0.1:${port}` } }),
  )
  await tenant.createEndpoint('http://hooks.example.com/hook')
  await tenant.publish()
  const [receipt] = await receiver.until(1)
  assert.equal(receipt!.headers.host, 'hooks.example.com')
  assert.deepEqual(asked, ['hooks.example.com:80'])
})
