import assert from 'node:assert/strict'
import { readFile } from 'node:fs/promises'
import { test } from 'node:test'
import { Webhook } from 'standardwebhooks'
import { createSigner } from '../../src/flow/sign.ts'
import { signingKey } from '../../src/secrets.ts'

type Vector = {
  name: string
  secret: string
  msg_id: string
  timestamp: number
  payload?: string
  payload_repeat?: { char: string; count: number }
  expected: string
}

const VECTORS = new URL('../vectors/signature_vectors.json', import.meta.url)
const vectors: { published: Vector[]; derived: Vector[] } = JSON.parse(await readFile(VECTORS, 'utf8'))

const OLD = 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw'
const NEW = 'whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD'

for (const { name, secret, msg_id, timestamp, payload, payload_repeat, expected } of [
  ...vectors.published,
  ...vectors.derived,
]) {
  test(`signs as Standard Webhooks does: ${name}`, () => {
    const body = payload ?? payload_repeat!.char.repeat(payload_repeat!.count)
    const headers = createSigner('acme')({
      eventId: msg_id,
      deliveryId: 'dlv_1',
      timestampSeconds: timestamp,
      body,
      keys: [signingKey(secret)],
    })
    assert.equal(headers['webhook-signature'], expected)
  })
}

const headersFor = (secrets: string[], now = Math.floor(Date.now() / 1000)) =>
  createSigner('acme')({
    eventId: 'evt_1',
    deliveryId: 'dlv_1',
    timestampSeconds: now,
    body: '{"a":1}',
    keys: secrets.map(signingKey),
  })

test('an attempt names its event, its delivery and its time under the operator’s prefix and under the standard names', () => {
  const headers = headersFor([NEW], 1_700_000_000)
  const signature = new Webhook(NEW).sign('evt_1', new Date(1_700_000_000_000), '{"a":1}')
  assert.deepEqual(headers, {
    'acme-event-id': 'evt_1',
    'acme-delivery-id': 'dlv_1',
    'acme-timestamp': '1700000000',
    'acme-signature': signature,
    'webhook-id': 'evt_1',
    'webhook-timestamp': '1700000000',
    'webhook-signature': signature,
  })
})

test('during a rotation the newest secret signs first, and each of the two verifies alone', () => {
  const headers = headersFor([NEW, OLD])
  const [first, second, ...rest] = headers['webhook-signature']!.split(' ')
  const madeAt = new Date(Number(headers['webhook-timestamp']) * 1000)
  const expected = [NEW, OLD].map((secret) => new Webhook(secret).sign('evt_1', madeAt, '{"a":1}'))
  assert.deepEqual([first, second, rest], [...expected, []])
  for (const secret of [NEW, OLD]) assert.deepEqual(new Webhook(secret).verify('{"a":1}', headers), { a: 1 })
})

test('a signature does not verify with another secret, nor for another body', () => {
  const headers = headersFor([NEW])
  assert.throws(() => new Webhook(OLD).verify('{"a":1}', headers))
  assert.throws(() => new Webhook(NEW).verify('{"a": 1}', headers))
})
