import assert from 'node:assert/strict'
import { after, type TestContext, test } from 'node:test'
import { DatabaseError } from 'pg'
import { createBatcher } from '../../src/flow/batch.ts'
import { connect, createDatabase } from '../support/database.ts'
import { waitFor } from '../support/wait.ts'

const { sql } = await createDatabase({ after })

/** Has the database cancel a statement. */
const takeTooLong = () =>
  sql.begin(async (tx) => {
    await tx`set local statement_timeout = 20`
    await tx`select pg_sleep(5)`
  })

/** A batcher that squares; `sizes` tells how its items were grouped, `hold` makes runs wait for `release`. */
function squaring({ max = 100, hold = false, patienceMs = 60_000 } = {}) {
  const sizes: number[] = []
  const waiting: (() => void)[] = []
  let running = 0
  let mostRunning = 0
  let unanswered = 0
  const batch = createBatcher<number, number>({
    max,
    patienceMs,
    run: async (items) => {
      sizes.push(items.length)
      mostRunning = Math.max(mostRunning, ++running)
      if (hold) await new Promise<void>((resolve) => waiting.push(resolve))
      running--
      return items.map((item) => item * item)
    },
  })
  const submit = (item: number) => {
    unanswered++
    return batch(item).finally(() => unanswered--)
  }
  /** Lets the run that has begun end, and waits until the next has begun, if any follows. */
  const release = async () => {
    for (const go of waiting.splice(0)) go()
    await waitFor(() => waiting.length > 0 || unanswered === 0, { intervalMs: 1 })
  }
  return { submit, sizes, release, mostRunning: () => mostRunning }
}

test('an item that comes alone is a batch of one', async () => {
  const { submit, sizes } = squaring()
  assert.equal(await submit(3), 9)
  assert.equal(await submit(4), 16)
  assert.deepEqual(sizes, [1, 1])
})

test('items that come together share a batch, and each gets its own result', async () => {
  const { submit, sizes } = squaring()
  assert.deepEqual(await Promise.all([1, 2, 3, 4].map(submit)), [1, 4, 9, 16])
  assert.deepEqual(sizes, [4])
})

test('a batch that is answered with too much or too little fails, since nobody can tell whose is whose', async () => {
  for (const results of [[1], [1, 2, 3]]) {
    const submit = createBatcher<number, number>({ max: 100, run: async () => results })
    const settled = await Promise.allSettled([submit(1), submit(2)])
    assert.deepEqual(
      settled.map(({ status }) => status),
      ['rejected', 'rejected'],
    )
  }
})

test('the next batch is under way before anybody learns how the last one went', async () => {
  const order: string[] = []
  const submit = createBatcher<number, number>({
    max: 1,
    run: async (items) => {
      order.push(`run ${items}`)
      return items
    },
  })
  await Promise.all([1, 2].map((item) => submit(item).then(() => order.push(`told ${item}`))))
  assert.deepEqual(order, ['run 1', 'run 2', 'told 1', 'told 2'])
})

test('what arrives while a batch runs is the next batch', async () => {
  const { submit, sizes, release } = squaring({ hold: true })
  const first = submit(1)
  await release()
  const rest = [2, 3, 4].map(submit)
  await release()
  await release()
  assert.deepEqual(await Promise.all([first, ...rest]), [1, 4, 9, 16])
  assert.deepEqual(sizes, [1, 3])
})

/**
 * A batcher whose items gather, unless three wait or a negative one comes. Until time is made to `pass`, it stands still, and what
 * gathers waits for ever. Runs wait for `gate`.
 */
function gathering(t: TestContext) {
  // A whole number: of others, what is left until a sum of them may be a little more than was added.
  let now = Math.ceil(performance.now())
  t.mock.method(performance, 'now', () => now)
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const batches: number[][] = []
  const gate = { promise: Promise.resolve() }
  const submit = createBatcher<number, number>({
    max: 4,
    gather: { ms: 10, enough: 3, isUrgent: (item) => item < 0 },
    run: async (items) => {
      batches.push(items)
      await gate.promise
      return items
    },
  })
  const pass = (ms: number) => {
    now += ms
    t.mock.timers.tick(ms)
  }
  return { submit, batches, gate, pass }
}
const BOUNDED = { timeout: 15_000 }
/** Long enough for a batch that does not wait to begin. */
async function moment(): Promise<void> {
  for (let turns = 0; turns < 5; turns++) await new Promise((resolve) => setImmediate(resolve))
}

test('items that gather share a batch, which begins some time after the one before it began', BOUNDED, async (t) => {
  const { submit, batches, pass } = gathering(t)
  assert.equal(await submit(1), 1)
  const second = submit(2)
  await moment()
  const third = submit(3)
  pass(9)
  await moment()
  assert.deepEqual(batches, [[1]])
  pass(1)
  assert.deepEqual(await Promise.all([second, third]), [2, 3])
  pass(10)
  assert.equal(await submit(4), 4)
  assert.deepEqual(batches, [[1], [2, 3], [4]])
})

test('items that gather wait no longer once they are enough', BOUNDED, async (t) => {
  const { submit, batches } = gathering(t)
  await submit(1)
  const early = [2, 3].map(submit)
  await moment()
  assert.deepEqual(batches, [[1]])
  await Promise.all([...early, submit(4)])
  assert.deepEqual(batches, [[1], [2, 3, 4]])
})

test('items gather no longer than until they are as many as the database has time for', BOUNDED, async (t) => {
  const { submit, batches, gate } = gathering(t)
  const held = Promise.withResolvers<void>()
  gate.promise = held.promise
  const early = Promise.allSettled([1, 2].map(submit))
  await moment()
  held.reject(Object.assign(new DatabaseError('too slow', 0, 'error'), { code: '57014' }))
  await early
  gate.promise = Promise.resolve()
  assert.equal(await submit(3), 3)
  assert.deepEqual(batches, [[1, 2], [3]])
})

test('an urgent item takes with it at once what has gathered', BOUNDED, async (t) => {
  const { submit, batches } = gathering(t)
  await submit(1)
  const early = submit(2)
  await moment()
  await Promise.all([early, submit(-3)])
  assert.deepEqual(batches, [[1], [2, -3]])
})

test('an urgent item that comes while a batch runs is in the next, at once', BOUNDED, async (t) => {
  const { submit, batches, gate } = gathering(t)
  const held = Promise.withResolvers<void>()
  gate.promise = held.promise
  const first = submit(1)
  await moment()
  const others = [2, -3].map(submit)
  held.resolve()
  await Promise.all([first, ...others])
  assert.deepEqual(batches, [[1], [2, -3]])
})

test('after a batch that took long, what waits is joined by what comes next', BOUNDED, async (t) => {
  const { submit, batches, gate, pass } = gathering(t)
  const held = Promise.withResolvers<void>()
  gate.promise = held.promise
  const first = submit(1)
  await moment()
  const second = submit(2)
  pass(20)
  const third = first.then(() => submit(3))
  held.resolve()
  await moment()
  assert.deepEqual(batches, [[1]])
  pass(4)
  assert.deepEqual(await Promise.all([first, second, third]), [1, 2, 3])
  assert.deepEqual(batches, [[1], [2, 3]])
})

test('what a full batch leaves over does not wait to gather', BOUNDED, async (t) => {
  const { submit, batches } = gathering(t)
  await Promise.all([1, 2, 3, 4, 5].map(submit))
  assert.deepEqual(batches, [[1, 2, 3, 4], [5]])
})

test('a batch holds at most the maximum, and one runs at a time', async () => {
  const { submit, sizes, release, mostRunning } = squaring({ max: 3, hold: true })
  const all = Promise.all(Array.from({ length: 10 }, (_, n) => submit(n)))
  for (let round = 0; round < 10; round++) await release()
  assert.deepEqual(
    await all,
    Array.from({ length: 10 }, (_, n) => n * n),
  )
  assert.ok(sizes.every((size) => size <= 3))
  assert.equal(mostRunning(), 1)
})

test('the items of a batch weigh at most so much together, and one that weighs more runs alone', async () => {
  const batches: number[][] = []
  const submit = createBatcher<number, number>({
    max: 100,
    maxWeight: 10,
    weigh: (item) => item,
    run: async (items) => {
      batches.push(items)
      return items
    },
  })
  await Promise.all([4, 6, 1, 30, 30, 10, 2].map(submit))
  assert.deepEqual(batches, [[4, 6], [1], [30], [30], [10], [2]])
})

test('who has waited for too long is rejected and not run, and those who came later are', async (t) => {
  let now = 0
  t.mock.method(performance, 'now', () => (now += 0.1))
  const { submit, sizes, release } = squaring({ hold: true, patienceMs: 30 })
  const first = submit(1)
  await new Promise((resolve) => setImmediate(resolve))
  const late = assert.rejects(submit(2), /waited too long/)
  now = 40
  const fresh = submit(3)
  await release()
  await late
  await waitFor(() => sizes.length === 2)
  await release()
  assert.deepEqual([await first, await fresh], [1, 9])
  assert.deepEqual(sizes, [1, 1])
})

test('who has waited because the process stood still is not rejected', async () => {
  const { submit, release } = squaring({ hold: true, patienceMs: 2000 })
  const first = submit(1)
  await new Promise((resolve) => setImmediate(resolve))
  const second = submit(2)
  const until = performance.now() + 3000
  while (performance.now() < until);
  await release()
  await release()
  assert.deepEqual([await first, await second], [1, 4])
})

test('a batch that the database was too slow for fails whole, and not one by one', async () => {
  let runs = 0
  const submit = createBatcher<number, number>({
    max: 100,
    run: async () => {
      runs++
      await takeTooLong()
      return []
    },
  })
  const results = await Promise.allSettled([submit(1), submit(2), submit(3)])
  assert.ok(results.every(({ status }) => status === 'rejected'))
  assert.equal(runs, 1)
})

test('after a batch that was too slow, half as many are tried, and more again when that succeeds', async () => {
  const sizes: number[] = []
  const submit = createBatcher<number, number>({
    max: 8,
    run: async (items) => {
      sizes.push(items.length)
      if (items.length > 2) await takeTooLong()
      return items
    },
  })
  const results = await Promise.allSettled(Array.from({ length: 20 }, (_, n) => submit(n)))
  assert.equal(results.filter(({ status }) => status === 'fulfilled').length, 4)
  assert.deepEqual(sizes, [8, 4, 2, 4, 2])
})

test('one item that was too slow by itself keeps nobody else from being tried', async () => {
  const sizes: number[] = []
  const submit = createBatcher<number, number>({
    max: 8,
    run: async (items) => {
      sizes.push(items.length)
      // What runs without an item would run so for ever.
      if (items.length === 0) await new Promise(() => {})
      if (sizes.length === 1) await takeTooLong()
      return items
    },
  })
  await assert.rejects(submit(1))
  void submit(2)
  await waitFor(() => sizes.length === 2)
  assert.deepEqual(sizes, [1, 1])
})

test('owners take turns: who brings one item does not wait for all that another has brought', async () => {
  const batches: string[][] = []
  const submit = createBatcher<string, string>({
    max: 4,
    owner: (item) => item[0] as string,
    run: async (items) => {
      batches.push(items)
      return items
    },
  })
  await Promise.all(['a1', 'a2', 'a3', 'a4', 'a5', 'a6', 'b1', 'b2', 'c1'].map(submit))
  assert.deepEqual(batches, [['a1', 'b1', 'c1', 'a2'], ['a3', 'b2', 'a4', 'a5'], ['a6']])
})

test('owners take turns between batches, too: who brings items that fill one each does not stay first', async () => {
  const batches: string[][] = []
  const submit = createBatcher<string, string>({
    max: 4,
    maxWeight: 10,
    weigh: (item) => (item.startsWith('a') ? 10 : 5),
    owner: (item) => item[0] as string,
    run: async (items) => {
      batches.push(items)
      return items
    },
  })
  await Promise.all(['a1', 'a2', 'a3', 'b1', 'b2', 'c1'].map(submit))
  assert.deepEqual(batches, [['a1'], ['b1', 'c1'], ['a2'], ['b2'], ['a3']])
})

test('what is too heavy for the rest of a batch ends its owner’s part in it, and nobody else’s', async () => {
  const batches: string[][] = []
  const submit = createBatcher<string, string>({
    max: 100,
    maxWeight: 5,
    weigh: (item) => (item.startsWith('a') ? 4 : 0.1),
    owner: (item) => item[0] as string,
    run: async (items) => {
      batches.push(items)
      return items
    },
  })
  await Promise.all(['a1', 'a2', 'b1', 'b2', 'b3', 'c1', 'c2'].map(submit))
  assert.deepEqual(batches, [['a1', 'b1', 'c1', 'b2', 'c2', 'b3'], ['a2']])
})

test('one item that the database refuses fails alone', async () => {
  await sql`create table numbers (n int primary key check (n <> 13))`
  const submit = createBatcher<number, number>({
    max: 100,
    run: async (numbers) => {
      const rows = await sql<{ n: number }[]>`insert into numbers select * from unnest(${numbers}::int[]) returning n`
      return rows.map((row) => row.n)
    },
  })
  const results = await Promise.allSettled([11, 12, 13, 14].map(submit))
  assert.deepEqual(
    results.map((result) => (result.status === 'fulfilled' ? result.value : result.reason.code)),
    [11, 12, '23514', 14],
  )
  const stored = await sql`select n from numbers order by n`
  assert.deepEqual(
    stored.map((row) => row.n),
    [11, 12, 14],
  )
  assert.equal(await submit(15), 15)
})

test('what the database refuses is run one by one only for as long as the database is well', async () => {
  await sql`create table evens (n int primary key check (n % 2 = 0))`
  let runs = 0
  const submit = createBatcher<number, number>({
    max: 100,
    run: async (numbers) => {
      if (++runs === 4) await takeTooLong()
      await sql`insert into evens select * from unnest(${numbers}::int[])`
      return numbers
    },
  })
  const results = await Promise.allSettled([1, 2, 3, 4, 5, 6].map(submit))
  assert.deepEqual(
    results.map((result) => (result.status === 'fulfilled' ? result.value : result.reason.code)),
    ['23514', 2, '57014', '57014', '57014', '57014'],
  )
  assert.equal(runs, 4)
})

test('a batch that is the victim of a deadlock runs again', async () => {
  await sql`create table accounts (id int primary key, balance int not null)`
  await sql`insert into accounts values (1, 0), (2, 0)`
  let runs = 0
  let begun = 0
  const bothHaveBegun = Promise.withResolvers<void>()
  // As in two processes.
  const [one, other] = [1, 2].map(() =>
    createBatcher<[number, number], boolean>({
      max: 1,
      run: async ([pair]) => {
        runs++
        await sql.begin(async (sql) => {
          await sql`set local deadlock_timeout = '20ms'`
          for (const id of pair!) {
            await sql`update accounts set balance = balance + 1 where id = ${id}`
            if (++begun === 2) bothHaveBegun.resolve()
            await bothHaveBegun.promise
          }
        })
        return [true]
      },
    }),
  )
  assert.deepEqual(await Promise.all([one!([1, 2]), other!([2, 1])]), [true, true])
  assert.ok(runs > 2, 'the two did deadlock')
  const rows = await sql`select balance from accounts`
  assert.deepEqual(
    rows.map((row) => row.balance),
    [2, 2],
  )
})

test('when the database cannot be reached, every item of the batch fails, and the next batch is tried afresh', async () => {
  const nowhere = connect('postgres://127.0.0.1:1/none')
  let sizes: number[] = []
  const submit = createBatcher<number, number>({
    max: 100,
    run: async (items) => {
      sizes.push(items.length)
      await nowhere`select 1`
      return items
    },
  })
  const results = await Promise.allSettled([1, 2, 3].map(submit))
  assert.deepEqual(
    results.map((result) => result.status === 'rejected' && result.reason.code),
    ['ECONNREFUSED', 'ECONNREFUSED', 'ECONNREFUSED'],
  )
  assert.deepEqual(sizes, [3], 'not one by one: nothing says that any of them is to blame')
  sizes = []
  await assert.rejects(submit(4))
  assert.deepEqual(sizes, [1])
  await nowhere.end()
})
