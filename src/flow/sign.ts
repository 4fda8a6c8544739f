import { createHmac, createSecretKey, type KeyObject } from 'node:crypto'
import { LRUCache } from 'lru-cache'

/**
 * The headers that identify and sign one attempt, under our own prefix and as Standard Webhooks names them.
 * `secrets` are `whsec_…`, newest first; during a rotation's overlap there are two, and the header carries a signature of
 * each, so a receiver that knows either one verifies. Signed is `{event_id}.{timestamp}.{body}`.
 */
export function signedHeaders(options: {
  prefix: string
  eventId: string
  deliveryId: string
  timestampSeconds: number
  body: string
  secrets: string[]
}): Record<string, string> {
  const { prefix, eventId, timestampSeconds: timestamp } = options
  const signature = options.secrets.map((secret) => sign(secret, `${eventId}.${timestamp}.${options.body}`)).join(' ')
  return {
    [`${prefix}-event-id`]: eventId,
    [`${prefix}-delivery-id`]: options.deliveryId,
    [`${prefix}-timestamp`]: String(timestamp),
    [`${prefix}-signature`]: signature,
    'webhook-id': eventId,
    'webhook-timestamp': String(timestamp),
    'webhook-signature': signature,
  }
}

/** `v1,` and the base64 HMAC-SHA256 of `content`; the key is the secret's base64 part, decoded (Standard Webhooks). */
export function sign(secret: string, content: string): string {
  return `v1,${createHmac('sha256', keyOf(secret)).update(content, 'utf8').digest('base64')}`
}

const keys = new LRUCache<string, KeyObject>({ max: 10_000 })

/** Setting a key up takes longer than signing with it, and secrets are few beside requests. */
function keyOf(secret: string): KeyObject {
  let key = keys.get(secret)
  if (key === undefined) {
    key = createSecretKey(Buffer.from(secret.replace(/^whsec_/, ''), 'base64'))
    keys.set(secret, key)
  }
  return key
}
