import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Claim } from '../../src/flow/claim.ts'
import { createDeliver } from '../../src/flow/deliver.ts'
import { createLog } from '../../src/log.ts'

/** Makes so many attempts of a tenant at once, all of which fail; answers with how many seconds each retry is to wait at least. */
function setUp() {
  const waits: number[] = []
  const deliver = createDeliver({
    sender: {
      async send() {
        return {
          startedAt: performance.now(),
          durationMs: 1,
          statusCode: 500,
          error: 'http_status',
          errorMessage: null,
          responseBody: '',
          responseTruncated: false,
          retryAfter: null,
        }
      },
      interrupt() {},
      async close() {},
    },
    withPayload: (claim, work) => work(claim, '{}'),
    async record({ verdict }) {
      if (verdict.kind === 'failed') waits.push(verdict.notBeforeSeconds)
      return { settled: true, nextAttemptAt: null, held: false }
    },
    openSecret: () => 'whsec_c2VjcmV0',
    headerPrefix: 'service',
    userAgent: 'test',
    log: createLog('silent'),
  })
  return async (tenantId: string, count: number) => {
    waits.length = 0
    await Promise.all(Array.from({ length: count }, () => deliver(claimOf(tenantId), () => {})))
    return [...waits]
  }
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
  standing: 'good',
  startAt: null,
  clockOffsetMs: 0,
  claimedAtMs: 0,
  touchedAt: performance.now(),
  hand: null,
  underWay: null,
})

test('where a tenant’s attempts fail by thousands, each thousand’s retries wait for longer than those of the one before', async () => {
  const fail = setUp()
  const waits = await fail('storm', 4000)
  const sums = [0, 1000, 2000, 3000].map((from) => waits.slice(from, from + 1000).reduce((sum, wait) => sum + wait, 0))
  assert.equal(waits.length, 4000)
  assert.equal(sums[0], 0, 'the first ones are spread by their backoff')
  for (const [nth, sum] of sums.slice(1).entries()) assert.ok(sum > sums[nth]!, sums.join())
  assert.deepEqual(await fail('calm', 3), [0, 0, 0])
})
