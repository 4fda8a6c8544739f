import assert from 'node:assert/strict'
import { suite, type TestContext, test } from 'node:test'
import type { Kind } from '../../src/flow/claim.ts'
import { startDispatcher } from '../../src/flow/dispatch.ts'
import { createLog } from '../../src/log.ts'
import { waitFor } from '../support/wait.ts'

const log = createLog('silent')

/** The machine may stand still for a moment, but not each time; without being woken, the dispatcher takes half a second each time. */
const assertAtOnce = (waits: number[]) => assert.ok(Math.min(...waits) < 250, `it took ${waits.join(', ')} ms`)

/** A queue in memory with so many of each kind; what is claimed is in hand until the test ends it. */
function start(
  t: TestContext,
  waiting: Record<Kind, number>,
  { slots = 80, keep = true, worthClaiming = () => Infinity, tooMany = (): number => 0 } = {},
) {
  const ends: { kind: Kind; end: () => void }[] = []
  const seen = { most: 0, fetches: 0, passing: 0, asked: { first: [] as number[], retry: [] as number[] } }
  let occupyOne = () => () => {}
  const loop = startDispatcher({
    slots,
    log,
    worthClaiming,
    tooMany,
    async fetch(kind, { max, mayWait, occupy }) {
      occupyOne = () => occupy('acme')
      seen.fetches++
      if (!mayWait) seen.passing++
      seen.asked[kind].push(max)
      await new Promise((resolve) => setImmediate(resolve))
      const found = Math.min(max, waiting[kind])
      waiting[kind] -= found
      for (let n = 0; n < found; n++) if (keep) ends.push({ kind, end: occupy('acme') })
      seen.most = Math.max(seen.most, ends.length)
      return waiting[kind] > 0
    },
  })
  const inHand = (kind: Kind) => ends.filter((one) => one.kind === kind).length
  const end = (count: number) => {
    for (const one of ends.splice(0, count)) one.end()
  }
  /** As what has waited takes a slot. */
  const take = () => ends.push({ kind: 'first', end: occupyOne() })
  t.after(loop.stop)
  return { loop, ends, seen, inHand, end, take }
}

suite('the dispatcher', () => {
  test('never has more in hand than there are slots, and refills them as they are freed', async (t) => {
    const { ends, seen, end } = start(t, { first: 1000, retry: 0 })
    await waitFor(() => ends.length === 80)
    end(30)
    await waitFor(() => ends.length === 80)
    assert.equal(seen.most, 80)
  })

  test('asks for no more first attempts at once than are worth claiming, and for as many retries as ever', async (t) => {
    const worth = { first: 7 }
    const { ends, seen, inHand } = start(t, { first: 14, retry: 100 }, { worthClaiming: () => worth.first })
    await waitFor(() => inHand('first') === 14 && inHand('retry') === 40)
    assert.deepEqual(seen.asked.first.slice(0, 2), [7, 7])
    assert.equal(seen.asked.retry[0], 20)
    assert.equal(ends.length, 54)

    const still = start(t, { first: 1000, retry: 0 }, { worthClaiming: () => 7, tooMany: () => 60 })
    await waitFor(() => still.seen.passing > 0)
    assert.equal(Math.max(...still.seen.asked.first), 7, 'nor where more wait than may')
  })

  test('fills the slots that retries may have, however many, without a pause', async (t) => {
    t.mock.timers.enable({ apis: ['setTimeout'] })
    const { inHand } = start(t, { first: 0, retry: 1000 }, { slots: 400 })
    for (let turns = 0; turns < 100; turns++) await new Promise((resolve) => setImmediate(resolve))
    t.mock.timers.reset()
    assert.equal(inHand('retry'), 200)
  })

  test('leaves as many slots free as too many wait, and uses them for what need not wait if that does not change', async (t) => {
    const waits: number[] = []
    for (let round = 1; round <= 3; round++) {
      const wait = { tooMany: 60 }
      const { ends, seen, end } = start(t, { first: 1000, retry: 0 }, { tooMany: () => wait.tooMany })
      await waitFor(() => ends.length >= 20)
      const began = performance.now()
      await waitFor(() => seen.passing > 0, { intervalMs: 5 })
      waits.push(performance.now() - began)
      assert.deepEqual(seen.asked.first, [19, 1, 60], 'one is kept for a look at the retries')
      await waitFor(() => ends.length === 80)

      wait.tooMany = 0
      const { passing } = seen
      end(80)
      await waitFor(() => ends.length === 80)
      assert.equal(seen.passing, passing, 'as there is room')

      wait.tooMany = 1
      end(1)
      await waitFor(() => seen.passing > passing)
      assert.equal(seen.asked.first.at(-1), 1)
    }
    assertAtOnce(waits)
  })

  test('does not look past what waits while slots are handed over to it', async (t) => {
    const { ends, seen, end, take } = start(t, { first: 1000, retry: 0 }, { tooMany: () => 60 })
    let handedOver = 0
    const handing = setInterval(() => {
      if (ends.length === 0) return
      end(1)
      take()
      handedOver++
    }, 1)
    t.after(() => clearInterval(handing))
    await waitFor(() => handedOver >= 200)
    assert.equal(seen.passing, 0)
  })

  test('tells of a backlog as long as a fetch leaves first attempts in the queue', async (t) => {
    const { loop, ends, end } = start(t, { first: 100, retry: 0 })
    await waitFor(() => ends.length === 80)
    assert.equal(loop.hasBacklog(), true)
    end(80)
    await waitFor(() => ends.length === 20)
    await waitFor(() => !loop.hasBacklog())
  })

  test('asks for more as soon as half of the slots are free, and for fewer only after a moment', async (t) => {
    const { ends, end } = start(t, { first: 1000, retry: 0 })
    await waitFor(() => ends.length === 80)
    // The moment.
    t.mock.timers.enable({ apis: ['setTimeout'] })
    const inHandSoon = async () => {
      for (let turns = 0; turns < 10; turns++) await new Promise((resolve) => setImmediate(resolve))
      return ends.length
    }
    end(39)
    assert.equal(await inHandSoon(), 41)
    end(1)
    assert.equal(await inHandSoon(), 80)
    end(1)
    assert.equal(await inHandSoon(), 79)
    t.mock.timers.tick(5)
    assert.equal(await inHandSoon(), 80)
  })

  test('gives retries their reserved share while both have a backlog', async (t) => {
    const { inHand, end } = start(t, { first: 100_000, retry: 100_000 })
    for (let round = 0; round < 50; round++) {
      end(20)
      await new Promise((resolve) => setTimeout(resolve, 20))
    }
    await waitFor(() => inHand('first') + inHand('retry') === 80)
    assert.ok(inHand('retry') >= 10 && inHand('retry') <= 21, `${inHand('retry')} of 80 are retries`)
  })

  test('one tenant’s retries get seven eighths of what the others leave, of that the same part if they are not preferred, and there is always room for one more tenant', async (t) => {
    const seen: number[][] = []
    const keptFromFirst: boolean[] = []
    const { stop } = startDispatcher({
      slots: 128,
      log,
      worthClaiming: () => Infinity,
      tooMany: () => 0,
      async fetch(kind, { occupy, isCrowding }) {
        if (kind === 'first') {
          if (seen.length > 0) keptFromFirst.push(isCrowding('a', false))
          return false
        }
        const fill = (tenantId: string, preferred = true) => {
          const ends = []
          while (!isCrowding(tenantId, preferred)) ends.push(occupy(tenantId))
          return ends
        }
        const plain = fill('a', false)
        seen.push([plain.length])
        const a = [...plain, ...fill('a')]
        const alone = ['b', 'c', 'd'].map((tenantId) => fill(tenantId).length)
        for (const end of a.splice(-20)) end()
        seen.push([a.length + 20, ...alone], [fill('a').length, fill('b').length])
        return false
      },
    })
    t.after(stop)
    await waitFor(() => keptFromFirst.length > 0)
    assert.deepEqual(seen.slice(0, 3), [[49], [56, 7, 1, 1], [12, 5]])
    assert.equal(keptFromFirst[0], false, 'a tenant’s first attempts are not kept back by its retries')
  })

  test('a slot is freed once, however often its end is told', async (t) => {
    const { ends, seen, end } = start(t, { first: 1000, retry: 0 })
    await waitFor(() => ends.length === 80)
    const [one] = ends
    end(1)
    one!.end()
    one!.end()
    await waitFor(() => ends.length === 80)
    await new Promise((resolve) => setTimeout(resolve, 100))
    assert.equal(seen.most, 80)
  })

  test('what is announced while all slots are taken is fetched as soon as one is free', async (t) => {
    const waiting = { first: 80, retry: 0 }
    const { loop, ends, end } = start(t, waiting)
    await waitFor(() => ends.length === 80)
    const waits: number[] = []
    for (let round = 1; round <= 5; round++) {
      // One look finds that there is no slot; the wake-up is not lost with it.
      waiting.first = 1
      loop.wake()
      await new Promise((resolve) => setTimeout(resolve, 50))
      const begun = Date.now()
      end(1)
      await waitFor(() => waiting.first === 0, { intervalMs: 5 })
      waits.push(Date.now() - begun)
    }
    assertAtOnce(waits)
  })

  test('a backlog of retries that have all the slots they may have is no reason to look for first attempts', async (t) => {
    const { seen, ends, inHand, end } = start(t, { first: 0, retry: 100_000 })
    await waitFor(() => inHand('retry') === 40)
    const before = seen.fetches
    await new Promise((resolve) => setTimeout(resolve, 100))
    assert.ok(seen.fetches - before <= 2, `${seen.fetches - before} fetches while there was nothing to do`)
    end(10)
    await waitFor(() => ends.length === 40)
  })

  test('retries that are announced are fetched at once, and others at the next look', async (t) => {
    const waiting = { first: 0, retry: 0 }
    const { loop, ends } = start(t, waiting)
    const waits: number[] = []
    for (let round = 1; round <= 5; round++) {
      waiting.retry = 1
      const begun = Date.now()
      loop.wake(true)
      await waitFor(() => ends.length === round, { intervalMs: 5 })
      waits.push(Date.now() - begun)
    }
    assertAtOnce(waits)
    waiting.retry = 1
    await waitFor(() => ends.length === 6)
  })

  test('asks for half as much after each fetch that fails, down to one, and for more again after each that does not', async (t) => {
    const asked: number[] = []
    const expected = [96, 48, 24, 12, 6, 3, 2, 1, 1, 2, 4, 8, 16, 32, 64, 96, 96]
    const { stop, wake } = startDispatcher({
      slots: 500,
      log,
      worthClaiming: () => Infinity,
      tooMany: () => 0,
      async fetch(kind, { max }) {
        await new Promise((resolve) => setImmediate(resolve))
        if (kind === 'retry' || asked.length === expected.length) return false
        asked.push(max)
        if (asked.length <= 8) throw new Error('it took too long')
        return true
      },
    })
    t.after(stop)
    const all = () => {
      // After a failure it waits for the next look, or to be woken.
      wake()
      return asked.length === expected.length
    }
    await waitFor(all, { intervalMs: 5 })
    assert.deepEqual(asked, expected)
  })

  test('a single slot finds first attempts that nobody has announced, and retries behind a backlog of first ones', async (t) => {
    const waiting = { first: 0, retry: 0 }
    const { ends, end, inHand } = start(t, waiting, { slots: 1 })
    // What it was told at its start is looked for by then.
    await new Promise((resolve) => setTimeout(resolve, 100))
    waiting.first = 1
    await waitFor(() => inHand('first') === 1)
    waiting.first = 100_000
    waiting.retry = 1
    const gotRetry = () => {
      const found = inHand('retry') === 1
      if (!found) end(ends.length)
      return found
    }
    await waitFor(gotRetry, { intervalMs: 5 })
  })

  test('a single slot takes at once what is announced, also when it is time for a look at the retries', async (t) => {
    const waiting = { first: 0, retry: 0 }
    const { loop, ends, end } = start(t, waiting, { slots: 1 })
    const late: number[] = []
    for (let round = 1; round <= 6; round++) {
      // Looks are half a second apart.
      await new Promise((resolve) => setTimeout(resolve, 300))
      const announced = performance.now()
      waiting.first = 1
      loop.wake()
      await waitFor(() => ends.length === 1, { intervalMs: 5 })
      if (performance.now() - announced > 250) late.push(round)
      end(1)
    }
    assert.ok(late.length <= 1, `rounds ${late} were late`)
  })

  test('the last free slot finds first attempts that nobody has announced', async (t) => {
    const waiting = { first: 1, retry: 0 }
    const { inHand } = start(t, waiting, { slots: 2 })
    await waitFor(() => inHand('first') === 1)
    // What it was told at its start is looked for by then.
    await new Promise((resolve) => setTimeout(resolve, 100))
    waiting.first = 1
    await waitFor(() => inHand('first') === 2)
  })

  test('what a fetch found and did not keep takes no slot', async (t) => {
    const waiting = { first: 5000, retry: 0 }
    const { seen } = start(t, waiting, { keep: false })
    await waitFor(() => waiting.first === 0)
    assert.equal(seen.most, 0)
  })
})
