import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Pool } from '../../src/db/open.ts'
import type { Claim, ClaimedJob, Kind } from '../../src/flow/claim.ts'
import { createInHand } from '../../src/flow/in-hand.ts'
import { createLanes } from '../../src/flow/lanes/lanes.ts'
import { createPlacing } from '../../src/flow/place.ts'
import { createLog } from '../../src/log.ts'

const SLOTS = 8

const claimOf = (more: Partial<Claim> = {}) =>
  ({
    tenantId: 'acme',
    endpointId: 'one',
    deliveryId: 'same',
    bundle: null,
    atOnce: null,
    standing: 'good',
    startAt: null,
    status: 'pending',
    withinQuota: true,
    hand: null,
    underWay: null,
    ...more,
  }) as Claim

/** Places what `fetch` is given; the database answers what puts claims away when the test says so. */
function setUp() {
  const log = createLog('silent')
  const answers: (() => void)[] = []
  const pool = (() => new Promise<unknown[]>((resolve) => answers.push(() => resolve([])))) as unknown as Pool
  const inHand = createInHand({ pool, slots: SLOTS, closing: new AbortController().signal, log })
  const lanes = createLanes({ cap: 1, slots: SLOTS })
  const claimed = { send: [] as Claim[], unsendable: [] as ClaimedJob[], obsolete: [] as ClaimedJob[] }
  const slots = { occupied: 0 }
  const { fetch } = createPlacing({
    pool,
    claim: async () => ({ ...claimed, more: false }),
    lanes,
    inHand,
    start: inHand.takeSlot,
    slots: SLOTS,
    log,
  })
  return {
    inHand,
    slots,
    answers,
    fetch: (kind: Kind, found: Partial<typeof claimed>, isCrowding = () => false) => {
      Object.assign(claimed, { send: [], unsendable: [], obsolete: [] }, found)
      const occupy = () => {
        slots.occupied++
        return () => void slots.occupied--
      }
      const how = { max: 9, thorough: false, mayWait: true, occupy, crowding: [], isCrowding }
      return fetch(kind, how)
    },
  }
}

test('a retry that waits for its endpoint has a slot meanwhile, and a first attempt has none but counts as waiting', async () => {
  for (const [kind, occupied] of [
    ['first', 1],
    ['retry', 2],
  ] as const) {
    const { slots, inHand, fetch } = setUp()
    await fetch(kind, { send: [claimOf(), claimOf()] })
    assert.equal(inHand.all().length, 2)
    assert.equal(slots.occupied, occupied)
  }
})

test('what its endpoint takes no more stays in hand until it is held', async () => {
  const { inHand, answers, fetch } = setUp()
  await fetch('first', { unsendable: [claimOf()] })
  assert.equal(inHand.all().length, 1)
  answers.shift()?.()
  await new Promise((resolve) => setImmediate(resolve))
  assert.deepEqual(inHand.all(), [])
})

test('no more is claimed while the database has not yet put away what four fetches have found and one more', async () => {
  const { answers, fetch } = setUp()
  for (let nth = 0; nth < 4; nth++) await fetch('first', { unsendable: [claimOf()] })
  let isOver = false
  const fifth = fetch('first', { unsendable: [claimOf()] }).then(() => {
    isOver = true
  })
  for (let turns = 0; turns < 10; turns++) await new Promise((resolve) => setImmediate(resolve))
  assert.equal(isOver, false)
  answers[2]?.()
  await fifth
})

test('what was counted against the month, and what was not, is given back apart', async () => {
  const { answers, fetch } = setUp()
  await fetch('retry', { send: [claimOf(), claimOf({ withinQuota: null }), claimOf()] }, () => true)
  await new Promise((resolve) => setImmediate(resolve))
  assert.equal(answers.length, 2)
})
