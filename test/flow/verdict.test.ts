import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { AttemptError } from '../../src/egress/failure.ts'
import { judge } from '../../src/flow/verdict.ts'

// One of the three forms of a date does not say that it is GMT.
process.env.TZ = 'America/New_York'

const NOW = new Date('2026-11-21T08:00:00.000Z')
const DAY = 86_400

const answered = (statusCode: number, retryAfter: string | null = null) => {
  const error: AttemptError | null = statusCode >= 200 && statusCode < 300 ? null : 'http_status'
  return judge({ statusCode, error, retryAfter }, NOW)
}

test('every 2xx is a delivery', () => {
  for (const status of [200, 201, 202, 204, 299]) assert.deepEqual(answered(status), { kind: 'delivered' })
})

test('410 says that the endpoint is gone', () => {
  assert.deepEqual(answered(410), { kind: 'gone' })
})

test('every other status fails, to be tried again', () => {
  for (const status of [300, 301, 304, 307, 400, 401, 404, 408, 409, 429, 500, 502, 503, 599]) {
    assert.deepEqual(answered(status), { kind: 'failed', notBeforeSeconds: 0 }, String(status))
  }
})

test('a 2xx whose body broke off is not a delivery', () => {
  const outcome = { statusCode: 200, error: 'connection_reset', retryAfter: null } as const
  assert.deepEqual(judge(outcome, NOW), { kind: 'failed', notBeforeSeconds: 0 })
})

test('an attempt without a response fails', () => {
  const outcome = { statusCode: null, error: 'timeout', retryAfter: null } as const
  assert.deepEqual(judge(outcome, NOW), { kind: 'failed', notBeforeSeconds: 0 })
})

test('Retry-After counts with 429 and 503, and with no other status', () => {
  for (const status of [429, 503]) assert.deepEqual(answered(status, '60'), { kind: 'failed', notBeforeSeconds: 60 })
  for (const status of [301, 400, 404, 500, 502]) {
    assert.deepEqual(answered(status, '60'), { kind: 'failed', notBeforeSeconds: 0 })
  }
})

const READINGS: [header: string | null, seconds: number, why: string][] = [
  [null, 0, 'absent'],
  ['0', 0, 'no wait'],
  ['5', 5, 'seconds'],
  [' 7 ', 7, 'white space around'],
  ['1.5', 2, 'a fraction, rounded up: never earlier than asked'],
  ['Sat, 21 Nov 2026 08:01:00 GMT', 60, 'an HTTP date'],
  ['Sat Nov 21 08:01:00 2026', 60, 'an HTTP date of the oldest kind'],
  ['Saturday, 21-Nov-26 08:01:00 GMT', 60, 'an HTTP date of the old kind'],
  ['Fri, 20 Nov 2026 08:00:00 GMT', 0, 'a date in the past'],
  ['Sat, 21 Nov 2099 08:00:00 GMT', DAY, 'a date too far off: a day at most'],
  ['86400', DAY, 'exactly a day'],
  ['86401', DAY, 'a second more'],
  ['1000000000', DAY, 'a number too large'],
  ['9'.repeat(400), DAY, 'a number beyond every double'],
  ['-1', 0, 'a negative number, which Date.parse takes for a year'],
  ['1e9', 0, 'a number in no notation of HTTP'],
  ['Infinity', 0, 'not a number of HTTP'],
  ['Soon 2099', 0, 'words that Date.parse takes for a date'],
  ['12/31/2099', 0, 'a date that is not of HTTP'],
  ['Sat, 99 Nov 2026', 0, 'no such date'],
  ['120, 60', 0, 'two values in one'],
  ['', 0, 'empty'],
  ['junk', 0, 'junk'],
]

for (const [header, seconds, why] of READINGS) {
  test(`Retry-After ${JSON.stringify(header?.slice(0, 40) ?? null)} means ${seconds} seconds: ${why}`, () => {
    assert.deepEqual(answered(503, header), { kind: 'failed', notBeforeSeconds: seconds })
  })
}
