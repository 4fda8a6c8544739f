import assert from 'node:assert/strict'
import { suite, test } from 'node:test'
import type { Claim, Standing } from '../../src/flow/claim.ts'
import { createLanes } from '../../src/flow/lanes/lanes.ts'

const SLOTS = 200

const claimOf = (endpointId: string, more: Partial<Claim> = {}) =>
  ({
    tenantId: endpointId,
    endpointId,
    deliveryId: 'same',
    atOnce: null,
    isProbed: false,
    standing: 'good',
    startAt: null,
    status: 'pending',
    ...more,
  }) as Claim

const lane = (tenantId: string, endpointId: string, standing: Standing = 'good', hasManyRetries = false) => ({
  tenantId,
  endpointId,
  standing,
  hasManyRetries,
  maxPerSecond: null,
})

const upTo = (wanted: number, { comeAtOnce = true } = {}) => ({ wanted, comeAtOnce })

/** Lanes with a clock that the test moves. */
function setUp(slots = SLOTS) {
  let now = 1_000_000
  const lanes = createLanes({ cap: 50, slots, clock: () => now })
  const started = new Map<string, Claim[]>()
  const begin = (claim: Claim) => started.set(claim.endpointId, [...(started.get(claim.endpointId) ?? []), claim])
  const admit = (endpointId: string, count: number, more: Partial<Claim> = {}) => {
    const verdicts = { start: 0, wait: 0, full: 0 }
    for (let n = 0; n < count; n++) {
      const claim = claimOf(endpointId, more)
      const verdict = lanes.admit(claim)
      verdicts[verdict === 'start' || verdict === 'full' ? verdict : 'wait']++
      if (verdict === 'start') begin(claim)
    }
    return verdicts
  }
  const finish = (endpointId: string, count: number) => {
    for (const claim of started.get(endpointId)?.splice(0, count) ?? []) {
      const next = lanes.next(claim)
      if (next !== undefined) begin(next)
    }
  }
  const tick = (ms: number) => {
    now += ms
  }
  /** An endpoint that finishes 2,000 a second, for a second. */
  const runFast = () => {
    for (let step = 0; step < 100; step++) {
      admit('fast', 20)
      tick(10)
      finish('fast', 20)
    }
  }
  /** As many endpoints of other tenants, which are quick, and have one attempt under way each. */
  const occupy = (count: number) => {
    const others = Array.from({ length: count }, (_, nth) => `other ${nth}`)
    const admitAll = () => assert.ok(others.every((one) => admit(one, 1).start === 1))
    admitAll()
    tick(20)
    for (const one of others) finish(one, 1)
    admitAll()
    tick(1)
    return others
  }
  return { lanes, started, admit, finish, tick, runFast, occupy }
}

suite('lanes', () => {
  test('one endpoint starts its cap, has some wait, and leaves half of the slots to others', () => {
    const { admit } = setUp()
    const verdicts = admit('hangs', 1000)
    assert.equal(verdicts.start, 50)
    assert.ok(verdicts.start + verdicts.wait <= SLOTS / 2, JSON.stringify(verdicts))
  })

  test('of a paced endpoint those are early whose moment has not come, and those that wait or arrive', () => {
    const { lanes, admit, tick } = setUp()
    const endpoint = { ...lane('paced', 'paced'), maxPerSecond: 100 }
    for (let nth = 0; nth < 10; nth++) admit('paced', 1, { startAt: 1_000_000 + nth * 10 })
    assert.equal(lanes.early(endpoint), 9)
    tick(45)
    assert.equal(lanes.early(endpoint), 5)
    assert.equal(lanes.reserve(endpoint, upTo(3)), 3)
    assert.equal(lanes.early(endpoint), 8)
    tick(200)
    assert.deepEqual(admit('paced', 45, { startAt: 0 }), { start: 40, wait: 5, full: 0 })
    assert.equal(lanes.early(endpoint), 5)
  })

  test('more is released for a paced endpoint whenever it has room, for another when half of that is free', () => {
    const { lanes, admit } = setUp()
    for (const [endpointId, maxPerSecond, released] of [
      ['paced', 100, 5],
      ['other', null, 0],
    ] as const) {
      assert.equal(admit(endpointId, 30).start, 30)
      assert.equal(lanes.reserve({ ...lane(endpointId, endpointId), maxPerSecond }, upTo(5)), released, endpointId)
    }
  })

  test('what waits for an endpoint that hangs is given up after a moment, and nothing more waits', () => {
    const { lanes, admit, tick } = setUp()
    const { wait } = admit('hangs', 1000)
    assert.equal(lanes.takeStale().length, 0)
    tick(301)
    assert.equal(lanes.takeStale().length, wait)
    assert.equal(lanes.busy('hangs'), 50)
    assert.deepEqual(admit('hangs', 10), { start: 0, wait: 0, full: 10 })
  })

  test('each endpoint that hangs takes less than the one before, so that there is room for one more', () => {
    const { lanes, admit, tick } = setUp()
    let inHand = 0
    for (let nth = 0; nth < 12; nth++) {
      admit(`hangs ${nth}`, 100)
      tick(301)
      lanes.takeStale()
      inHand = Array.from({ length: nth + 1 }, (_, n) => lanes.busy(`hangs ${n}`)).reduce((a, b) => a + b)
      assert.ok(inHand < SLOTS - 4, `${inHand} slots are stuck after ${nth + 1}`)
    }
    assert.equal(admit('healthy', 1).start, 1)
  })

  test('a tenant with hundreds of endpoints that hang leaves half of the slots to others', () => {
    const { lanes, admit } = setUp()
    let started = 0
    for (let nth = 0; nth < 500; nth++) started += admit(`hangs ${nth}`, 1, { tenantId: 'hostile' }).start
    assert.equal(started, SLOTS / 2)
    assert.equal(lanes.reserve(lane('hostile', 'one more'), upTo(1)), 0)
    assert.equal(admit('healthy', 1).start, 1)
  })

  test('what is released of a slow endpoint has a slot on arrival, whatever comes before it', () => {
    for (const comeAtOnce of [true, false]) {
      const { lanes, admit, finish, tick } = setUp()
      admit('slow', 20)
      lanes.noteHeld(new Set(['slow']), { all: true })
      let sent = 20
      for (let nth = 0; nth < 20; nth++) {
        tick(600)
        finish('slow', 10)
        const count = lanes.reserve(lane('slow', 'slow'), upTo(50, { comeAtOnce }))
        tick(50)
        const { start } = admit('slow', count)
        assert.equal(start, count)
        sent += count
      }
      assert.ok(sent > 150, `${sent} were sent`)
    }
  })

  test('of what stands in the queue, no more is released for one tenant’s endpoints than twice the slots', () => {
    const { lanes, tick } = setUp()
    let count = 0
    for (let nth = 0; nth < 500; nth++) {
      count += lanes.reserve(lane('one', `held ${nth}`), upTo(64, { comeAtOnce: false }))
      if (nth % 10 === 0) tick(1)
    }
    assert.equal(count, 2 * SLOTS)
    assert.ok(lanes.reserve(lane('another', 'other'), upTo(64, { comeAtOnce: false })) > 0)
    tick(501)
    assert.ok(lanes.reserve(lane('one', 'one more'), upTo(64, { comeAtOnce: false })) > 0)
  })

  for (const [standing, started, why] of [
    ['good', 150, 'a quarter of the slots are likely to be left soon, and half of all may be stuck'],
    ['unsure', 150, 'of new ones likewise'],
    ['failing', 100, 'but nobody knows when one that fails answers'],
  ] as const)
    test(`where the worker goes on finishing attempts, a tenant’s ${standing} endpoints that have no pace start ${started} at once`, () => {
      const { lanes, admit, runFast, tick } = setUp()
      runFast()
      let count = 0
      const burst = (name: string) => {
        for (let nth = 0; nth < 500; nth++) {
          count += admit(`${name} ${nth}`, 1, { tenantId: 'burst', standing }).start
          if (nth % 10 === 0) tick(1)
        }
      }
      burst('first')
      assert.equal(count, started, why)
      // Those that hang are known by then.
      tick(301)
      lanes.takeStale()
      burst('second')
      assert.equal(count, started)
      assert.equal(admit('well', 1).start, 1)
      tick(1)
      assert.equal(admit('new', 1, { standing: 'unsure' }).start, 1)
    })

  test('of a tenant that had no room for one, as many are worth claiming for a moment as it has room for, and eight at least', () => {
    const { lanes, admit, finish, tick } = setUp()
    const burst = (name: string, count: number) => {
      const ofOne = Array.from({ length: count }, (_, nth) => `${name} ${nth}`)
      return ofOne.filter((one) => admit(one, 1, { tenantId: 'burst' }).start === 1)
    }
    assert.equal(lanes.worthClaiming(), Infinity)
    const started = burst('first', SLOTS / 2)
    assert.equal(lanes.worthClaiming(), Infinity)
    burst('second', 1)
    tick(1)
    assert.equal(lanes.worthClaiming(), 8)
    for (const one of started) finish(one, 1)
    tick(1)
    const room = lanes.worthClaiming()
    assert.ok(room >= 90 && room < SLOTS, `${room} are worth claiming`)
    tick(99)
    assert.equal(lanes.worthClaiming(), Infinity)
    assert.equal(burst('third', SLOTS).length, room)
  })

  test('where there was no room for a tenant’s, any number are worth claiming as soon as another’s first attempt starts', () => {
    const { lanes, admit, tick } = setUp()
    for (let nth = 0; nth < SLOTS; nth++) admit(`retried ${nth}`, 1, { tenantId: 'retries', status: 'retrying' })
    tick(1)
    assert.equal(lanes.worthClaiming(), Infinity, 'that there was none for retries says nothing of first attempts')
    for (let nth = 0; nth < SLOTS; nth++) admit(`burst ${nth}`, 1, { tenantId: 'burst' })
    tick(1)
    assert.equal(lanes.worthClaiming(), 8)
    admit('retry of another', 1, { status: 'retrying' })
    assert.equal(lanes.worthClaiming(), 8)
    admit('of another', 1)
    assert.equal(lanes.worthClaiming(), Infinity)
  })

  test('of a tenant that leaves no slot for a twentieth of a second, any number are worth claiming, as they may hang', () => {
    const { lanes, admit, tick } = setUp()
    const burst = (name: string) => {
      for (let nth = 0; nth < SLOTS; nth++) admit(`${name} ${nth}`, 1, { tenantId: 'burst' })
      tick(1)
    }
    burst('first')
    assert.equal(lanes.worthClaiming(), 8)
    tick(40)
    burst('second')
    assert.equal(lanes.worthClaiming(), 8)
    tick(10)
    assert.equal(lanes.worthClaiming(), Infinity)
  })

  test('of a tenant whose quick endpoints have all that it may have, as many are worth claiming as may wait for that', () => {
    const { lanes, admit, finish, tick } = setUp()
    const all = Array.from({ length: 400 }, (_, nth) => `quick ${nth}`)
    const begin = (some: string[]) => some.map((one) => admit(one, 1, { tenantId: 'burst' }))
    for (let nth = 0; nth < 400; nth += 50) {
      begin(all.slice(nth, nth + 50))
      tick(10)
      for (const one of all.slice(nth, nth + 50)) finish(one, 1)
    }
    const most = (SLOTS * 7) / 8
    begin(all.slice(0, 2 * most))
    assert.equal(lanes.worthClaiming(), Infinity)
    assert.deepEqual(begin(all.slice(2 * most, 2 * most + 1)), [{ start: 0, wait: 0, full: 1 }])
    assert.equal(lanes.worthClaiming(), 8)
    // Others that wait take their slots.
    for (const one of all.slice(0, 20)) finish(one, 1)
    tick(1)
    assert.equal(lanes.worthClaiming(), 20)
  })

  test('what is released to stand in the queue keeps no slot from those that come before', () => {
    for (const comeAtOnce of [true, false]) {
      const { lanes, admit } = setUp()
      const names = Array.from({ length: 20 }, (_, nth) => `held ${nth}`)
      const released = names.map((name) => lanes.reserve(lane(name, name), upTo(5, { comeAtOnce })))
      assert.ok(released.every((count) => count > 0))
      const first = admit('new', 1000).start
      assert.equal(first, comeAtOnce ? 25 : 50, `${first} of the new one start`)
    }
  })

  for (const [standing, most] of [
    ['good', SLOTS],
    ['unsure', (SLOTS * 7) / 8],
    ['failing', (SLOTS * 7) / 8],
  ] as const)
    test(`tenants whose ${standing} endpoints were all quick, and begin to hang at once, leave slots to others’ that are new`, () => {
      const { lanes, admit, finish, tick } = setUp()
      const hostile = Array.from({ length: 100 }, (_, nth) => [`turns ${nth}`, `hostile ${nth % 2}`] as const)
      let started = 0
      const admitAll = (count: number) => {
        for (const [one, tenantId] of hostile) started += admit(one, count, { tenantId, standing }).start
      }
      for (let step = 0; step < 100; step++) {
        admitAll(1)
        tick(10)
        for (const [one] of hostile) finish(one, 1)
      }
      started = 0
      admitAll(50)
      assert.ok(started > (most * 7) / 8 && started < most, `they take ${started} of ${most}`)
      tick(1500)
      lanes.takeStale()
      assert.equal(admit('new', 1, { standing: 'unsure' }).start, 1)
      tick(1)
      assert.equal(admit('well', 1).start, 1)
    })

  for (const [standing, most] of [
    ['good', (SLOTS * 7) / 8],
    ['unsure', (SLOTS * 3) / 4],
    ['failing', (SLOTS * 3) / 4],
  ] as const)
    test(`one tenant’s ${standing} endpoints take ${most} of ${SLOTS} slots, however quick they are`, () => {
      const { admit, finish, tick } = setUp()
      const all = Array.from({ length: SLOTS }, (_, nth) => `quick ${nth}`)
      const begin = (some: string[]) => some.map((one) => admit(one, 1, { tenantId: 'one', standing }).start)
      for (let step = 0; step < 20; step++) {
        const some = all.slice((step % 4) * 50, ((step % 4) + 1) * 50)
        begin(some)
        tick(10)
        for (const one of some) finish(one, 1)
      }
      assert.equal(
        begin(all).reduce((a, b) => a + b),
        most,
      )
    })

  test('a worker is strained once half of its slots hang, and then keeps some from what fails', () => {
    for (const [hanging, starts] of [
      [SLOTS / 2 - 1, 1],
      [SLOTS / 2, 0],
    ] as const) {
      const { lanes, admit, tick } = setUp()
      for (let nth = 0; nth < hanging; nth++) admit(`hangs ${nth}`, 1, { standing: 'failing' })
      tick(1001)
      lanes.takeFree()
      tick(1)
      assert.equal(admit('fails', 1, { standing: 'failing' }).start, starts)
    }
  })

  test('what is on its way to a quick endpoint keeps nothing from being released for its tenant’s others', () => {
    const { lanes, tick, runFast } = setUp()
    runFast()
    assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(500, { comeAtOnce: false })), 500)
    tick(1)
    assert.ok(lanes.reserve(lane('fast', 'other'), upTo(10, { comeAtOnce: false })) > 0)
  })

  for (const slots of [2, 4])
    test(`an endpoint that is quick gets all slots of a worker with ${slots}`, () => {
      const { admit, finish, tick } = setUp(slots)
      for (let step = 0; step < 10; step++) {
        admit('alone', 1)
        tick(10)
        finish('alone', 1)
      }
      assert.equal(admit('alone', slots).start, slots)
    })

  test('while endpoints of hundreds of tenants hang, those that are well have slots of their own, and a failing one gets its turn', () => {
    const { lanes, admit, finish, tick } = setUp()
    /** Has each of many tenants' endpoints admitted once, and returns how many attempts were started. */
    const admitAll = (name: string, standing: Standing) => {
      const each = Array.from({ length: 300 }, (_, nth) => admit(`${name} ${nth}`, 1, { standing }))
      return each.filter(({ start }) => start > 0).length
    }
    assert.equal(
      admitAll('hangs', 'unsure'),
      300,
      'nobody knows yet, and the dispatcher claims no more than there are slots',
    )
    tick(1001)
    assert.equal(admitAll('new', 'unsure'), 0)
    assert.equal(admit('well', 1, { standing: 'good' }).start, 1)
    for (let nth = 0; nth < 300; nth++) finish(`hangs ${nth}`, 1)
    tick(10_000)
    // They have timed out, and come again.
    assert.equal(admitAll('hangs', 'failing'), SLOTS / 4)
    assert.equal(lanes.reserve(lane('one', 'failing', 'failing'), upTo(1)), 0)
    assert.equal(admitAll('new', 'unsure'), (SLOTS * 5) / 8)
    assert.equal(lanes.reserve(lane('one', 'other', 'unsure'), upTo(1)), 0)
    assert.equal(lanes.reserve(lane('one', 'well'), upTo(1)), 1)
    finish('hangs 0', 1)
    tick(1)
    assert.equal(lanes.reserve(lane('one', 'failing', 'failing'), upTo(10)), 1)
    // Half a minute after the last of them it is over.
    for (let nth = 0; nth < 300; nth++) for (const name of ['hangs', 'new']) finish(`${name} ${nth}`, 1)
    tick(31_000)
    assert.equal(admitAll('hangs', 'failing'), 300)
  })

  test('endpoints that fail at once, or are new, are not held back', () => {
    const { admit, finish, tick } = setUp()
    for (let round = 0; round < 20; round++) {
      for (let nth = 0; nth < 180; nth++) assert.equal(admit(`fails ${nth}`, 1, { standing: 'failing' }).start, 1)
      tick(900)
      for (let nth = 0; nth < 180; nth++) finish(`fails ${nth}`, 1)
    }
  })

  test('an endpoint that answers quickly gets its slots in a strained worker, whether its last attempt failed or not', () => {
    const { admit, tick, runFast } = setUp()
    for (let nth = 0; nth < SLOTS / 2; nth++) admit(`hangs ${nth}`, 1, { standing: 'failing' })
    tick(1001)
    runFast()
    assert.ok(admit('fast', 50, { standing: 'failing' }).start > 45)
  })

  test('attempts that a deadline has ended do not make their endpoints quick', () => {
    const { admit, finish, tick } = setUp()
    for (let nth = 0; nth < 300; nth++) admit(`${nth}`, 1, { tenantId: 'many' })
    tick(15_000)
    for (let nth = 0; nth < 300; nth++) finish(`${nth}`, 1)
    let again = 0
    for (let nth = 0; nth < 300; nth++) again += admit(`${nth}`, 2, { tenantId: 'many' }).start
    assert.ok(again > 0 && again <= SLOTS / 2, `${again} started anew`)
  })

  test('many may wait for an endpoint that keeps finishing, and no more than the cap are under way', () => {
    const { lanes, admit, tick, runFast } = setUp()
    runFast()
    assert.deepEqual(admit('fast', 200), { start: 50, wait: 150, full: 0 })
    tick(301)
    assert.equal(lanes.takeStale().length, 0, 'they are waited for, since it is fast')
  })

  test('a fast endpoint that begins to hang loses what waits within a second and a half', () => {
    const { lanes, admit, tick, runFast } = setUp()
    runFast()
    admit('fast', 200)
    let given = 0
    for (let ms = 0; ms < 1500; ms += 100) {
      tick(100)
      given += lanes.takeStale().length
    }
    assert.equal(given, 150)
  })

  /** A tenant one of whose endpoints answered so, one attempt after the other, then had none for `pauseMs`, while its others began to hang. */
  const afterPause = (answersMs: number[], pauseMs: number, betweenMs = 0) => {
    const { lanes, admit, finish, tick } = setUp()
    const more = { tenantId: 'one' }
    // Its lane is forgotten in a pause.
    const pause = (ms: number) => {
      for (const one of [ms - 1001, 1001]) {
        tick(one)
        lanes.takeStale()
      }
    }
    for (const ms of answersMs) {
      if (betweenMs > 0) pause(betweenMs)
      admit('seldom', 1, more)
      tick(ms)
      finish('seldom', 1)
    }
    pause(pauseMs)
    for (let nth = 0; nth < 200; nth++) admit(`hangs ${nth}`, 1, more)
    return () => admit('seldom', 1, more).start
  }

  test('an endpoint that was quick half a minute ago gets one slot beside others of its tenant that hang', () => {
    const start = afterPause([499], 29_000)
    assert.deepEqual([start(), start()], [1, 0])
    assert.equal(afterPause([499], 30_001)(), 0, 'that is too long ago')
    for (const betweenMs of [0, 2000]) {
      assert.equal(afterPause([499, 501], 2000, betweenMs)(), 0, 'it was slow since')
      assert.equal(afterPause([501, 499], 2000, betweenMs)(), 1)
    }
  })

  /** Endpoints that each finished an attempt at once, some time ago. */
  const afterQuick = (count: number, more: Partial<Claim> = {}) => {
    const { lanes, admit, finish, tick } = setUp()
    const all = Array.from({ length: count }, (_, nth) => `${nth}`)
    for (const one of all) {
      admit(one, 1, more)
      finish(one, 1)
    }
    tick(2000)
    lanes.takeStale()
    return { lanes, all, admit, tick }
  }

  test('an endpoint that was quick and hangs now counts among those that hang', () => {
    const more = { tenantId: 'one' }
    const { all, admit, tick } = afterQuick(SLOTS / 2, more)
    for (const one of all) assert.equal(admit(one, 1, more).start, 1)
    assert.equal(admit('new', 1, more).start, 1)
    tick(301)
    assert.equal(admit('newer', 1, more).start, 0)
  })

  test('an endpoint that failed quickly is not trusted: probes of hundreds take a quarter of the slots', () => {
    const { lanes, all } = afterQuick(400, { standing: 'failing' })
    const counts = all.map((one) => lanes.reserve(lane(one, one, 'failing'), upTo(1)))
    assert.equal(counts.filter((count) => count === 1).length, SLOTS / 4)
  })

  test('an endpoint that was quick is trusted with one of what is released for it, not with all that it has room for', () => {
    const { lanes, all, tick } = afterQuick(8)
    const counts = all.map((one) => {
      tick(2)
      return lanes.reserve(lane('one', one), upTo(64))
    })
    assert.deepEqual(counts.slice(3), [1, 1, 1, 1, 1])
  })

  test('an endpoint that has nothing in hand any more is forgotten, however busy the others are', () => {
    const { lanes, admit, finish, tick } = setUp()
    for (let nth = 0; nth < 500; nth++) {
      admit(`once ${nth}`, 1)
      tick(10)
      finish(`once ${nth}`, 1)
      lanes.takeStale()
    }
    const known: string[] = []
    lanes.noteHeld(Object.assign(new Set<string>(), { has: (endpointId: string) => known.push(endpointId) > 0 }), {
      all: true,
    })
    assert.ok(known.length > 0 && known.length < 200, `${known.length} are known`)
  })

  /** A tenant whose 112 quick endpoints have all slots that it may have of 128, and each one claim that waits. */
  function crowd() {
    const set = setUp(128)
    const busy = Array.from({ length: 112 }, (_, nth) => `busy ${nth}`)
    const admitAll = () => busy.map((one) => set.admit(one, 1, { tenantId: 'crowd' }))
    for (let step = 0; step < 10; step++) {
      admitAll()
      set.tick(20)
      for (const one of busy) set.finish(one, 1)
    }
    assert.ok([...admitAll(), ...admitAll()].every(({ full }) => full === 0))
    set.tick(20)
    return {
      ...set,
      busy,
      other: (endpointId: string, more = {}) => set.lanes.admit(claimOf(endpointId, { tenantId: 'crowd', ...more })),
      reserve: (endpointId: string, standing: Standing = 'good') =>
        set.lanes.reserve(lane('crowd', endpointId, standing), upTo(10)),
      waitingIn: (endpointId: string) => set.lanes.busy(endpointId) - (set.started.get(endpointId)?.length ?? 0),
    }
  }

  for (const atOnce of [null, 1])
    test(`endpoints whose tenant’s others have all its slots get the next ones that they leave (${atOnce ?? 'many'} at once)`, () => {
      const { started, busy, other, finish, waitingIn } = crowd()
      assert.equal(other('first', { atOnce }), 'tenant')
      assert.equal(other('first', { atOnce }), 'full', 'one of each endpoint waits')
      assert.equal(other('second', { atOnce }), 'tenant')
      finish(busy[0]!, 1)
      assert.equal(started.get('first')?.length, 1)
      finish(busy[1]!, 1)
      assert.equal(started.get('second')?.length, 1)
      assert.deepEqual([waitingIn(busy[0]!), waitingIn(busy[1]!), waitingIn(busy[2]!)], [1, 1, 1])
      finish('first', 1)
      assert.equal(started.get(busy[0]!)?.length, 0, 'where nothing waits, the slot may be another tenant’s')
      finish(busy[2]!, 1)
      assert.equal(started.get(busy[0]!)?.length, 1, 'who has left a slot gets one in turn')
    })

  test('what is released for an endpoint whose tenant’s others have all its slots waits for one', () => {
    const { started, busy, other, reserve, finish } = crowd()
    assert.equal(reserve('released'), 1)
    assert.equal(reserve('released'), 0)
    assert.equal(reserve(busy[0]!), 0, 'nor is more for one that is quick')
    finish(busy[0]!, 1)
    assert.equal(started.get(busy[0]!)?.length, 1, 'no slot waits for what is not here yet')
    assert.equal(other('released'), 'tenant')
    finish(busy[1]!, 1)
    assert.equal(started.get('released')?.length, 1)
  })

  test('as many endpoints of a tenant as have slots wait for one, and as many again for which something is released', () => {
    const { lanes, other, reserve, tick } = crowd()
    const all = (ask: (endpointId: string) => unknown) => Array.from({ length: 200 }, (_, nth) => ask(`${nth}`))
    const count = (verdicts: unknown[]) => verdicts.filter((one) => one === 'tenant' || one === 1).length
    assert.equal(count(all((one) => other(`new ${one}`))), 112)
    assert.equal(count(all((one) => reserve(`released ${one}`))), 112)
    lanes.takeStale()
    assert.equal(other('released 0'), 'tenant', 'its turn is kept for what is on its way')
    tick(501)
    lanes.takeStale()
    assert.equal(count(all((one) => reserve(`more ${one}`))), 111, 'what has not come in time has lost its turn')
  })

  test('an endpoint that has got a slot does not wait for one of its tenant’s others any more', () => {
    const { started, busy, other, reserve, finish, tick } = crowd()
    reserve('released')
    finish(busy[0]!, 1)
    finish(busy[0]!, 1)
    tick(1)
    assert.equal(other('released', { atOnce: 2 }), 'start')
    assert.equal(other('released', { atOnce: 2 }), 'tenant')
    finish(busy[1]!, 1)
    assert.equal(started.get(busy[1]!)?.length, 1)
  })

  test('an endpoint that waits for a slot of its tenant’s others, which hang, gets one of those that other tenants leave', () => {
    const { lanes, admit, finish, occupy } = setUp(128)
    const more = { tenantId: 'one' }
    admit('hangs', 2, more)
    const others = occupy(126)
    assert.equal(admit('waits', 1, more).wait, 1)
    for (const one of others.slice(0, 2)) finish(one, 1)
    assert.deepEqual(lanes.takeFree(), [], 'the last two slots are for tenants that have none')
    finish(others[2]!, 1)
    assert.equal(lanes.takeFree()[0]?.endpointId, 'waits')
    assert.deepEqual([lanes.takeFree(), lanes.takeWaiting()], [[], []])
  })

  test('an endpoint that waits for a slot of its tenant’s others gets one that was kept for what has not come', () => {
    const { lanes, admit, tick, occupy } = setUp(128)
    const more = { tenantId: 'one' }
    admit('hangs', 2, more)
    occupy(123)
    for (const [late, count] of [
      ['late', 2],
      ['late too', 1],
    ] as const)
      assert.equal(lanes.reserve(lane(late, late), upTo(count)), count)
    assert.equal(admit('waits', 1, more).wait, 1)
    tick(501)
    assert.equal(lanes.takeFree()[0]?.endpointId, 'waits')
  })

  for (const [how, most] of [
    ['together', 2],
    ['one at a time', 1],
  ] as const)
    test(`tenants whose endpoints wait for slots take turns with those that others leave ${how}`, () => {
      const { lanes, admit, finish, tick, occupy } = setUp(128)
      const tenants = ['one', 'two']
      for (const tenantId of tenants) admit(`hangs ${tenantId}`, 2, { tenantId })
      const others = occupy(124)
      for (const tenantId of tenants)
        for (const nth of [1, 2]) assert.equal(admit(`waits ${tenantId} ${nth}`, 1, { tenantId }).wait, 1)
      const left: string[] = []
      // The last two are for tenants that have none.
      for (const one of others.splice(0, 2)) finish(one, 1)
      for (let looks = 0; looks < 2 / most; looks++) {
        for (const one of others.splice(0, most)) finish(one, 1)
        tick(1)
        left.push(...lanes.takeFree().map(({ tenantId }) => tenantId))
      }
      assert.deepEqual(left, tenants)
    })

  test('an endpoint that waits for a slot of its tenant’s others gives up when they hang', () => {
    const { lanes, other, tick } = crowd()
    other('patient')
    tick(1201)
    assert.ok(lanes.takeStale().some(({ endpointId }) => endpointId === 'patient'))
    assert.equal(lanes.busy('patient'), 0)
  })

  test('endpoints that hang get no more than three quarters of the slots from others of their tenant, however quick those are', () => {
    const { started, busy, other, finish, admit, tick } = crowd()
    for (let nth = 0; nth < 160; nth++) {
      other(`hangs ${nth}`)
      // Several may wait already when the first slot is left.
      if (nth < 100) continue
      tick(20)
      for (const one of busy) {
        finish(one, 1)
        admit(one, 1, { tenantId: 'crowd' })
      }
    }
    const hanging = [...started].filter(([one, claims]) => one.startsWith('hangs') && claims.length > 0)
    assert.equal(hanging.length, 96)
  })

  for (const standing of ['unsure', 'failing'] as const)
    test(`an endpoint that is ${standing} gets a slot of its tenant’s others that are well`, () => {
      const { started, busy, other, finish } = crowd()
      assert.equal(other('one', { standing }), 'tenant')
      finish(busy[0]!, 1)
      assert.equal(started.get('one')?.length, 1)
    })

  test('endpoints that fail quickly get no more than three quarters of the slots from others of their tenant', () => {
    const { started, busy, other, finish, admit, tick } = crowd()
    const failing = busy.map((one) => `failing ${one}`)
    const lineUp = () => {
      for (const one of failing) other(one, { standing: 'failing' })
    }
    const round = () => {
      for (const one of busy) {
        finish(one, 1)
        admit(one, 1, { tenantId: 'crowd' })
      }
    }
    for (let step = 0; step < 40; step++) {
      lineUp()
      tick(10)
      round()
      for (const one of failing) finish(one, 1)
      round()
    }
    lineUp()
    tick(10)
    round()
    round()
    assert.equal(failing.filter((one) => started.get(one)?.length).length, 96)
  })

  test('of few slots a tenant’s endpoints do not take turns, so that other tenants’ need not wait for them', () => {
    const { admit, finish, tick } = setUp(127)
    const more = { tenantId: 'one' }
    const busy = Array.from({ length: 112 }, (_, nth) => `busy ${nth}`)
    for (let step = 0; step < 10; step++) {
      for (const one of busy) admit(one, 1, more)
      tick(20)
      if (step < 9) for (const one of busy) finish(one, 1)
    }
    assert.equal(admit('other', 1, more).full, 1)
  })

  test('an endpoint that takes one at a time has none waiting', () => {
    const { admit, finish } = setUp()
    assert.deepEqual(admit('ordered', 3, { atOnce: 1 }), { start: 1, wait: 0, full: 2 })
    finish('ordered', 1)
    assert.deepEqual(admit('ordered', 1, { atOnce: 1 }), { start: 1, wait: 0, full: 0 })
  })

  test('those that wait follow in order as others end, and the same delivery claimed twice is counted twice', () => {
    const { lanes } = setUp()
    const claims = ['a', 'b', 'a', 'c'].map((deliveryId) => claimOf('e', { deliveryId, atOnce: 2 }))
    assert.deepEqual(
      claims.map((claim) => lanes.admit(claim)),
      ['start', 'start', 'endpoint', 'endpoint'],
    )
    assert.equal(lanes.admit(claimOf('e', { atOnce: 2 }), { mayWait: false }), 'full')
    assert.equal(lanes.next(claims[0]!), claims[2])
    assert.equal(lanes.busy('e'), 3)
    assert.equal(lanes.next(claims[1]!), claims[3])
    assert.equal(lanes.next(claims[2]!), undefined)
    assert.equal(lanes.next(claims[3]!), undefined)
    assert.equal(lanes.busy('e'), 0)
  })

  test('a place that is kept counts until it is taken, or half a second long', () => {
    const { lanes, admit, tick } = setUp()
    assert.equal(lanes.reserve(lane('e', 'e'), upTo(40)), 40)
    assert.equal(lanes.isRoomy(lane('e', 'e')), false)
    admit('e', 10)
    assert.equal(lanes.busy('e'), 40)
    tick(501)
    assert.equal(lanes.busy('e'), 10)
    assert.equal(lanes.isRoomy(lane('e', 'e')), true)
  })

  test('of a quick endpoint as many are released at once as will not wait for long, which is more than there are slots', () => {
    const { lanes, finish, runFast, admit } = setUp(350)
    runFast()
    assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(5000)), 600)
    assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(5000)), 0, 'no more until half is free')
    admit('fast', 600)
    for (let times = 0; times < 3; times++) finish('fast', 50)
    assert.ok(lanes.reserve(lane('fast', 'fast'), upTo(5000)) > 0)
  })

  test('of one that finishes all that may be in hand before it has waited for long all are released, until it hangs', () => {
    const { lanes, admit, tick, runFast } = setUp(300)
    runFast()
    assert.equal(
      lanes.reserve(lane('fast', 'fast', 'good', true), upTo(5000)),
      600,
      'retries wait where they keep nobody waiting',
    )
    for (const wanted of [5000, 2000]) assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(wanted)), wanted)
    assert.equal(admit('hangs', 100).start, 50, 'this takes no slots from others')
    assert.deepEqual(admit('fast', 550), { start: 50, wait: 500, full: 0 })
    tick(1001)
    assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(5000)), 0)
  })

  test('for what is released of a quick endpoint slots are kept, but for no more than may be under way', () => {
    const { lanes, admit, tick, runFast } = setUp()
    runFast()
    assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(600)), 600)
    const more = { tenantId: 'fast' }
    assert.equal(admit('first', 1, more).start, 1, 'slots are kept for as many as may be under way')
    assert.deepEqual(admit('fast', 400), { start: 50, wait: 350, full: 0 })
    tick(1)
    const started = ['first', 'second', 'third'].map((other) => admit(other, 50, more).start)
    assert.ok(
      started.reduce((a, b) => a + b) > 75,
      `none is kept any more for those that are still to come: ${started}`,
    )
    assert.deepEqual(admit('fast', 200), { start: 0, wait: 200, full: 0 })
    tick(300)
    lanes.takeStale()
    assert.equal(lanes.busy('fast'), 600, 'none waits for too long')
  })

  test('of a quick endpoint that has not all the slots that it could use, no more are released than have one', () => {
    const { lanes, admit, runFast, occupy } = setUp()
    runFast()
    occupy(170)
    assert.equal(lanes.reserve(lane('fast', 'fast'), upTo(5000)), 27)
    assert.equal(admit('fast', 27).start, 27, 'the slots that were kept are no longer free, but theirs')
  })

  test('while deliveries of a slow endpoint are held, what is new takes half of its lane and leaves places that are kept', () => {
    const { lanes, admit, finish, tick } = setUp()
    admit('slow', 50)
    tick(2000)
    lanes.noteHeld(new Set(['slow']), { all: true })
    assert.deepEqual(admit('slow', 1), { start: 0, wait: 0, full: 1 })
    finish('slow', 40)
    tick(1)
    assert.deepEqual(admit('slow', 10), { start: 10, wait: 0, full: 0 })
    assert.equal(lanes.reserve(lane('slow', 'slow'), upTo(10)), 10)
    assert.equal(lanes.reserve(lane('slow', 'slow'), upTo(10)), 0, 'no more until half is free')
    assert.deepEqual(admit('slow', 20), { start: 10, wait: 0, full: 10 })
    lanes.noteHeld(new Set(), { all: false })
    assert.deepEqual(admit('slow', 1), { start: 0, wait: 0, full: 1 }, 'it may be among those that were not told')
    lanes.noteHeld(new Set(), { all: true })
    assert.deepEqual(admit('slow', 10), { start: 10, wait: 0, full: 0 })
  })

  test('places are kept for no more than all endpoints together have, and each that is kept is there', () => {
    const { lanes, admit } = setUp()
    const names = Array.from({ length: 12 }, (_, nth) => `held ${nth}`)
    const kept = names.map((name) => lanes.reserve(lane(name, name), upTo(1000)))
    assert.ok(kept.reduce((a, b) => a + b) < SLOTS - 4, `${kept}`)
    assert.deepEqual(
      names.map((name, nth) => admit(name, kept[nth] ?? 0).start),
      kept,
    )
    assert.equal(admit('healthy', 1).start, 1)
  })

  test('what is released for endpoints that fail takes a quarter of the slots, also where nothing hangs', () => {
    for (const comeAtOnce of [true, false]) {
      const { lanes, admit } = setUp()
      let kept = 0
      for (let nth = 0; nth < 300; nth++)
        kept += lanes.reserve(lane(`${nth}`, `${nth}`, 'failing'), upTo(1, { comeAtOnce }))
      assert.equal(kept, SLOTS / 4)
      assert.equal(lanes.reserve(lane('one', 'well'), upTo(1)), 1)
      assert.equal(admit('fails', 1, { standing: 'failing' }).start, 1, 'what is published meanwhile goes out')
    }
  })

  test('probes that come when nobody expects them any longer take but half as many more, and are held', () => {
    const { lanes, admit, tick } = setUp()
    const release = (name: string) =>
      Array.from({ length: 100 }, (_, nth) => `${name} ${nth}`).filter(
        (one) => lanes.reserve(lane(one, one, 'failing'), upTo(1)) > 0,
      )
    const probes: string[] = []
    for (const name of ['first', 'second', 'third']) {
      probes.push(...release(name))
      tick(501)
    }
    assert.equal(probes.length, (3 * SLOTS) / 4)
    const verdicts = probes.map((one) => admit(one, 1, { standing: 'failing', isProbed: true, atOnce: 1 }))
    assert.equal(verdicts.filter(({ start }) => start === 1).length, (3 * SLOTS) / 8)
    assert.equal(verdicts.filter(({ full }) => full === 1).length, (3 * SLOTS) / 8)
    assert.deepEqual(release('more'), [])
    assert.equal(admit('fails', 1, { standing: 'failing' }).start, 1, 'a retry that was not released')
  })

  test('what hangs for failing endpoints keeps others’ probes from being released only as far as it was released itself', () => {
    const { lanes, admit, tick } = setUp()
    const crowd = { tenantId: 'crowd', standing: 'failing' } as const
    // Half of the slots would strain the worker. Those of ordered endpoints that wait for a retry are not held.
    for (let nth = 1; nth < SLOTS / 2; nth++)
      assert.equal(admit(`hangs ${nth}`, 1, { ...crowd, atOnce: nth % 2 === 0 ? 1 : null }).start, 1)
    tick(500)
    let released = 0
    for (let nth = 0; nth < 300; nth++) {
      const name = `probed ${nth}`
      released += lanes.reserve(lane(name, name, 'failing'), upTo(1))
      // The last ones come later than their places are kept.
      if (nth === 20) tick(501)
      if (released > nth) assert.equal(admit(name, 1, { standing: 'failing', atOnce: 1, isProbed: true }).start, 1)
    }
    assert.equal(released, SLOTS / 4)
    tick(2)
    assert.equal(lanes.reserve(lane('one more', 'one more', 'failing'), upTo(1)), 0)
  })

  test('places for a tenant’s endpoints are kept within its half, and given back', () => {
    const { lanes, tick } = setUp()
    const names = Array.from({ length: 12 }, (_, nth) => `held ${nth}`)
    const keep = () => names.map((name) => lanes.reserve(lane('one', name), upTo(1000))).reduce((a, b) => a + b)
    assert.equal(keep(), SLOTS / 2)
    assert.equal(keep(), 0)
    for (const name of names) lanes.giveBack(lane('one', name), 1000)
    tick(1)
    assert.equal(keep(), SLOTS / 2)
  })

  test('a tenant whose endpoints hang in its half of the slots has no more released for them', () => {
    for (const standing of ['failing', 'unsure'] as const) {
      const { lanes, admit, tick } = setUp()
      for (let nth = 0; nth < 100; nth++) admit(`hangs ${nth}`, 1, { tenantId: 'crowd', standing })
      tick(501)
      assert.equal(lanes.reserve(lane('crowd', 'held', standing), upTo(1000)), 0)
      assert.notEqual(lanes.reserve(lane('another', 'another', standing), upTo(1000)), 0)
    }
  })

  test('what is held of a quick endpoint keeps nothing new from it', () => {
    const { lanes, admit, runFast } = setUp()
    runFast()
    lanes.noteHeld(new Set(['fast']), { all: true })
    assert.deepEqual(admit('fast', 200), { start: 50, wait: 150, full: 0 })
  })

  test('an endpoint that recovers gets no more at once than any other', () => {
    const lanes = createLanes({ cap: 1, slots: SLOTS })
    assert.equal(lanes.admit(claimOf('e', { atOnce: 2 })), 'start')
    assert.notEqual(lanes.admit(claimOf('e', { atOnce: 2 })), 'start')
  })

  test('one that has ended twice makes room for one other', () => {
    const lanes = createLanes({ cap: 1, slots: SLOTS })
    const [first, second, third] = [claimOf('e'), claimOf('e'), claimOf('e')]
    for (const claim of [first, second, third]) lanes.admit(claim)
    assert.deepEqual([lanes.next(first), lanes.next(first)], [second, undefined])
    assert.equal(lanes.next(second), third)
  })

  test('places that are kept one after the other are all there', () => {
    const { lanes, admit } = setUp()
    for (let n = 0; n < 2; n++) assert.equal(lanes.reserve(lane('e', 'e'), upTo(20)), 20)
    assert.equal(lanes.busy('e'), 40)
    lanes.noteHeld(new Set(['e']), { all: true })
    assert.deepEqual(admit('e', 41), { start: 40, wait: 0, full: 1 })
  })

  test('of what waits too long the newest are given up, so that the oldest go first', () => {
    const { lanes, admit, finish, tick } = setUp()
    for (let nth = 0; nth < 100; nth++) admit('slows', 1, { deliveryId: `${nth}` })
    tick(100)
    finish('slows', 10)
    tick(301)
    const stale = lanes.takeStale().map(({ deliveryId }) => Number(deliveryId))
    assert.ok(stale.length > 0 && stale.length < 40, `${stale.length} of 40`)
    assert.deepEqual(
      stale,
      stale.map((_, n) => 100 - stale.length + n),
    )
  })

  test('an attempt does not take longer for having waited for its moment, or for its turn', () => {
    const { lanes, admit, finish, tick } = setUp()
    admit('paced', 1, { startAt: 1_000_400 })
    for (let n = 0; n < 51; n++) admit('busy', 1)
    tick(450)
    finish('busy', 50)
    tick(450)
    finish('paced', 1)
    finish('busy', 1)
    tick(500)
    assert.deepEqual([lanes.pace(lane('paced', 'paced')), lanes.pace(lane('busy', 'busy'))], [1, 1])
  })

  test('nor does one for having waited for its moment in a slot of its tenant’s others', () => {
    const { lanes, busy, other, finish, tick } = crowd()
    assert.equal(other('paced', { startAt: 1_001_000 }), 'tenant')
    finish(busy[0]!, 1)
    tick(900)
    finish('paced', 1)
    assert.equal(lanes.pace(lane('crowd', 'paced')), 1)
  })

  test('what is released for a slow endpoint starts, also where another worker has kept the place for it', () => {
    const { lanes, admit, tick } = setUp()
    admit('slow', 30)
    tick(2000)
    lanes.noteHeld(new Set(['slow']), { all: true })
    assert.equal(admit('slow', 1, { startAt: 1_002_000 }).start, 1, 'in its time slot')
    assert.equal(admit('slow', 1, { atOnce: 40 }).start, 1, 'as it recovers')
    assert.equal(admit('slow', 1).start, 0)
  })

  test('on shutdown all that waits is given back', () => {
    const { lanes, admit } = setUp()
    const { wait } = admit('e', 70)
    assert.equal(lanes.takeWaiting().length, wait)
    assert.equal(lanes.takeWaiting().length, 0)
  })
})
