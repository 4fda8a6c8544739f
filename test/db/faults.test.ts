import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { readFile, writeFile } from 'node:fs/promises'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import { type TestContext, test } from 'node:test'
import { queryObjects, setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import { Client } from 'pg'
import { type Db, openDb, type Pool } from '../../src/db/open.ts'
import { untilReachable } from '../../src/db/until-reachable.ts'
import { createLog } from '../../src/log.ts'
import { cleanUp } from '../support/cleanup.ts'
import { createDatabase, PASSWORD } from '../support/database.ts'
import { waitFor } from '../support/wait.ts'

const log = createLog('silent')

async function start(t: TestContext, options: { max?: number; patienceMs?: number } = {}) {
  const { url, sql } = await createDatabase(t)
  const open = (through = url) => {
    const pool = openDb(through, { log, name: 'test', max: 1, ...options })
    cleanUp(t, () => pool.end(0))
    return pool
  }
  const terminate = (where: string) =>
    sql`select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and query like ${where}`
  return { url, sql, open, terminate }
}

/** What stands between a pool and its database; `sockets`: the pool's connections so far. */
async function between(t: TestContext, url: string, meet: (client: Socket, forward: () => void) => void) {
  const target = new URL(url)
  const sockets: Socket[] = []
  const holes: (() => void)[] = []
  const server = createServer({ allowHalfOpen: true }, (client) => {
    sockets.push(client)
    client.on('error', () => {})
    meet(client, () => {
      const database = connect(Number(target.port), target.hostname)
      database.on('error', () => client.destroy())
      client.on('close', () => database.destroy())
      client.pipe(database).pipe(client)
      holes.push(() => {
        client.unpipe()
        database.unpipe()
        client.resume()
      })
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  cleanUp(t, () => {
    for (const socket of sockets) socket.destroy()
    server.close()
  })
  const through = new URL(url)
  through.port = String((server.address() as AddressInfo).port)
  /** From now on, nothing passes over the connections that there are, nor the end of one. */
  const swallow = () => {
    for (const hole of holes) hole()
  }
  return { url: through.href, sockets, swallow }
}

const isUnderWay = (sql: Pool, what: string) =>
  waitFor(
    async () =>
      (
        await sql`
          select from pg_stat_activity where datname = current_database() and state = 'active' and query like ${what}`
      ).length > 0,
  )

test('what came of an answer that failed is not counted with the next one', async (t) => {
  const { open, sql, terminate } = await start(t)
  const pool = open()
  const answered = async () => assert.deepEqual([...(await pool`select 7 as n`)], [{ n: 7 }])
  await assert.rejects(async () => await pool`select 10 / (3 - i) as x from generate_series(1, 5) i`, /division/)
  await answered()
  // Nor is that of a connection that was lost in the middle of it.
  const cut = assert.rejects(
    async () =>
      await pool`select repeat('x', 9000), case when i > 3 then pg_sleep(60)::text end from generate_series(1, 5) i`,
  )
  await isUnderWay(sql, 'select repeat%')
  await terminate('select repeat%')
  await cut
  await answered()
})

test('a pool whose connection was lost in the middle of a query ends', async (t) => {
  const { url, sql, terminate } = await start(t)
  const pool = openDb(url, { log, name: 'test', max: 1 })
  const lost = assert.rejects(async () => await pool`select pg_sleep(60)`)
  await isUnderWay(sql, 'select pg_sleep%')
  await terminate('select pg_sleep%')
  await lost
  await pool.end()
})

test('connections that are lost in the middle of a query are forgotten', async (t) => {
  const { url, open, sql } = await start(t)
  const proxy = await between(t, url, (_client, forward) => forward())
  const pool = open(proxy.url)
  const before = queryObjects(Client, { format: 'count' })
  for (let lost = 0; lost < 20; lost++) {
    const query = assert.rejects(async () => await pool`select pg_sleep(60)`)
    await isUnderWay(sql, 'select pg_sleep%')
    proxy.sockets.at(-1)?.destroy()
    await query
    await sql`select pg_cancel_backend(pid) from pg_stat_activity where datname = current_database() and query like 'select pg_sleep%'`
  }
  // Counting collects garbage first.
  assert.ok(queryObjects(Client, { format: 'count' }) <= before + 2)
})

test('a prepared statement whose result has changed is sent again as it was, and mixes nothing up', async (t) => {
  const { open, sql } = await start(t)
  await sql`create table things (id int, a boolean, j jsonb, b bytea)`
  const pool = open()
  const put = async (id: number) =>
    await pool`insert into things (id, a, j, b) values (${id}, ${true}, ${JSON.stringify({ x: 1 })}, ${Buffer.from('ab')}) returning *`
  const number = async (n: number) => (await pool`select ${n}::int as n`)[0]?.n
  await put(1)
  await number(1)
  await sql`alter table things add column extra int`
  const numbers = Array.from({ length: 20 }, (_, n) => n)
  const [, ...answers] = await Promise.all([put(2), ...numbers.map(number)])
  assert.deepEqual(answers, numbers)
  const rows = await sql`select a, j::text, b::text from things order by id`
  assert.deepEqual({ ...rows[1] }, { ...rows[0] })

  // Under load, while it changes again and again.
  let isChanging = true
  const ids = Array.from({ length: 8 }, async (_, worker) => {
    while (isChanging) {
      const n = 1 + (worker % 2)
      const [row] =
        worker < 4
          ? await pool`select * from things where id = ${n}`
          : await pool`select ${n}::int as id, 'other' as kind`
      assert.deepEqual([row?.id, row?.kind], [n, worker < 4 ? undefined : 'other'])
      await new Promise((resolve) => setTimeout(resolve, worker / 2))
    }
  })
  for (let n = 0; n < 10; n++) {
    await sql.text(`alter table things add column more${n} int`)
    await pool`select pg_sleep(0.05)`
  }
  isChanging = false
  await Promise.all(ids)
})

test('a statement whose result has changed is answered although every connection had prepared it', async (t) => {
  const { open, sql } = await start(t, { max: 4 })
  await sql`create table things (id int)`
  const pool = open()
  const ask = () => pool`select *, pg_sleep(0.1)::text as slept from things`
  await Promise.all([ask(), ask(), ask(), ask()])
  await sql`alter table things add column extra int`
  for (let nth = 0; nth < 4; nth++) await ask()
})

test('a query that cannot be built fails alone', async (t) => {
  const { open, sql } = await start(t)
  const pool = open()
  const ask = async (text: string | undefined) => (await pool`select ${text as string}::text as v`)[0]?.v
  await ask('once')
  const slow = ask('once').then(async () => (await pool`select 'slow' as v from pg_sleep(0.3)`)[0]?.v)
  await isUnderWay(sql, "select 'slow'%")
  const answers = await Promise.allSettled([slow, ask(undefined), ask('first'), ask('second')])
  const got = answers.map((answer) => (answer.status === 'fulfilled' ? answer.value : answer.reason.name))
  assert.deepEqual(got, ['slow', 'TypeError', 'first', 'second'])
})

test('what is left of a transaction that lost its connection does not run on another one', async (t) => {
  const { open, sql, terminate } = await start(t, { max: 2 })
  await sql`create table things (who text)`
  const pool = open()
  const { promise: resumed, resolve: resume } = Promise.withResolvers<void>()
  const isRefused = async (sql: Db) => await assert.rejects(sql`insert into things values ('late')`)
  const lost = pool.begin(async (sql) => {
    await sql`insert into things values ('lost')`
    await resumed
    await isRefused(sql)
    return sql
  })
  await waitFor(async () => (await terminate('insert into things%')).length > 0)
  const over = await pool.begin(async (other) => {
    await other`insert into things values ('other')`
    resume()
    await assert.rejects(lost)
    return other
  })
  await isRefused(over)
  assert.deepEqual(await sql`select who from things`, [{ who: 'other' }])
})

test('what is left of a transaction that has failed does not run beside it', async (t) => {
  const { open, sql } = await start(t)
  await sql`create table things (who text)`
  let late: Promise<unknown> | undefined
  const failing = open().begin(async (sql) => {
    await sql`insert into things values ('lost')`
    setImmediate(() => {
      late = assert.rejects(sql`insert into things values ('late')`, /over/)
    })
    throw new Error('enough')
  })
  await assert.rejects(failing, /enough/)
  await waitFor(() => late !== undefined)
  await late
  assert.deepEqual(await sql`select from things`, [])
})

test('a transaction that the database ends takes its connection along', async (t) => {
  const pool = (await start(t)).open()
  const timedOut = pool.begin(async (sql) => {
    await sql`set local idle_in_transaction_session_timeout = 50`
    await new Promise((resolve) => setTimeout(resolve, 200))
    await sql`select 1`
  })
  await assert.rejects(timedOut)
  const tooLong = pool.begin(async (sql) => {
    await sql`set local transaction_timeout = 50`
    await sql`select pg_sleep(60)`
  })
  await assert.rejects(tooLong)
  assert.deepEqual(await pool`select 7 as n`, [{ n: 7 }])
})

test('whoever wants what a transaction has whose process stands still gets it in time', async (t) => {
  const { sql, open } = await start(t)
  await sql`create table public.things (n int)`
  await sql`insert into public.things values (0)`
  const until = Promise.withResolvers<void>()
  const stands = open().begin(async (own) => {
    await own`update public.things set n = n + 1`
    await until.promise
  })
  await waitFor(async () => (await sql`select from public.things for update skip locked`).length === 0)
  await open()`update public.things set n = n + 2`
  until.resolve()
  await assert.rejects(stands)
  assert.deepEqual(await sql`select n from public.things`, [{ n: 2 }])
})

test('a pool that ends refuses who waits, and ends what is still being opened', { timeout: 10_000 }, async (t) => {
  const { url, open } = await start(t)
  const forwards: (() => void)[] = []
  const nowhere = await between(t, url, (client) => client.resume())
  const slow = await between(t, url, (_client, forward) => forwards.push(forward))
  const begin = async (door: typeof slow) => {
    const pool = open(door.url)
    const asked = [1, 2].map(() => assert.rejects(pool`select 1`, /closed/))
    await waitFor(() => door.sockets.length === 1)
    return { pool, asked }
  }
  const hurried = await begin(nowhere)
  await hurried.pool.end(0)
  await Promise.all(hurried.asked)
  // By itself, opening it would be given up after 3 s.
  await waitFor(() => nowhere.sockets[0]!.readableEnded, { timeoutMs: 2000 })
  // With time, it ends as soon as it is there.
  const patient = await begin(slow)
  const ending = patient.pool.end(60_000)
  await Promise.all(patient.asked)
  forwards[0]!()
  await ending
})

test('an answer that came while the process stood still is read before its connection is given up', async (t) => {
  const { sql, open } = await start(t, { patienceMs: 300 })
  const pool = open()
  const [before] = await pool<{ pid: number }[]>`select pg_backend_pid() as pid`
  const asked = performance.now()
  const answer = pool<{ pid: number }[]>`select pg_backend_pid() as pid from pg_sleep(0.1)`
  await waitFor(
    async () =>
      (await sql`select from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'`).length >
      0,
  )
  while (performance.now() < asked + 1000);
  assert.deepEqual(await answer, [before])
})

test('when one connection leads nowhere, those that nobody uses are not tried', async (t) => {
  const { url, open } = await start(t, { max: 3, patienceMs: 500 })
  const network = await between(t, url, (_client, forward) => forward())
  const pool = open(network.url)
  const ask = () => pool`select pg_sleep(0.1)`
  await Promise.all([ask(), ask(), ask()])
  network.swallow()
  await assert.rejects(ask(), /does not answer/)
  await ask()
  assert.equal(network.sockets.length, 4)
})

test('a start waits for a database that is starting or stopping, or has no connection to spare', async (t) => {
  const { url } = await start(t)
  const passing = ['57P03', '57P01', '53300']
  const door = await between(t, url, (client, forward) => {
    const code = passing.shift()
    if (code === undefined) return forward()
    const fields = `SFATAL\0C${code}\0Mnot now\0\0`
    client.end(Buffer.concat([Buffer.from([0x45, 0, 0, 0, 4 + fields.length]), Buffer.from(fields)]))
  })
  await untilReachable(door.url, log)
  assert.deepEqual(passing, [])
})

test('a login that fails on this side is a refusal, and leaves nothing open', { timeout: 10_000 }, async (t) => {
  const { url, sql, open } = await start(t)
  const role = `test_${randomUUID().slice(0, 8)}`
  await sql.text(`create role ${role} login password 'secret'`)
  cleanUp(t, () => sql.text(`drop role ${role}`))
  // The driver's answer needs the password.
  const [settings] = await sql`select current_setting('hba_file') as rules`
  await writeFile(
    settings?.rules,
    `host all ${role} 127.0.0.1/32 scram-sha-256\n${await readFile(settings?.rules, 'utf8')}`,
  )
  await sql`select pg_reload_conf()`
  const door = await between(t, url, (_client, forward) => forward())
  const bare = new URL(door.url)
  bare.username = role
  bare.password = ''
  const pool = open(bare.href)
  await waitFor(() =>
    pool`select 1`.then(
      () => false,
      (error) => /SASL/.test(error.message),
    ),
  )
  await assert.rejects(untilReachable(bare.href, log), /asks for a password/)
  await waitFor(() => door.sockets.every((socket) => socket.readableEnded))
})

test('a transaction of which a failure was overlooked says that it was rolled back', async (t) => {
  const { open, sql } = await start(t)
  await sql`create table things (who text)`
  const overlooking = open().begin(async (sql) => {
    await sql`insert into things values ('lost')`
    await sql`select 1 / 0`.catch(() => {})
  })
  await assert.rejects(overlooking, /rolled back/)
  assert.deepEqual(await sql`select from things`, [])
})

test('a query that waits for a connection for longer than one may take is refused, and harms none that comes later', async (t) => {
  const { open } = await start(t, { patienceMs: 500 })
  const pool = open()
  const { promise: released, resolve: release } = Promise.withResolvers<void>()
  const holding = pool.begin(async () => await released)
  const waiting = await Promise.allSettled(Array.from({ length: 50 }, () => pool`select 1`))
  for (const one of waiting)
    assert.match(String(one.status === 'rejected' && one.reason), /all 1 connections were in use for too long/)
  release()
  await holding
  assert.deepEqual(await pool`select 7 as n`, [{ n: 7 }])
})

test('a server that closes every connection at once is not asked without an end', async (t) => {
  const { url, open } = await start(t)
  const door = await between(t, url, (client) => client.end())
  const pool = open(door.url)
  await assert.rejects(async () => await pool`select 1`)
  assert.ok(door.sockets.length < 5, `${door.sockets.length} connections`)
})

test('unused connections that are closed over a dead network come back to their pool', async (t) => {
  const { url, open } = await start(t, { max: 2, patienceMs: 4000 })
  const network = await between(t, url, (_client, forward) => forward())
  const pool = open(network.url)
  const ask = async () => await pool`select 1 from pg_sleep(0.1)`
  await Promise.all([ask(), ask()])
  network.swallow()
  const before = [...network.sockets]
  await waitFor(() => before.every((socket) => socket.readableEnded), {
    timeoutMs: 30_000,
    what: 'both to be closed for being idle',
  })
  const answered = Promise.all([ask(), ask()])
  let isAnswered = false
  answered.then(() => {
    isAnswered = true
  })
  await waitFor(() => isAnswered, { what: 'new connections to be made' })
})

test('statements that fail are not kept', async (t) => {
  const pool = (await start(t)).open()
  setFlagsFromString('--expose-gc')
  const collect: () => void = runInNewContext('gc')
  const fail = async (count: number) => {
    for (let n = 0; n < count; n++)
      await assert.rejects(async () => await pool.text(`select 1/0 /* ${n} ${Buffer.alloc(20_000, 'x')} */`))
    collect()
    return process.memoryUsage().heapUsed / 2 ** 20
  }
  const before = await fail(200)
  const grown = (await fail(1500)) - before
  // Kept, they take thirty.
  assert.ok(grown < 10, `${grown.toFixed(1)} MiB`)
})

test('channels are listened on again although that was refused at first', async (t) => {
  const { url, sql, open } = await start(t)
  let refuses = false
  const door = await between(t, url, (client, forward) => (refuses ? client.end() : forward()))
  const pool = open(door.url)
  const heard: string[] = []
  let listening = 0
  await Promise.all(
    ['one', 'two'].map((name) =>
      pool.listen(name, (payload) => (payload === null ? listening++ : heard.push(`${name} ${payload}`))),
    ),
  )
  assert.equal(listening, 2)
  refuses = true
  const before = door.sockets.length
  for (const socket of door.sockets) socket.destroy()
  await waitFor(() => door.sockets.length >= before + 3, { what: 'several tries' })
  refuses = false
  await waitFor(() => listening === 4, { what: 'both channels to be listened on again' })
  await sql`select pg_notify('one', ''), pg_notify('two', 'payload')`
  await waitFor(() => heard.length === 2)
  assert.deepEqual(heard, ['one ', 'two payload'])
})

test('listening begins on one connection, also while it is being opened again', async (t) => {
  const { url, sql, open } = await start(t)
  let refuses = false
  const door = await between(t, url, (client, forward) => (refuses ? client.end() : forward()))
  const pool = open(door.url)
  const heard: string[] = []
  let again = 0
  await pool.listen('one', (payload) => (payload === null ? again++ : heard.push('one')))
  refuses = true
  door.sockets[0]!.destroy()
  await waitFor(() => door.sockets.length > 1)
  const listen = () => pool.listen('two', (payload) => payload !== null && heard.push('two'))
  await assert.rejects(listen())
  refuses = false
  const tried = () =>
    listen().then(
      () => true,
      () => false,
    )
  await waitFor(tried)
  await waitFor(() => again === 2)
  await sql`select pg_notify('one', ''), pg_notify('two', '')`
  await waitFor(() => heard.includes('two'))
  assert.deepEqual(heard, ['one', 'two'])
  const listening = await sql`
    select from pg_stat_activity where datname = current_database() and application_name = 'test' and query like 'listen%'`
  assert.equal(listening.length, 1)
})

test('where the database has no more connections, those that there are serve all who ask', async (t) => {
  const { url, sql } = await createDatabase(t)
  const role = new URL(url).pathname.slice(1)
  await sql.text(`create role ${role} login password '${PASSWORD}' connection limit 2`)
  cleanUp(t, () => sql.text(`drop role ${role}`))
  const limited = new URL(url)
  limited.username = role
  const pool = openDb(limited.href, { log, name: 'test', max: 8 })
  cleanUp(t, () => pool.end())
  const ask = () => pool`select pg_sleep(0.02)`
  await Promise.all([ask(), ask()])
  for (let round = 0; round < 3; round++) await Promise.all(Array.from({ length: 40 }, ask))
  await sql.text(`alter role ${role} connection limit -1`)
  const many = async () => {
    await Promise.all(Array.from({ length: 40 }, ask))
    const [row] = await sql<{ n: number }[]>`select count(*)::int as n from pg_stat_activity where usename = ${role}`
    return row?.n === 8
  }
  await waitFor(many, { what: 'all connections to be used again' })
})
