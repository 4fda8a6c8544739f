import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createAttempts } from '../../src/flow/attempts.ts'
import type { Claim } from '../../src/flow/claim.ts'
import { createInHand } from '../../src/flow/in-hand.ts'
import { createLanes, type Lanes } from '../../src/flow/lanes/lanes.ts'
import { createLog } from '../../src/log.ts'

/** Makes `count` attempts of one endpoint, whose lane says what `told` does; resolves, once all are over, with how often room was told of. */
async function make(
  count: number,
  told: Partial<Lanes>,
  {
    held = false,
    look = () => {},
    startAt = null as number | null,
    caughtUp = undefined as Promise<void> | undefined,
    freeSlot = () => {},
  } = {},
): Promise<number> {
  const log = createLog('silent')
  const { signal } = new AbortController()
  const pool = async () => []
  const inHand = createInHand({ pool: pool as never, slots: count, closing: signal, log })
  let rooms = 0
  const attempts = createAttempts({
    lanes: { ...createLanes({ cap: count, slots: count }), ...told },
    inHand,
    async deliver() {
      look()
      return { settled: true, nextAttemptAt: null, held, caughtUp }
    },
    onRoom: () => rooms++,
    closing: signal,
    log,
  })
  for (let nth = 0; nth < count; nth++) {
    const claim = { tenantId: 'acme', endpointId: 'one', startAt, hand: null, underWay: null } as unknown as Claim
    inHand.take(claim, () => freeSlot)
    attempts.start(claim)
  }
  await Promise.all([...attempts.all])
  return rooms
}

test('more is released as soon as an endpoint that has some held has room for it, and for no other reason', async () => {
  for (const [held, isRoomy, startAt, early, rooms] of [
    [true, true, null, 1, 1],
    [true, false, null, 0, 0],
    [false, true, null, 0, 0],
    [true, true, 0, 0, 1],
    // It is paced, and more is released when their moments come.
    [true, true, 0, 1, 0],
  ] as const)
    assert.equal(await make(1, { isRoomy: () => isRoomy, early: () => early }, { held, startAt }), rooms)
})

test('of an endpoint that has finished nothing lately, five attempts begin in a turn of the event loop; of another, any number', async () => {
  for (const [pace, most] of [
    [0, 5],
    [1, 20],
  ] as const) {
    let turn = 0
    const begun: number[] = []
    const count = () => {
      turn++
      if (begun.length < 20) setImmediate(count)
    }
    setImmediate(count)
    await make(20, { pace: () => pace }, { look: () => begun.push(turn) })
    const together = [...Map.groupBy(begun, (nth) => nth).values()]
    assert.equal(Math.max(...together.map(({ length }) => length)), most)
  }
})

test('an attempt that is late for its time slot by more than half a second is not made', async (t) => {
  const now = Math.ceil(performance.now())
  t.mock.method(performance, 'now', () => now)
  for (const [late, made] of [
    [500, 1],
    [501, 0],
  ] as const) {
    let attempts = 0
    await make(1, {}, { look: () => attempts++, startAt: now - late })
    assert.equal(attempts, made)
  }
})

test('an attempt that has failed has no slot while it is caught up with, but is not over before', async () => {
  const { promise: caughtUp, resolve } = Promise.withResolvers<void>()
  const { promise: isFree, resolve: freeSlot } = Promise.withResolvers<void>()
  let isOver = false
  const made = make(1, {}, { caughtUp, freeSlot }).then(() => {
    isOver = true
  })
  await isFree
  await new Promise((resolve) => setImmediate(resolve))
  assert.equal(isOver, false)
  resolve()
  await made
})
