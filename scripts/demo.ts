import { randomBytes } from 'node:crypto'
import { parseArgs } from 'node:util'
import { freePort } from '../src/embedded.ts'
import { type Account, createAccount } from './demo/account.ts'
import { type Client, createClient } from './demo/client.ts'
import { createObservations, type Observation, type Observations } from './demo/observations.ts'
import { type Behaviour, startReceiver } from './demo/receiver.ts'
import { type Service, startService } from './demo/service.ts'

// The life of a few events, told live: the real service on its embedded Postgres, a receiver that checks every
// signature with an independent library, and three endpoints of which two misbehave. `--once` leaves when it is told.

const STEP_SECONDS = 30

type Attempt = { attempt_number: number; status_code: number | null; error: string | null; retry_state: string }

const ENDPOINTS: Record<string, Behaviour & { subscribed: string[]; manner: string }> = {
  healthy: { subscribed: ['*'], answer: () => 200, manner: 'answers 200' },
  flaky: { subscribed: ['order.paid'], answer: (nth) => (nth > 2 ? 200 : 500), manner: 'answers 500 twice, then 200' },
  broken: { subscribed: ['order.shipped'], answer: () => 503, manner: 'answers 503 to everything' },
}

const { values: flags } = parseArgs({ options: { once: { type: 'boolean', default: false } } })
const account = createAccount()
const observations = createObservations(account.tell)
let service: Service | undefined
let receiver: { close: () => void } | undefined
let leaving = false

process.on('exit', () => service?.kill())
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.on(signal, interrupt)

try {
  await run()
} catch (error) {
  await fail(error as Error)
}

async function run(): Promise<void> {
  account.text('Waybill: three endpoints, a few events, and what becomes of them\n')
  const behaviours = await startReceiver(ENDPOINTS, observations)
  receiver = behaviours
  service = startService(await freePort(Number(process.env.PORT) || 8080).catch(() => freePort()), observations)
  await service.ready
  account.line('service', '', '', `${service.url}, embedded Postgres`)
  const { tenant, apiKey } = await register(service, behaviours.urlOf)
  await tellStory(tenant, account, observations)
  if (flags.once) return await leave(0)
  await stayUp(service, apiKey)
}

/** A tenant of this run's own, so that the demo can run again on what earlier runs left. */
async function register({ url, adminKey }: Service, urlOf: (endpoint: string) => string) {
  const admin = createClient(url, adminKey)
  const tenantId = `demo-${randomBytes(4).toString('hex')}`
  await admin('POST', '/v1/admin/tenants', { tenant_id: tenantId, tenant_slug: tenantId })
  const { api_key } = await admin<{ api_key: string }>('POST', '/v1/admin/api-keys', {
    tenant_id: tenantId,
    name: 'demo',
  })
  account.line('tenant', tenantId, '', 'with an API key')
  const tenant = createClient(url, api_key)
  for (const [name, endpoint] of Object.entries(ENDPOINTS)) {
    const { endpoint_id, signing_secret } = await tenant<{ endpoint_id: string; signing_secret: string }>(
      'POST',
      '/v1/endpoints',
      { url: urlOf(name), subscribed_events: endpoint.subscribed, description: endpoint.manner },
    )
    endpoint.secret = signing_secret
    account.name(endpoint_id, name)
    account.line('endpoint', endpoint.subscribed.join(' '), name, endpoint.manner)
  }
  return { tenant, apiKey: api_key }
}

async function tellStory(tenant: Client, { heading, line, text }: Account, seen: Observations): Promise<void> {
  heading('Publishing')
  const publish = (type: string, payload: object, key: string) =>
    tenant<{ event_id: string }>('POST', '/v1/events', { event_type: type, payload }, { 'idempotency-key': key })
  const order = { order_id: 1001, total: '42.00' }
  const created = await publish('order.created', order, 'order-1001-created')
  await publish('order.created', order, 'order-1001-created')
  const paid = await publish('order.paid', order, 'order-1001-paid')
  const shipped = await publish('order.shipped', { order_id: 1001, carrier: 'Penny Post' }, 'order-1001-shipped')

  const attempted = (eventId: string, delivered: boolean) => (one: Observation) =>
    one.msg === 'delivery.attempted' && one.event_id === eventId && (one.error === null) === delivered
  for (const event of [created, paid, shipped]) {
    await seen.until('the delivery to the healthy endpoint', STEP_SECONDS, attempted(event.event_id, true))
  }
  await seen.until('the flaky endpoint’s recovery', STEP_SECONDS, attempted(paid.event_id, true), 2)
  const dead = await seen.until(
    'the broken endpoint’s dead letter',
    STEP_SECONDS,
    (one) => one.msg === 'delivery.dead_lettered' && one.event_id === shipped.event_id,
  )

  heading('Mending and replaying')
  const broken = ENDPOINTS.broken as Behaviour
  broken.answer = () => 200
  line('mended', '', 'broken', 'answers 200 from now on')
  const letters = await tenant<{ data: { delivery_id: string }[] }>('GET', '/v1/dlq')
  for (const { delivery_id } of letters.data) {
    await tenant('POST', `/v1/deliveries/${delivery_id}/replay`)
    line('replayed', 'order.shipped', 'broken', `POST /v1/deliveries/${delivery_id}/replay`)
  }
  await seen.until('the replayed delivery', STEP_SECONDS, attempted(shipped.event_id, true), 2)

  heading(`GET /v1/deliveries/${dead.delivery_id}/attempts`)
  const attempts = await tenant<{ data: Attempt[] }>('GET', `/v1/deliveries/${dead.delivery_id}/attempts`)
  for (const { attempt_number, status_code, error, retry_state } of attempts.data) {
    text(`  attempt ${attempt_number}  ${status_code ?? '–'}  ${retry_state.padEnd(10)}  ${error ?? ''}`.trimEnd())
  }
  const left = await tenant<{ data: unknown[] }>('GET', '/v1/dlq')
  if (attempts.data.at(-1)?.retry_state !== 'succeeded' || left.data.length > 0) {
    throw new Error('the API does not show the replayed delivery as delivered')
  }
}

async function stayUp({ url }: Service, apiKey: string): Promise<void> {
  account.heading('The service stays up until Ctrl-C')
  account.text(`  API            ${url}/v1`)
  for (const [name, path] of [
    ['Documentation', '/docs'],
    ['OpenAPI', '/openapi.json'],
  ] as const) {
    if ((await fetch(url + path)).ok) account.text(`  ${name.padEnd(13)}  ${url}${path}`)
  }
  account.text(`  API key        ${apiKey}`)
  account.heading('Publish an event yourself; it shows below')
  account.text(
    `curl -sS ${url}/v1/events -H 'Authorization: Bearer ${apiKey}' -H 'Content-Type: application/json' -d '{"event_type":"order.paid","payload":{"order_id":1002,"total":"7.50"}}'\n`,
  )
  await observations.failed
}

async function leave(code: number): Promise<void> {
  if (leaving) return
  leaving = true
  receiver?.close()
  await service?.stop()
  process.exit(code)
}

async function fail(error: Error): Promise<void> {
  if (leaving) return
  process.stderr.write(`\ndemo: ${error.message}\n`)
  await leave(1)
}

/** The second time nothing is waited for. With `--once`, a story cut short is a failure. */
function interrupt(): void {
  if (leaving) process.exit(130)
  account.text('\nStopping')
  void leave(flags.once ? 130 : 0)
}
