import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createDatabase } from './support/database.ts'
import { type Receipt, startReceiver } from './support/receiver.ts'
import { createTenant, startService } from './support/service.ts'
import { verifyStandard } from './support/verify.ts'
import { waitFor } from './support/wait.ts'

const EVENTS = 1000
const ENDPOINTS = ['/a', '/b', '/c']
const PUBLISHERS = 32

/** What a careless service would change: each is published as it stands here, and must arrive so. */
const AWKWARD = [
  '"big":9223372036854775807,"bigger":123456789012345678901234567890',
  '"spelled":[1.0,1e2,1E+2,-0,-0.0,0.10,1e400]',
  '"z":1,"a":2,"10":3,"9":4',
  String.raw`"nul":"a\u0000b","lone":"\ud800","low":"\udc00\ud800"`,
  String.raw`"slash":"\/","e":"\u00e9","é":"é","sep":"\u2028"`,
  '"__proto__":{"polluted":true},"constructor":null,"toString":1',
  '"twice":1,"twice":2',
  '"emoji":"😀","nested":{"payload":{"event_type":"x"}},"empty":{},"list":[[],{}]',
  ' "white" : [ 1 ,\n\t2 ] ',
  String.raw`"quote":"\"}],{[","back":"\\"`,
]

const payloadOf = (n: number) => `{"n":${n},${AWKWARD[n % AWKWARD.length]}}`

test(`with the API and the worker apart, ${EVENTS} events reach 3 endpoints exactly once, signed and unchanged`, async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const receiver = await startReceiver(t)
  const [api] = await Promise.all([
    startService(t, { databaseUrl, mode: 'api' }),
    // On a slow machine this process, which is the receiver, too, answers late; a timeout would be a second request.
    startService(t, { databaseUrl, mode: 'worker', env: { ATTEMPT_TIMEOUT_SECONDS: '60' } }),
  ])
  const tenant = await createTenant(api)
  const secrets = new Map<string, string>()
  for (const path of ENDPOINTS) {
    secrets.set(path, (await tenant.createEndpoint(receiver.url(path))).signing_secret)
  }

  const published = new Map<string, string>()
  let next = 0
  async function publishOn() {
    while (next < EVENTS) {
      const payload = payloadOf(next++)
      const { event_id, delivery_ids } = await tenant.publish('load.test', payload)
      assert.equal(delivery_ids.length, ENDPOINTS.length)
      published.set(event_id, payload)
    }
  }
  await Promise.all(Array.from({ length: PUBLISHERS }, publishOn))
  assert.equal(published.size, EVENTS)

  await receiver.until(EVENTS * ENDPOINTS.length, { timeoutMs: 60_000 })
  // Whatever is sent twice is sent before everything is recorded as delivered.
  const unfinished = () => sql`select from waybill.deliveries where status <> 'delivered' limit 1`
  await waitFor(async () => (await unfinished()).length === 0, { what: 'every delivery to be recorded' })
  assert.equal(receiver.receipts.length, EVENTS * ENDPOINTS.length)

  const seen = new Set<string>()
  for (const receipt of receiver.receipts) {
    const eventId = String(receipt.headers['webhook-id'])
    const key = `${receipt.path} ${eventId}`
    assert.ok(!seen.has(key), 'each event reaches each endpoint once')
    seen.add(key)
    verifyStandard(receipt, secrets.get(receipt.path)!)
    assert.equal(dataOf(receipt), published.get(eventId))
  }
  assert.deepEqual([...(await sql`select id from pgboss.job where name = 'deliveries'`)], [])
  const numbers = await sql`select attempt_number, count(*)::int from waybill.attempts group by 1`
  assert.deepEqual([...numbers], [{ attempt_number: 1, count: EVENTS * ENDPOINTS.length }])
})

/** The payload's text in a request body, cut out without parsing it. */
function dataOf({ body }: Receipt): string {
  const text = body.toString()
  const start = text.indexOf(',"data":') + ',"data":'.length
  return text.slice(start, -1)
}
