import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createSpread } from '../../src/flow/spread.ts'

test('failures that come all at once, or no faster than they can be retried, make no retry later', () => {
  let now = 0
  const spread = createSpread({ clock: () => now })
  for (let n = 0; n < 1000; n++) assert.equal(spread('a'), 0)
  for (; now < 60_000; now += 2) assert.ok(spread('a') <= 1)
})

test('what a tenant fails beyond that is retried 500 a second, and nobody else’s retry is later for it', () => {
  let now = 0
  const spread = createSpread({ clock: () => now })
  const waits: number[] = []
  for (; now < 10_000; now++) waits.push(now / 1000 + spread('storm'))
  const perSecond = Map.groupBy(waits, (due) => Math.floor(due)).values()
  const most = Math.max(...perSecond.map((of) => of.length).drop(3))
  assert.ok(most <= 650, `${most} in one second`)
  assert.ok(waits.at(-1)! > 17, 'the last of 10,000')
  assert.equal(spread('calm'), 0)
  now += 60_000
  assert.equal(spread('storm'), 0, 'once it is over')
})

test('what receivers ask to have at one moment comes 500 a second from then on, and no sooner', () => {
  let now = 0
  const spread = createSpread({ clock: () => now })
  const dues: number[] = []
  // For ten minutes, until ten minutes later.
  for (; now < 600_000; now += 10) {
    const asked = 1200 - Math.floor(now / 1000)
    const wait = spread('storm', asked)
    assert.ok(wait >= asked)
    dues.push(now / 1000 + wait)
  }
  const perSecond = Map.groupBy(dues, (due) => Math.floor(due)).values()
  const most = Math.max(...perSecond.map((of) => of.length))
  assert.ok(most <= 2100, `${most} in one second`)
  assert.ok(Math.max(...dues) > 1315, 'the last of 60,000')
  assert.ok(spread('storm') <= 1, 'what fails now')
  assert.equal(spread('calm', 1200), 1200)
})

test('that a receiver asks to be tried later makes no retry of the tenant’s others later', () => {
  let now = 0
  const spread = createSpread({ clock: () => now })
  for (; now < 240_000; now += 333) {
    assert.equal(spread('a', 60), 60)
    assert.equal(spread('a', (now / 333) % 60), (now / 333) % 60)
    assert.equal(spread('a'), 0, `after ${now} ms`)
  }
})

test('at a pace of a few a second it is kept, too', () => {
  const now = 0
  const spread = createSpread({ perSecond: 2.5, clock: () => now })
  for (let n = 0; n < 1000; n++) assert.ok(spread('a') <= 1)
  let last = 0
  for (let n = 0; n < 1000; n++) last = spread('a')
  assert.ok(last >= 399 && last <= 401, `${last} s`)
})

test('at a slower pace, what comes all at once is not later, and the rest comes at that pace', () => {
  let now = 0
  const spread = createSpread({ perSecond: 40, clock: () => now })
  for (let n = 0; n < 1000; n++) assert.ok(spread('a') <= 1)
  let last = 0
  for (let n = 0; n < 1000; n++) last = spread('a')
  assert.ok(last >= 24 && last <= 26, `${last} s`)
  now += 60_000
  assert.equal(spread('a'), 0)
})

test('no retry is later than asked by more than a day', () => {
  const spread = createSpread({ perSecond: 0.5, clock: () => 0 })
  let last = 0
  for (let n = 0; n < 100_000; n++) last = spread('a', 60)
  assert.equal(last, 60 + 86_400)
})
