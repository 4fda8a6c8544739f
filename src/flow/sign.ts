import { createHmac, type KeyObject } from 'node:crypto'

/** What identifies and signs one attempt. */
type Signing = {
  eventId: string
  deliveryId: string
  timestampSeconds: number
  body: string
  /** Newest first: two during a rotation's overlap. */
  keys: KeyObject[]
}

/**
 * The headers of attempts, under our own prefix and as Standard Webhooks names them. What is signed is
 * `{event_id}.{timestamp}.{body}`, once with each key, so a receiver that knows either secret can verify it.
 */
export function createSigner(prefix: string): (attempt: Signing) => Record<string, string> {
  // Made once: an object whose names are new strings each time costs as much as the signature.
  const eventIdName = `${prefix}-event-id`
  const deliveryIdName = `${prefix}-delivery-id`
  const timestampName = `${prefix}-timestamp`
  const signatureName = `${prefix}-signature`
  return ({ eventId, deliveryId, timestampSeconds, body, keys }) => {
    const timestamp = String(timestampSeconds)
    const signature = keys.map((key) => sign(key, `${eventId}.${timestamp}.${body}`)).join(' ')
    return {
      [eventIdName]: eventId,
      [deliveryIdName]: deliveryId,
      [timestampName]: timestamp,
      [signatureName]: signature,
      'webhook-id': eventId,
      'webhook-timestamp': timestamp,
      'webhook-signature': signature,
    }
  }
}

/** `v1,` and the base64 HMAC-SHA256 of `content` (Standard Webhooks). */
const sign = (key: KeyObject, content: string) =>
  `v1,${createHmac('sha256', key).update(content, 'utf8').digest('base64')}`
