import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Outcome } from '../../src/egress/send.ts'
import { type Claim, LAPSE_MS } from '../../src/flow/claim.ts'
import { createDeliver } from '../../src/flow/deliver.ts'
import { createLog } from '../../src/log.ts'
import { signingKey } from '../../src/secrets.ts'

/** Makes attempts that all fail, and notes their headers, which are too late, and how many seconds each retry is to wait at least. */
function setUp(answer: Partial<Outcome> = {}) {
  const waits: number[] = []
  const sent: Record<string, string>[] = []
  const late: (boolean | undefined)[] = []
  const deliver = createDeliver({
    sender: {
      async send({ headers, isLate }) {
        sent.push(headers)
        late.push(isLate?.())
        return {
          startedAt: performance.now(),
          durationMs: 1,
          statusCode: 500,
          error: 'http_status',
          errorMessage: null,
          responseBody: '',
          responseTruncated: false,
          retryAfter: null,
          ...answer,
        }
      },
      interrupt() {},
      async close() {},
    },
    // A copy from before the claim was last touched.
    withPayload: (claim, work) => work({ ...claim, touchedAt: -Infinity }, '{}'),
    async record({ verdict }) {
      if (verdict.kind === 'failed') waits.push(verdict.notBeforeSeconds)
      return { settled: true, nextAttemptAt: null, held: false }
    },
    keyOf: () => signingKey('whsec_c2VjcmV0'),
    headerPrefix: 'service',
    userAgent: 'test',
    log: createLog('silent'),
  })
  /** So many of a tenant at once; answers with how long their retries wait. */
  const fail = async (tenantId: string, count: number) => {
    waits.length = 0
    await Promise.all(Array.from({ length: count }, () => deliver(claimOf(tenantId), () => {})))
    return [...waits]
  }
  return { deliver, fail, sent, late, waits }
}

const ID = '01932d6f-9a3c-7c41-8a52-6f1d0e6a9b10'

const claimOf = (tenantId: string): Claim => ({
  tenantId,
  deliveryId: ID,
  retryCount: 0,
  bundle: null,
  attemptNumber: 1,
  recordedAttempts: 0,
  status: 'pending',
  eventId: ID,
  eventType: 'a.b',
  payload: '{}',
  payloadBytes: 2,
  endpointId: ID,
  url: 'http://127.0.0.1:9/',
  secrets: [''],
  withinQuota: true,
  atOnce: null,
  isProbed: false,
  standing: 'good',
  startAt: null,
  clockOffsetMs: 0,
  claimedAtMs: 0,
  touchedAt: performance.now(),
  hand: null,
  underWay: null,
})

test('where a tenant’s attempts fail by thousands, each thousand’s retries wait for longer than those of the one before', async () => {
  const { fail } = setUp()
  const waits = await fail('storm', 4000)
  const sums = [0, 1000, 2000, 3000].map((from) => waits.slice(from, from + 1000).reduce((sum, wait) => sum + wait, 0))
  assert.equal(waits.length, 4000)
  assert.equal(sums[0], 0, 'the first ones are spread by their backoff')
  for (const [nth, sum] of sums.slice(1).entries()) assert.ok(sum > sums[nth]!, sums.join())
  assert.deepEqual(await fail('calm', 3), [0, 0, 0])
})

test('an attempt is signed with the time of the database’s clock, and a date in Retry-After is one of that clock', async () => {
  const inAnHour = Date.now() + 3_600_000
  const retryAfter = new Date(inAnHour + 60_000).toUTCString()
  const { deliver, sent, waits } = setUp({ statusCode: 503, retryAfter })
  await deliver({ ...claimOf('acme'), clockOffsetMs: inAnHour - performance.now() }, () => {})
  assert.ok(Math.abs(Number(sent[0]?.['webhook-timestamp']) - inAnHour / 1000) < 10, sent[0]?.['webhook-timestamp'])
  assert.ok(waits[0]! > 50 && waits[0]! <= 60, `${waits[0]} s`)
})

test('a request is too late once its claim may have lapsed, as another worker may have sent it by then', async () => {
  const { deliver, late } = setUp()
  for (const ago of [0, LAPSE_MS + 1])
    await deliver({ ...claimOf('acme'), touchedAt: performance.now() - ago }, () => {})
  assert.deepEqual(late, [false, true])
})
