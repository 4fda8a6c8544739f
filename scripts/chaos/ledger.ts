import type { Scope } from '../../test/support/cleanup.ts'
import { startReceiver } from '../../test/support/receiver.ts'
import { verifyStandard } from '../../test/support/verify.ts'

/** A request as an endpoint's receiver has noted it. */
export type Receipt = {
  endpoint: Endpoint
  deliveryId: string
  eventId: string
  /** The body's text before the payload (its id, type and timestamp), and the payload's, as they came. */
  head: string
  payload: string
  /** When all of it had come, in milliseconds since 1970. */
  at: number
  /** The time that was signed, in seconds. */
  signedAt: number
  /** The secrets of the endpoint that open its signature. */
  opened: string[]
  /** The receiver's answer; null until it is given. */
  answered: number | null
}

export type Endpoint = {
  endpointId: string
  tenantId: string
  url: string
  /** What it is subscribed to. */
  types: string[]
  active: boolean
  /** All signing secrets that it ever had. */
  secrets: string[]
  /**
   * What its receiver answers, perhaps later; null resets the connection. `nth` counts the receipts of this delivery
   * from 1.
   */
  reply: (receipt: Receipt, nth: number) => number | null | Promise<number | null>
}

export type Ledger = {
  receipts: Receipt[]
  /** The receipts of a delivery, in order. */
  of: (deliveryId: string) => Receipt[]
  /** Those of an endpoint. */
  at: (endpoint: Endpoint) => Receipt[]
  /** Those that are not answered yet. */
  open: () => Receipt[]
  url: (path: string) => string
  /** Takes what comes to the endpoint. */
  attach: (endpoint: Endpoint) => void
}

const DATA = ',"data":'

/** One real receiver for all endpoints: it verifies each request when it comes, notes it, and answers. */
export async function startLedger(scope: Scope): Promise<Ledger> {
  const receiver = await startReceiver(scope)
  const receipts: Receipt[] = []
  const byDelivery = new Map<string, Receipt[]>()
  const unanswered = new Set<Receipt>()
  return {
    receipts,
    of: (deliveryId) => byDelivery.get(deliveryId) ?? [],
    at: (endpoint) => receipts.filter((receipt) => receipt.endpoint === endpoint),
    open: () => [...unanswered],
    url: receiver.url,
    attach(endpoint) {
      receiver.script(new URL(endpoint.url).pathname, async (raw) => {
        const text = raw.body.toString()
        const receipt: Receipt = {
          endpoint,
          deliveryId: String(raw.headers['service-delivery-id']),
          eventId: String(raw.headers['service-event-id']),
          head: text.slice(0, text.indexOf(DATA)),
          payload: text.slice(text.indexOf(DATA) + DATA.length, -1),
          at: raw.at,
          signedAt: Number(raw.headers['service-timestamp']),
          opened: endpoint.secrets.filter((secret) => opens(() => verifyStandard(raw, secret))),
          answered: null,
        }
        // What was verified is not needed any more, and there are many.
        raw.body = Buffer.alloc(0)
        receipts.push(receipt)
        const same = byDelivery.get(receipt.deliveryId) ?? []
        byDelivery.set(receipt.deliveryId, same)
        same.push(receipt)
        unanswered.add(receipt)
        receipt.answered = await endpoint.reply(receipt, same.length)
        unanswered.delete(receipt)
        return receipt.answered
      })
    },
  }
}

function opens(verify: () => void): boolean {
  try {
    verify()
    return true
  } catch {
    return false
  }
}
