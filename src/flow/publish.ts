import { LRUCache } from 'lru-cache'
import { PATIENCE_MS, type Pool } from '../db/open.ts'
import { textList } from '../db/statement.ts'
import { createBatcher } from './batch.ts'
import type { RatePlace } from './rate-counter.ts'
import { createComparison, type Original } from './repeated.ts'

/** The service's own limits; a tenant may have others (http/tenant-limits.ts), which waybill.publish looks up. A rate of 0 means no rate limit. */
type PublishLimits = {
  rate: number
  window_seconds: number
  fanout: number
  monthly_events: number
  monthly_attempts: number
}

type Event = { type: string; payload: string; idempotencyKey: string | null }

/**
 * A request whose body was refused counts against the rate limit like any other. One whose body is `unread` counts only if
 * the window is full; otherwise its body is read first, and it is submitted again.
 */
export type PublishRequest = { tenantId: string; event: Event | 'refused' | 'unread' }

const eventOf = ({ event }: PublishRequest): Event | null => (typeof event === 'string' ? null : event)

type Reached = { limit: number; current: number }

export type PublishResult = { rate: RatePlace } & (
  | { outcome: 'accepted' | 'repeated'; eventId: string; deliveryIds: string[] }
  | { outcome: 'key_reused'; eventId: string }
  | ({ outcome: 'fanout' } & Reached)
  /** `month`: the first moment of the calendar month (UTC) whose limit is reached. */
  | ({ outcome: 'monthly_events' | 'monthly_attempts'; month: Date } & Reached)
  | { outcome: 'rate_limited' | 'counted' }
)

export type Publish = (request: PublishRequest) => Promise<PublishResult>

type RateColumns = { rate_limit: number; rate_count: number; window_start: Date; window_left: number }

type Row = RateColumns &
  Original & {
    outcome: Exclude<PublishResult['outcome'], 'repeated' | 'key_reused'> | 'key_taken' | 'try_again'
    delivery_ids: string[] | null
    /** `month` for the monthly limits. */
    details?: Reached | (Reached & { month: string }) | null
  }

/** What waybill.publish_plain answers, for all events together. */
type PlainRow = RateColumns & { event_ids: string[]; delivery_ids: string[]; items: number[] }

/**
 * One round finds an idempotency key whose event retention has removed, the next publishes; one more in case retention runs, or a full
 * rate window ends, meanwhile.
 */
const MAX_ROUNDS = 3

const MAX_BATCH = 100
/**
 * Of all payloads of a batch together, in characters. Everybody waits for the batch before their own, too: with four times as
 * much, publishing beside a tenant with large payloads takes three times as long, and that tenant gains nothing.
 */
const MAX_BATCH_LENGTH = 512 * 1024
/** What each delivery adds to that, so that a batch makes some five hundred at most. */
const DELIVERY_LENGTH = 1024
/**
 * As how many deliveries an event counts at most while nothing is known of its tenant's: a batch of a hundred events that made thousands
 * each would take too long.
 */
const LIKELY_FANOUT = 100

/**
 * Accepting events. The returned function resolves when the event, its deliveries, their jobs and all counters are
 * committed, or when the request is refused by a limit or its idempotency key. It rejects when the database fails: then
 * nothing was stored, unless only the answer was lost.
 */
export function createPublish(pool: Pool, limits: PublishLimits): Publish {
  /** How many deliveries the last event made, by tenant and type, and by tenant alone for types not seen yet. */
  const fanout = new LRUCache<string, number>({ max: 50_000 })
  /**
   * How many the first event of a tenant is likely to make: as many as others' first ones just did. The first events of thousands of
   * tenants would otherwise be stored by fives after every start.
   */
  let likely = LIKELY_FANOUT
  /**
   * Kinds of events that were not plain a moment ago, as an endpoint is paced, ordered or failing: trying it each time costs a
   * fifth more. That a key is taken says nothing of the next events.
   */
  const notPlain = new LRUCache<string, true>({ max: 10_000, ttl: 1000 })
  const isRepeated = createComparison(pool)
  const settings = JSON.stringify(limits)
  const kindOf = (request: PublishRequest) => `${request.tenantId} ${eventOf(request)?.type}`

  const submit = createBatcher<PublishRequest, Row>({
    max: MAX_BATCH,
    maxWeight: MAX_BATCH_LENGTH,
    weigh(request, isFirst) {
      const event = eventOf(request)
      if (event === null) return 0
      const deliveries =
        fanout.get(kindOf(request)) ?? fanout.get(request.tenantId) ?? (isFirst ? likely : LIKELY_FANOUT)
      return event.payload.length + DELIVERY_LENGTH * deliveries
    },
    owner: ({ tenantId }) => tenantId,
    patienceMs: PATIENCE_MS,
    async run(requests) {
      const plain = mayBePlain(requests) ? await publishPlain(requests) : undefined
      const rows = plain ?? (await publishBatch(requests))
      if (plain === null && !rows.some(({ outcome }) => outcome === 'key_taken'))
        for (const request of requests) notPlain.set(kindOf(request), true)
      const firsts: number[] = []
      requests.forEach((request, index) => {
        const { outcome, delivery_ids } = rows[index] as Row
        if (outcome !== 'accepted') return
        const made = delivery_ids?.length ?? 0
        if (!fanout.has(request.tenantId)) firsts.push(made)
        for (const key of [kindOf(request), request.tenantId]) fanout.set(key, made)
      })
      if (firsts.length > 0) likely = Math.min(LIKELY_FANOUT, Math.max(...firsts, likely / 2))
      return rows
    },
  })

  /** Whether all are events of one tenant, and of no kind that was not plain. */
  const mayBePlain = (requests: PublishRequest[]) =>
    requests.every(
      (request) => eventOf(request) && request.tenantId === requests[0]?.tenantId && !notPlain.has(kindOf(request)),
    )

  /** Null, and nothing stored, unless all are plain events of one tenant (waybill.publish_plain). */
  async function publishPlain(requests: PublishRequest[]): Promise<Row[] | null> {
    const tenantId = requests[0]?.tenantId ?? null
    const events = requests.flatMap((request) => eventOf(request) ?? [])
    const [row] = await pool<PlainRow[]>`
      select event_ids, delivery_ids, items, rate_limit, rate_count, window_start, window_left
      from waybill.publish_plain(
        ${tenantId},
        ${events.map((event) => event.type)}::text[],
        ${textList(events.map((event) => event.payload))}::text[],
        ${events.map((event) => event.idempotencyKey)}::text[],
        ${settings})`
    if (!row) return null
    const { event_ids, delivery_ids, items, ...rate } = row
    const rows = event_ids.map((event_id, index) => ({
      ...rate,
      outcome: 'accepted' as const,
      event_id,
      delivery_ids: [] as string[],
      rate_count: rate.rate_limit > 0 ? rate.rate_count - event_ids.length + index + 1 : 0,
    }))
    items.forEach((item, index) => {
      rows[item - 1]?.delivery_ids.push(delivery_ids[index] as string)
    })
    for (const { delivery_ids } of rows) delivery_ids.sort()
    return rows
  }

  const publishBatch = (requests: PublishRequest[]) => pool<Row[]>`
    select outcome, event_id, delivery_ids, details, same_text, original_type, octet_length(original_payload) as original_bytes,
      rate_limit, rate_count, window_start, window_left
    from waybill.publish(
      ${requests.map((request) => request.tenantId)}::text[],
      ${requests.map((request) => eventOf(request)?.type ?? null)}::text[],
      ${textList(requests.map((request) => eventOf(request)?.payload ?? null))}::text[],
      ${requests.map((request) => eventOf(request)?.idempotencyKey ?? null)}::text[],
      ${settings})`

  /** For a request that is submitted again, so that it is counted once. */
  const uncount = ({ tenantId }: PublishRequest, row: Row) => pool`
    update waybill.rate_windows set count = count - 1
    where tenant_id = ${tenantId} and action = 'events:write' and window_start = ${row.window_start} and ${row.rate_limit} > 0`

  /** Removes the request's key if retention has removed its event, and uncounts the request, which is submitted again. */
  async function freeKey(request: PublishRequest, row: Row): Promise<void> {
    await pool`
      delete from waybill.idempotency_keys k where tenant_id = ${request.tenantId} and key = ${eventOf(request)?.idempotencyKey ?? null}
        and not exists (select from waybill.events e where e.tenant_id = k.tenant_id and e.event_id = k.event_id)`
    await uncount(request, row)
  }

  /** Null when the request has to be submitted again. */
  async function answer(request: PublishRequest, row: Row): Promise<PublishResult | null> {
    const { outcome, event_id: eventId } = row
    const deliveryIds = row.delivery_ids ?? []
    const rate = {
      limit: row.rate_limit,
      count: row.rate_count,
      windowStart: row.window_start,
      secondsLeft: row.window_left,
    }
    switch (outcome) {
      case 'accepted':
        return { rate, outcome, eventId, deliveryIds }
      case 'key_taken': {
        const event = eventOf(request)
        const repeated = event !== null && (await isRepeated(request.tenantId, event, row))
        if (repeated === null) return null
        return repeated ? { rate, outcome: 'repeated', eventId, deliveryIds } : { rate, outcome: 'key_reused', eventId }
      }
      case 'try_again':
        return null
      case 'fanout':
        return { rate, outcome, ...(row.details as Reached) }
      case 'monthly_events':
      case 'monthly_attempts': {
        const { month, ...reached } = row.details as Reached & { month: string }
        return { rate, outcome, ...reached, month: new Date(month) }
      }
      default:
        return { rate, outcome }
    }
  }

  return async function publish(request) {
    for (let round = 1; ; round++) {
      const row = await submit(request)
      if (request.event === 'unread' && row.outcome === 'counted') await uncount(request, row)
      const result = await answer(request, row)
      if (result) return result
      if (round === MAX_ROUNDS) throw new Error('the request was to be submitted again too often')
      await freeKey(request, row)
    }
  }
}
