import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import { LocalFault } from '../../src/egress/failure.ts'
import { type Claim, type ClaimedJob, Outdated } from '../../src/flow/claim.ts'
import { createClaim } from '../../src/flow/claim-due.ts'
import { createInHand } from '../../src/flow/in-hand.ts'
import { createLog } from '../../src/log.ts'
import { assertBooks } from '../support/deliveries.ts'
import { startTenant } from '../support/service.ts'

const claimOf = (id: string): ClaimedJob => ({
  tenantId: 'acme',
  deliveryId: id,
  endpointId: 'one',
  retryCount: 0,
  bundle: null,
  claimedAtMs: 0,
  touchedAt: 0,
  hand: null,
})

test('who is under way has a slot until it is let go', () => {
  const pool = null as never // Nothing is put away here.
  const inHand = createInHand({ pool, slots: 2, closing: new AbortController().signal, log: createLog('silent') })
  const slots = new Set<object>()
  const takeSlot = () => {
    const slot = {}
    slots.add(slot)
    return () => void slots.delete(slot)
  }
  const [started, ...waiting] = Array.from({ length: 4 }, (_, nth): ClaimedJob => {
    const claim = claimOf(String(nth))
    inHand.take(claim, takeSlot)
    if (nth === 0) inHand.takeSlot(claim)
    else inHand.wait(claim, 'endpoint')
    return claim
  }) as [ClaimedJob, ...ClaimedJob[]]
  assert.equal(slots.size, 1)

  inHand.answered(started)
  for (const claim of waiting) inHand.takeSlot(claim)
  assert.equal(slots.size, 3, 'each that waited is under way now')
  inHand.letGo([started, ...waiting])
  assert.equal(slots.size, 0)
  assert.deepEqual(inHand.all(), [])
})

test('as many as there are slots may wait for their endpoints, and beside them twice as many for their tenants', () => {
  const pool = null as never
  const inHand = createInHand({ pool, slots: 2, closing: new AbortController().signal, log: createLog('silent') })
  const wait = (count: number, waitsFor: 'endpoint' | 'tenant') =>
    Array.from({ length: count }, (_, nth) => {
      const claim = claimOf(`${waitsFor} ${nth}`) as Claim
      inHand.take(claim, () => () => {})
      inHand.wait(claim, waitsFor)
      return claim
    })
  const [started, given] = wait(4, 'tenant') as [Claim, Claim]
  wait(2, 'endpoint')
  assert.equal(inHand.tooMany(), 0)
  wait(1, 'tenant')
  assert.equal(inHand.tooMany(), 1)
  wait(1, 'endpoint')
  assert.equal(inHand.tooMany(), 2)

  inHand.takeSlot(started)
  assert.equal(inHand.tooMany(), 1, 'one that waited is under way')
  inHand.letGo([given])
  assert.equal(inHand.tooMany(), 1, 'one less waits than may')
  wait(1, 'tenant')
  assert.equal(inHand.tooMany(), 1)
  wait(1, 'tenant')
  assert.equal(inHand.tooMany(), 2)
})

test('what has been recorded makes room for others to be recorded without a slot', () => {
  const pool = null as never
  const inHand = createInHand({ pool, slots: 1, closing: new AbortController().signal, log: createLog('silent') })
  const answered = Array.from({ length: 4 }, (_, nth) => {
    const claim = claimOf(String(nth))
    inHand.take(claim, () => () => {})
    inHand.takeSlot(claim)
    return { claim, isFree: inHand.answered(claim) }
  })
  assert.deepEqual(
    answered.map(({ isFree }) => isFree),
    [true, true, true, false],
  )
  inHand.letGo([answered[0]!.claim])
  assert.equal(inHand.answered(answered[3]!.claim), true)
})

test('what cannot be put away is let go of, so that it lapses, and stops nobody', async (t) => {
  let ahead = 0
  const now = performance.now.bind(performance)
  t.mock.method(performance, 'now', () => now() + ahead)
  const pool = async () => {
    ahead += 60_000
    throw new TypeError('ours')
  }
  const { signal } = new AbortController()
  const inHand = createInHand({ pool: pool as never, slots: 2, closing: signal, log: createLog('silent') })
  const claim = claimOf('one')
  for (const putAway of [
    () => assert.rejects(inHand.hold([claim], { counted: true }), TypeError),
    () => assert.rejects(inHand.postpone([claim as Claim], 1), TypeError),
    () => inHand.handBack([claim as Claim]),
    async () => assert.equal(await inHand.putOff(claim as Claim, new Outdated()), true),
  ]) {
    inHand.take(claim, () => () => {})
    await putAway()
    assert.deepEqual(inHand.all(), [])
  }
})

test('what this process lacks something for is put off also when a shutdown ends all waiting', async () => {
  const closing = new AbortController()
  const pool = async () => []
  const inHand = createInHand({ pool: pool as never, slots: 2, closing: closing.signal, log: createLog('silent') })
  const claim = claimOf('one') as Claim
  inHand.take(claim, () => () => {})
  const done = inHand.putOff(claim, new LocalFault('no files'))
  closing.abort(new Error('the end'))
  assert.equal(await done, true)
  assert.deepEqual(inHand.all(), [])
})

test('what is put away stays in hand until that is done, so that it does not lapse meanwhile', async () => {
  const answer = Promise.withResolvers<[]>()
  const { signal } = new AbortController()
  const pool = () => answer.promise
  const inHand = createInHand({ pool: pool as never, slots: 2, closing: signal, log: createLog('silent') })
  const claims = ['held', 'postponed', 'handed back'].map((id) => claimOf(id) as Claim)
  for (const claim of claims) inHand.take(claim, () => () => {})
  const [held, postponed, handedBack] = claims as [Claim, Claim, Claim]
  const done = [inHand.hold([held], { counted: true }), inHand.postpone([postponed], 1), inHand.handBack([handedBack])]
  assert.deepEqual(inHand.all(), claims)
  answer.resolve([])
  await Promise.all(done)
  assert.deepEqual(inHand.all(), [])
})

test('attempts that miss their time slots at the same moment are held together', async (t) => {
  const { sql, tenant } = await startTenant(t, { mode: 'api' })
  await tenant.createEndpoint('http://127.0.0.1:9/')
  for (let nth = 0; nth < 3; nth++) await tenant.publish()
  const { send } = await createClaim(sql, 1000)({ kind: 'first', thorough: true, max: 10 })
  assert.equal(send.length, 3)
  let asked = 0
  const pool = Object.assign(
    ((...question: Parameters<Pool>) => {
      asked++
      return sql(...question)
    }) as Pool,
    sql,
  )
  const { putOff } = createInHand({
    pool,
    slots: 9,
    closing: new AbortController().signal,
    log: createLog('silent'),
  })
  await Promise.all(send.map((claim) => putOff(claim, new Outdated())))
  assert.equal((await sql`select from waybill.deliveries where held`).length, 3)
  assert.equal(asked, 1)
  assert.deepEqual([...(await sql`select count::int from waybill.usage where metric = 'attempts'`)], [{ count: 0 }])
  await assertBooks(sql)
})
