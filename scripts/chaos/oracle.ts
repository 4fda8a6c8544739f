import { assertBooks } from '../../test/support/deliveries.ts'
import { waitFor } from '../../test/support/wait.ts'
import type { Receipt } from './ledger.ts'
import type { Publish } from './publisher.ts'
import type { World } from './world.ts'

/** What became of a run. `lost`, `unexpected` and an entry in `problems` are never right. */
export type Judgement = {
  published: number
  received: number
  lost: number
  unexpected: number
  duplicated: number
  /** How many duplicates the faults allow: what was in flight. */
  bound: number
  /** Publishes whose first answer did not come or was an error, and that were accepted later, once. */
  recovered: number
  problems: string[]
}

type Event = { event_id: string; tenant_id: string; idempotency_key: string | null }
type Delivery = {
  delivery_id: string
  event_id: string
  endpoint_id: string
  status: string
  attempt_count: number
  completed_at: string | null
}
/** Attempts of one delivery: all, those that failed before the worker's eyes, those with a status. */
type Attempts = { delivery_id: string; attempts: number; failed: number; unanswered: number; answered: number }

/** What the service says, by its API, and by its tables where no API shows it. */
type State = { events: Event[]; deliveries: Delivery[]; attempts: Attempts[] }

const REPEATED_AT_MOST = 100

/** Compares the publisher's log, the receivers' ledger and what the service says, after everything has come to rest. */
export async function judge(world: World): Promise<Judgement> {
  const { published, ledger } = world
  if (world.fleet.urls().length === 0) await world.fleet.start('api')
  const state = await readState(world)
  const lookUp = indexOf(world, state)
  const bound = world.allowed + inFlight(world, lookUp)
  const problems: string[] = []
  const { lost, unexpected, wrong } = followPublishes(world, lookUp)
  for (const receipt of ledger.receipts) {
    const why = whyUnexpected(world, lookUp, receipt)
    if (why) unexpected.push(`${receipt.deliveryId} at ${receipt.endpoint.url} ${why}`)
  }
  const add = (what: string, list: string[]) =>
    list.length > 0 && problems.push(`${list.length} ${what}: ${list.slice(0, 3).join('; ')}`)
  add('lost', lost)
  add('unexpected', unexpected)
  add('wrong', wrong)
  const isOpen = ({ eventId }: Publish) => eventId === null
  const endOf = ({ key, tries }: Publish) => `${key}: ${tries.at(-1)?.status}`
  add('never accepted', published.filter(isOpen).map(endOf))

  let duplicated = 0
  let unrecorded = 0
  for (const [id, own] of Map.groupBy(ledger.receipts, ({ deliveryId }) => deliveryId)) {
    const made = lookUp.attempts.get(id)
    duplicated += Math.max(0, own.length - 1 - (made?.failed ?? 0) - (world.replays.get(id) ?? 0))
    unrecorded += Math.max(0, own.length - (made?.attempts ?? 0))
  }
  const sum = (column: 'attempts' | 'answered' | 'unanswered') =>
    state.attempts.reduce((total, row) => total + row[column], 0)
  const answered = ledger.receipts.filter((receipt) => receipt.answered !== null).length
  const usage = await readUsage(world)
  const check = (right: boolean, problem: string) => right || problems.push(problem)
  check(duplicated <= bound, `${duplicated} duplicates, at most ${bound} were in flight`)
  check(unrecorded <= bound, `${unrecorded} receipts are missing among the attempts`)
  check(
    sum('answered') <= answered + bound && answered <= sum('answered') + sum('unanswered') + bound,
    `${answered} requests were answered, ${sum('answered')} attempts have a status`,
  )
  const keyed = state.events.filter(({ idempotency_key }) => idempotency_key !== null)
  check(usage.events === keyed.length, `usage counts ${usage.events} of ${keyed.length} events`)
  check(
    Math.abs(usage.attempts - sum('attempts')) <= bound,
    `usage counts ${usage.attempts} of ${sum('attempts')} attempts`,
  )
  await assertBooks(world.database.sql).catch((error: Error) => problems.push(error.message.slice(0, 500)))
  const jobs = await world.database.sql`select from pgboss.job where name = 'deliveries'`
  check(jobs.length === 0, `${jobs.length} jobs are left`)
  const recovered = published.filter(({ tries, eventId }) => eventId !== null && tries.length > 1)
  problems.push(...(await repeat(world, recovered)), ...world.fleet.problems())
  // Connections are kept for some seconds after their last request.
  await waitFor(() => world.fleet.leaks().length === 0, { timeoutMs: 10_000 }).catch(() => {})
  problems.push(...world.fleet.leaks())
  return {
    published: published.length,
    received: ledger.receipts.length,
    lost: lost.length,
    unexpected: unexpected.length,
    duplicated,
    bound,
    recovered: recovered.length,
    problems,
  }
}

/**
 * How many deliveries were on their way when faults were made: their request had been signed (a busy receiver reads it
 * when it can, perhaps only after its sender's end), their record had not been made. The signature tells the second in
 * which it was made, so what was sent in the rest of that counts as well.
 */
function inFlight(world: World, lookUp: Index): number {
  const sent = world.ledger.receipts.filter((receipt) => receipt === world.ledger.of(receipt.deliveryId)[0])
  const recordedAt = ({ deliveryId }: Receipt) => Date.parse(lookUp.deliveries.get(deliveryId)?.completed_at ?? '')
  return world.faults.reduce(
    (sum, { from, to }) =>
      sum + sent.filter((receipt) => receipt.signedAt * 1000 <= to && !(recordedAt(receipt) < from)).length,
    0,
  )
}

/** Each publish has its one event or none, and that its one delivery to each endpoint that it is due at. */
function followPublishes(world: World, lookUp: Index) {
  const lost: string[] = []
  const unexpected: string[] = []
  const wrong: string[] = []
  for (const publish of world.published) {
    const [event, ...more] = lookUp.eventsOf(publish)
    if (more.length > 0) wrong.push(`${publish.key} has ${more.length + 1} events`)
    if (publish.refused !== null && event) wrong.push(`${publish.key} was refused and is stored`)
    if (publish.eventId !== null && event?.event_id !== publish.eventId)
      lost.push(`event ${publish.eventId} of ${publish.key}`)
    if (event === undefined) continue
    for (const endpoint of world.endpoints) {
      const isDue = world.isDue(publish, endpoint)
      const deliveries = lookUp.deliveriesOf(event.event_id, endpoint.endpointId)
      const where = `of ${publish.key} to ${endpoint.url}`
      if (!isDue && deliveries.length > 0) unexpected.push(`a delivery ${where}`)
      if (isDue && deliveries.length === 0) lost.push(`the delivery ${where}`)
      if (deliveries.length > 1) wrong.push(`${deliveries.length} deliveries ${where}`)
      for (const { delivery_id, status, attempt_count } of deliveries) {
        const arrived = world.ledger.of(delivery_id).some(({ answered }) => answered !== null && answered < 300)
        if (status === 'delivered' && !arrived) lost.push(`what is called delivered ${where}`)
        if (status === 'dead_lettered') lost.push(`dead-lettered after ${attempt_count} attempts ${where}`)
        if (status === 'pending' || status === 'retrying') wrong.push(`still ${status} ${where}`)
      }
    }
  }
  return { lost, unexpected, wrong }
}

/** What speaks against a receipt; undefined when nothing does. */
function whyUnexpected(world: World, lookUp: Index, receipt: Receipt): string | undefined {
  const event = lookUp.events.get(receipt.eventId)
  const delivery = lookUp.deliveries.get(receipt.deliveryId)
  if (receipt.opened.length === 0) return 'has no valid signature'
  if (event === undefined || delivery === undefined) return 'is of no event or delivery that is stored'
  if (delivery.event_id !== receipt.eventId || delivery.endpoint_id !== receipt.endpoint.endpointId)
    return 'is of another event or endpoint'
  // Those that tell of endpoints and deliveries are the service's own.
  if (event.idempotency_key === null) return undefined
  const publish = lookUp.publishOf(event)
  if (publish === undefined) return 'was never published'
  if (publish.payload !== receipt.payload) return 'has another payload'
  if (!isHeadOf(receipt, publish)) return `has another id, type or time: ${receipt.head.slice(0, 200)}`
  if (!world.isDue(publish, receipt.endpoint)) return 'is not due there'
  return undefined
}

/** Whether a body begins with what was published: the same bytes each time, with the time of its acceptance. */
function isHeadOf({ head, eventId }: Receipt, { type, tries, acceptedAt }: Publish): boolean {
  const start = `{"id":"${eventId}","type":"${type}","timestamp":"`
  const at = Date.parse(head.slice(start.length, -1))
  // What is published without a load or `world.publish` has no times.
  const [asked, accepted] = [tries[0]?.at ?? 0, acceptedAt ?? Number.POSITIVE_INFINITY]
  return head.startsWith(start) && at >= asked && at <= accepted
}

type Index = ReturnType<typeof indexOf>

function indexOf(world: World, { events, deliveries, attempts }: State) {
  const nameOf = (tenantId: string, key: string | null) => `${tenantId} ${key}`
  const byKey = Map.groupBy(events, (event) => nameOf(event.tenant_id, event.idempotency_key))
  const byPair = Map.groupBy(deliveries, (delivery) => `${delivery.event_id} ${delivery.endpoint_id}`)
  const publishes = new Map(world.published.map((publish) => [nameOf(publish.tenantId, publish.key), publish]))
  return {
    events: new Map(events.map((event) => [event.event_id, event])),
    deliveries: new Map(deliveries.map((delivery) => [delivery.delivery_id, delivery])),
    attempts: new Map(attempts.map((row) => [row.delivery_id, row])),
    eventsOf: (publish: Publish) => byKey.get(nameOf(publish.tenantId, publish.key)) ?? [],
    deliveriesOf: (eventId: string, endpointId: string) => byPair.get(`${eventId} ${endpointId}`) ?? [],
    publishOf: (event: Event) => publishes.get(nameOf(event.tenant_id, event.idempotency_key)),
  }
}

async function readState(world: World): Promise<State> {
  const { sql } = world.database
  const deliveries: Delivery[] = []
  for (const { key } of world.tenants) {
    let cursor: string | null = ''
    while (cursor !== null) {
      const { body } = await world.call('GET', `/v1/deliveries?limit=250${cursor && `&cursor=${cursor}`}`, { key })
      deliveries.push(...body.data)
      cursor = body.next_cursor
    }
  }
  return {
    events: await sql<Event[]>`select event_id, tenant_id, idempotency_key from waybill.events`,
    deliveries,
    attempts: await sql<Attempts[]>`
      select delivery_id, count(*)::int as attempts, count(*) filter (where error <> 'worker_lost')::int as failed,
        count(*) filter (where error <> 'worker_lost' and status_code is null)::int as unanswered, count(status_code)::int as answered
      from waybill.attempts group by delivery_id`,
  }
}

async function readUsage(world: World): Promise<{ events: number; attempts: number }> {
  const sums = { events: 0, attempts: 0 }
  for (const { key } of world.tenants) {
    const { body } = await world.call('GET', '/v1/usage/current', { key })
    sums.events += body.events_count
    sums.attempts += body.attempts_count
  }
  return sums
}

/** Publishes some of those that were recovered once more: the answer is the same event. */
async function repeat(world: World, recovered: Publish[]): Promise<string[]> {
  const problems: string[] = []
  for (const { tenantId, key, type, payload, eventId } of recovered.slice(-REPEATED_AT_MOST)) {
    const { status, body } = await world.call('POST', '/v1/events', {
      key: world.tenants.find((tenant) => tenant.tenantId === tenantId)?.key ?? '',
      body: `{"event_type":"${type}","payload":${payload}}`,
      headers: { 'idempotency-key': key },
    })
    if (status !== 200 || body.event_id !== eventId) problems.push(`${key} again is ${status} ${body.event_id}`)
  }
  return problems
}
