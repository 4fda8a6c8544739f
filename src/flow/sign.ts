import { createHmac, createSecretKey, type KeyObject } from 'node:crypto'
import { LRUCache } from 'lru-cache'

/** What identifies and signs one attempt. */
type Signing = {
  eventId: string
  deliveryId: string
  timestampSeconds: number
  body: string
  /** `whsec_…`, newest first: two during a rotation's overlap. */
  secrets: string[]
}

/**
 * The headers of attempts, under our own prefix and as Standard Webhooks names them. What is signed is
 * `{event_id}.{timestamp}.{body}`, once with each secret, so a receiver that knows either one can verify it.
 */
export function createSigner(prefix: string): (attempt: Signing) => Record<string, string> {
  // Made once: an object whose names are new strings each time costs as much as the signature.
  const eventIdName = `${prefix}-event-id`
  const deliveryIdName = `${prefix}-delivery-id`
  const timestampName = `${prefix}-timestamp`
  const signatureName = `${prefix}-signature`
  return ({ eventId, deliveryId, timestampSeconds, body, secrets }) => {
    const timestamp = String(timestampSeconds)
    const signature = secrets.map((secret) => sign(secret, `${eventId}.${timestamp}.${body}`)).join(' ')
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

/** `v1,` and the base64 HMAC-SHA256 of `content`; the key is the secret's base64 part, decoded (Standard Webhooks). */
function sign(secret: string, content: string): string {
  return `v1,${createHmac('sha256', keys.memo(secret)).update(content, 'utf8').digest('base64')}`
}

/** Setting a key up takes longer than signing with it, and secrets are few compared with requests. */
const keys = new LRUCache<string, KeyObject>({
  max: 10_000,
  memoMethod: (secret) => createSecretKey(Buffer.from(secret.replace(/^whsec_/, ''), 'base64')),
})
