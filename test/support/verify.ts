import assert from 'node:assert/strict'
import { createHmac } from 'node:crypto'
import { Webhook } from 'standardwebhooks'
import type { Receipt } from './receiver.ts'

const headersOf = ({ headers }: Receipt) => headers as Record<string, string>

/** Throws unless the `standardwebhooks` library accepts the signature. */
export function verifyStandard(receipt: Receipt, secret: string): void {
  new Webhook(secret).verify(receipt.body, headersOf(receipt))
}

/** Throws unless the library, and a receiver that knows the prefixed headers alone, accept the signature. */
export function verifyBothWays(receipt: Receipt, secret: string): void {
  verifyStandard(receipt, secret)
  const headers = headersOf(receipt)
  const key = Buffer.from(secret.slice('whsec_'.length), 'base64')
  const signed = `${headers['service-event-id']}.${headers['service-timestamp']}.${receipt.body}`
  const signature = `v1,${createHmac('sha256', key).update(signed).digest('base64')}`
  assert.ok(headers['service-signature']?.split(' ').includes(signature), 'the prefixed headers verify by themselves')
}
