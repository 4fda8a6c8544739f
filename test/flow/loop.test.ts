import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setImmediate as turn } from 'node:timers/promises'
import { startLoop } from '../../src/flow/loop.ts'
import { createLog } from '../../src/log.ts'

async function wakeForTurns(loop: { wake(): void }): Promise<void> {
  for (let n = 0; n < 10; n++) {
    loop.wake()
    await turn()
  }
}

test('a run that failed is tried again after the idle time, however often it is woken, and stops at once', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  let runs = 0
  const loop = startLoop({
    name: 'test',
    idleMs: 500,
    log: createLog('silent'),
    async run() {
      runs++
      await turn()
      if (runs <= 2) throw new Error('no connection')
      return false
    },
  })
  t.after(loop.stop)
  const woken = () => wakeForTurns(loop).then(() => runs)
  assert.equal(await woken(), 1)
  t.mock.timers.tick(499)
  assert.equal(await woken(), 1)
  t.mock.timers.tick(1)
  assert.equal(await woken(), 2)
  t.mock.timers.tick(500)
  assert.ok((await woken()) > 3, 'one that does not fail is run each time')
  await loop.stop()
})

test('a loop that is woken while it runs goes on with one more run, and stopping it waits for the one under way', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const ends: (() => void)[] = []
  const run = () => new Promise<boolean>((resolve) => ends.push(() => resolve(false)))
  const loop = startLoop({ name: 'test', idleMs: 500, log: createLog('silent'), run })
  loop.wake()
  ends[0]!()
  await turn()
  assert.equal(ends.length, 2)
  ends[1]!()
  await turn()
  assert.equal(ends.length, 2, 'nobody has woken it since')
  loop.wake()
  await turn()
  let isStopped = false
  const stopping = loop.stop().then(() => {
    isStopped = true
  })
  await turn()
  assert.equal(isStopped, false)
  ends[2]!()
  await stopping
})

for (const [what, tookMs, restMs] of [
  ['at once', 0, 10],
  ['soon', 4, 6],
  ['late', 8, 8],
  ['very late', 100, 10],
] as const)
  test(`a loop whose run ends ${what} rests for ${restMs} ms of a pause of 10, however often it is woken`, async (t) => {
    let now = 0
    t.mock.method(performance, 'now', () => now)
    t.mock.timers.enable({ apis: ['setTimeout'] })
    let runs = 0
    const run = async () => {
      runs++
      now += tookMs
      return false
    }
    const loop = startLoop({ name: 'test', idleMs: 500, pauseMs: () => 10, log: createLog('silent'), run })
    const woken = () => wakeForTurns(loop).then(() => runs)
    assert.equal(await woken(), 1)
    t.mock.timers.tick(restMs - 1)
    assert.equal(await woken(), 1)
    t.mock.timers.tick(1)
    assert.equal(await woken(), 2)
    const stopping = loop.stop()
    t.mock.timers.tick(10)
    await stopping
  })

test('a loop that is stopped in its pause ends at once', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  let runs = 0
  const run = async () => {
    runs++
    return true
  }
  const loop = startLoop({ name: 'test', idleMs: 500, pauseMs: () => 60_000, log: createLog('silent'), run })
  await turn()
  await loop.stop()
  assert.equal(runs, 1)
})

test('a run that answers a time is followed by the next after that, or when woken', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  let runs = 0
  const loop = startLoop({
    name: 'test',
    idleMs: 500,
    log: createLog('silent'),
    run: async () => [20, 30][runs++] ?? false,
  })
  t.after(loop.stop)
  const after = async (ms: number) => {
    t.mock.timers.tick(ms)
    await turn()
    return runs
  }
  await turn()
  assert.deepEqual([runs, await after(19), await after(1), await after(29)], [1, 1, 2, 2])
  loop.wake()
  await turn()
  assert.deepEqual([runs, await after(499), await after(1)], [3, 3, 4])
  await loop.stop()
})
