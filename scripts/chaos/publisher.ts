import { Agent, request } from 'undici'
import type { Random } from './random.ts'

/**
 * One request; `status` is null when there was no answer, so that nobody knows what became of it, unless it was not sent: for want
 * of a connection.
 */
type Try = { at: number; ms: number; status: number | null; shaped: boolean; sent: boolean }

/** An event that somebody wants to publish, and all that was answered. */
export type Publish = {
  tenantId: string
  key: string
  type: string
  payload: string
  tries: Try[]
  /** Of the first 2xx; null as long as there is none. */
  eventId: string | null
  /** When it was accepted. */
  acceptedAt: number | null
  /** A status that repeating does not change. */
  refused: number | null
}

export type Load = {
  log: Publish[]
  /** Starts no more publishes; resolves when each one that was started has been accepted or refused, or is given up. */
  stop: () => Promise<void>
}

export type Publisher = {
  /** Publishes until it is accepted or refused, or for a minute and a half. */
  publish: (entry: Publish, apiKey: string) => Promise<void>
  close: () => Promise<void>
}

const TIMEOUT_MS = 15_000
const GIVE_UP_MS = 90_000

export const newPublish = (known: Pick<Publish, 'tenantId' | 'key' | 'type' | 'payload'>): Publish => ({
  ...known,
  tries: [],
  eventId: null,
  acceptedAt: null,
  refused: null,
})

/** What is not answered with 2xx is repeated with its idempotency key, at the next address, until it is. */
export function createPublisher(urls: () => string[]): Publisher {
  const agent = new Agent({ connections: 256, pipelining: 1, keepAliveMaxTimeout: 2000 })
  let round = 0

  /** True when there is nothing to repeat. */
  async function tryOnce(entry: Publish, apiKey: string): Promise<boolean> {
    const at = Date.now()
    try {
      const addresses = urls()
      const url = addresses[round++ % addresses.length]
      if (url === undefined) throw new Error('no API is running')
      const { statusCode: status, body } = await request(`${url}/v1/events`, {
        method: 'POST',
        dispatcher: agent,
        headers: {
          authorization: `Bearer ${apiKey}`,
          'content-type': 'application/json',
          'idempotency-key': entry.key,
        },
        body: `{"event_type":${JSON.stringify(entry.type)},"payload":${entry.payload}}`,
        signal: AbortSignal.timeout(TIMEOUT_MS),
      })
      const answer = JSON.parse(await body.text())
      const shaped = answer.ok === status < 300 && (answer.ok || typeof answer.error === 'string')
      entry.tries.push({ at, ms: Date.now() - at, status, shaped, sent: true })
      if (status < 300) {
        Object.assign(entry, { eventId: answer.event_id, acceptedAt: Date.now() })
      } else if (status < 500 && status !== 429) entry.refused = status
    } catch (error) {
      const sent = (error as NodeJS.ErrnoException).code !== 'ECONNREFUSED'
      entry.tries.push({ at, ms: Date.now() - at, status: null, shaped: true, sent })
    }
    return entry.eventId !== null || entry.refused !== null
  }

  return {
    async publish(entry, apiKey) {
      const until = Date.now() + GIVE_UP_MS
      while (!(await tryOnce(entry, apiKey)) && Date.now() < until)
        await sleep(100 * Math.min(10, 1 + entry.tries.length))
    },
    close: () => agent.destroy(),
  }
}

/** Publishes `rate` events a second in an open loop, at moments that the seed decides and whatever the service does. */
export function startLoad(options: {
  publisher: Publisher
  tenant: { tenantId: string; key: string }
  rate: number
  types: string[]
  random: Random
  name: string
  onPublish: (entry: Publish) => void
}): Load {
  const { random, rate, name, tenant } = options
  const log: Publish[] = []
  const under = new Set<Promise<void>>()
  let stopped = false

  async function run(): Promise<void> {
    for (let intended = Date.now(); !stopped; ) {
      const key = `${name}-${log.length}`
      const filler = 'x'.repeat(random.integer(0, 300))
      const payload = `{"key":"${key}","n": ${log.length}, "big":12345678901234567890,"filler":"${filler}"}`
      const entry = newPublish({ tenantId: tenant.tenantId, key, type: random.pick(options.types), payload })
      log.push(entry)
      options.onPublish(entry)
      const done = options.publisher.publish(entry, tenant.key).finally(() => under.delete(done))
      under.add(done)
      intended += (-Math.log(1 - random.next()) * 1000) / rate
      await sleep(intended - Date.now())
    }
  }

  const running = run()
  return {
    log,
    async stop() {
      stopped = true
      await running
      while (under.size > 0) await Promise.all(under)
    },
  }
}

export const sleep = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, Math.max(0, ms)))
