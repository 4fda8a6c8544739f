import assert from 'node:assert/strict'
import { type TestContext, test } from 'node:test'
import type { Pool } from '../src/db/open.ts'
import { fragment } from '../src/db/statement.ts'
import { createPublish } from '../src/flow/publish.ts'
import { createReplay } from '../src/flow/replay.ts'
import { createLog } from '../src/log.ts'
import { deleteKeys, pruneRows } from '../src/upkeep/prune.ts'
import { runRetention } from '../src/upkeep/retention.ts'
import { createDatabase, lock, waitingFor, waitingForLocks } from './support/database.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { ADMIN_KEY, createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const OLD = 200
const AT_ONCE = 8
const KINDS = ['events', 'deliveries', 'attempts']

/** Makes the tables of a day, so many days ago, as they were made then, and answers their suffix. */
async function makeDay(sql: Pool, ago: number): Promise<string> {
  const [day] = await sql<{ name: string; first: string; next: string }[]>`
    select to_char(day at time zone 'utc', 'YYYYMMDD') as name, waybill.first_id(day) as first, waybill.first_id(day + interval '1 day') as next
    from (select date_trunc('day', now(), 'UTC') - ${ago} * interval '1 day' as day) d`
  const { name, first, next } = day!
  for (const kind of KINDS) {
    await sql.text(`create table waybill.${kind}_${name} (like waybill.${kind} including all)`)
    await sql.text(
      `alter table waybill.${kind} attach partition waybill.${kind}_${name} for values from ('${first}') to ('${next}')`,
    )
  }
  return name
}

type Old = {
  ago: number
  status: 'pending' | 'retrying' | 'delivered'
  endpoints: string[]
  count?: number
  attempts?: number
  payload?: string
}

/**
 * Events of a day, so many days ago, each with a delivery to each of the endpoints; what is live of them is held. Answers
 * with the deliveries.
 */
async function makeOld(
  sql: Pool,
  tenantId: string,
  { ago, status, endpoints, count = 1, attempts = 0, payload = '{}' }: Old,
): Promise<{ event_id: string; delivery_id: string }[]> {
  const isLive = status !== 'delivered'
  return await sql`
    with ids as materialized (
      select waybill.make_id(date_trunc('day', now(), 'UTC') - ${ago} * interval '1 day' + n * interval '1 second') as event_id from generate_series(1, ${count}) n
    ), made as materialized (
      select event_id, endpoint_id, waybill.make_delivery_id(event_id) as delivery_id from ids, unnest(${endpoints}::uuid[]) as p (endpoint_id)
    ), e as (
      insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) select ${tenantId}, event_id, 'old', ${payload}, ${endpoints.length} from ids
    ), a as (
      insert into waybill.attempts (tenant_id, delivery_id, attempt_number, endpoint_id, url, status_code, response_body, response_truncated, duration_ms, retry_state, started_at)
      select ${tenantId}, delivery_id, n, endpoint_id, 'http://127.0.0.1:9/hook', 503, 'later', false, 9, 'will_retry', now() from made, generate_series(1, ${attempts}) n
    ), s as (
      insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, held)
      select ${tenantId}, endpoint_id, ${status === 'pending' ? count : 0}, ${status === 'retrying' ? count : 0}, ${isLive ? 0 : count}, ${isLive ? count : 0}
      from unnest(${endpoints}::uuid[]) as p (endpoint_id)
      on conflict (tenant_id, endpoint_id) do update set pending = s.pending + excluded.pending, retrying = s.retrying + excluded.retrying,
        delivered = s.delivered + excluded.delivered, held = s.held + excluded.held
    )
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, held, attempt_count, spent_retries, updated_at, completed_at)
    select ${tenantId}, delivery_id, event_id, endpoint_id, 'old', ${status}, ${isLive}, ${attempts}, ${attempts}, now(), case when not ${isLive}::boolean then now() end from made
    returning event_id, delivery_id`
}

/** A service with a tenant, an endpoint that is not active and what the tests ask of them. */
async function startOld(t: TestContext, { mode = 'api' as 'api' | 'all', env = {} } = {}) {
  const receiver = await startReceiver(t)
  const world = await startTenant(t, { mode, env: { RETENTION_DAYS: '2', ...env } })
  const { sql, service, tenant } = world
  const makeEndpoint = async (path: string) => (await tenant.createEndpoint(receiver.url(path))).endpoint_id
  const setActive = async (endpoint: string, is_active: boolean) => {
    const { status } = await tenant.call('PATCH', `/v1/endpoints/${endpoint}`, { body: { is_active } })
    assert.equal(status, 200)
  }
  const off = await makeEndpoint('/off')
  await setActive(off, false)
  const runRetention = async (apply = true) => {
    const { status, body, text } = await service.call('POST', '/v1/admin/retention/run', {
      key: ADMIN_KEY,
      body: { apply },
    })
    assert.equal(status, 200, text)
    return [body.events, body.deliveries, body.attempts]
  }
  /** Which of these days have tables. */
  const daysLeft = async (...days: string[]) => {
    const rows = await sql<{ day: string }[]>`
      select day from unnest(${days}::text[]) with ordinality as d (day, nth) where exists (
        select from unnest(${KINDS}::text[]) as k (kind) where to_regclass('waybill.' || kind || '_' || day) is not null) order by nth`
    return rows.map(({ day }) => day)
  }
  /** The statistics, held against the rows that they are about. */
  const count = async () => {
    const [counts] = await sql`
      select sum(pending)::int as pending, sum(retrying)::int as retrying, sum(delivered)::int as delivered, sum(held)::int as held from waybill.endpoint_stats`
    const [rows] = await sql`
      select count(*) filter (where status = 'pending')::int as pending, count(*) filter (where status = 'retrying')::int as retrying,
        count(*) filter (where status = 'delivered')::int as delivered, count(*) filter (where held)::int as held from waybill.deliveries`
    assert.deepEqual({ ...counts }, { ...rows })
    return { ...counts }
  }
  return { ...world, receiver, makeEndpoint, setActive, off, runRetention, daysLeft, count }
}

test('an old delivery that is replayed while retention runs is kept with its event, or gone with it', async (t) => {
  const { url: databaseUrl, sql } = await createDatabase(t)
  const service = await startService(t, {
    databaseUrl,
    mode: 'api',
    env: { RATE_LIMIT_DELIVERIES_REPLAY: '0', RETENTION_DAYS: '2' },
  })
  const tenant = await createTenant(service)
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const made = await sql<{ event_id: string; delivery_id: string }[]>`
    with ids as materialized (
      select waybill.make_id(now() - interval '40 days' + n * interval '1 second') as event_id from generate_series(1, ${OLD}) n
    ), e as (insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) select ${tenant.tenantId}, event_id, 'old', '{}', 1 from ids)
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at, completed_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(event_id), event_id, ${endpoint_id}, 'old', 'delivered', now(), now() from ids
    returning event_id, delivery_id`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, delivered) values (${tenant.tenantId}, ${endpoint_id}, ${OLD})
    on conflict (tenant_id, endpoint_id) do update set delivered = ${OLD}`

  const replay = ({ delivery_id }: { delivery_id: string }) =>
    tenant.call('POST', `/v1/deliveries/${delivery_id}/replay`)
  const run = () => service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
  // Some before it has begun, most while it is under way; no more at once than there are connections for.
  const replays: Awaited<ReturnType<typeof replay>>[] = await Promise.all(made.slice(0, AT_ONCE).map(replay))
  const running = run()
  for (let from = AT_ONCE; from < OLD; from += AT_ONCE)
    replays.push(...(await Promise.all(made.slice(from, from + AT_ONCE).map(replay))))
  assert.equal((await running).status, 200)

  const [events, deliveries] = await Promise.all([
    sql`select event_id as id from waybill.events`,
    sql`select delivery_id as id from waybill.deliveries where status = 'pending'`,
  ]).then((found) => found.map((rows) => new Set(rows.map(({ id }) => id))))
  for (const [nth, { event_id, delivery_id }] of made.entries()) {
    const { status } = replays[nth]!
    const isKept = { 202: true, 404: false }[status]
    const errors = () => service.logs.flatMap(({ level, text }) => (level === 'error' ? [text] : [])).join('\n')
    assert.notEqual(isKept, undefined, `a replay was answered ${status}: ${errors()}`)
    assert.deepEqual([events!.has(event_id), deliveries!.has(delivery_id)], [isKept, isKept])
  }
  const [stats] = await sql`select pending::int, delivered::int from waybill.endpoint_stats`
  assert.deepEqual({ ...stats }, { pending: replays.filter(({ status }) => status === 202).length, delivered: 0 })
})

test('an old delivery that is replayed while retention looks for what is finished is kept with its event', async (t) => {
  const { sql, newSession, openPool, tenant, makeEndpoint, count } = await startOld(t)
  const done = await makeEndpoint('/done')
  const [old, other] = await makeOld(sql, tenant.tenantId, {
    ago: 40,
    status: 'delivered',
    endpoints: [done],
    count: 2,
  })
  // Its look stops in the middle, for as long as the test likes, and sees what was finished when it began.
  await sql.text(`
    create function public.wait() returns boolean language plpgsql as $$ begin
      perform pg_advisory_xact_lock_shared(4711);
      return true;
    end $$;
    alter table waybill.events_default rename to events_rest;
    create view waybill.events_default as select * from waybill.events_rest where public.wait()`)
  const barrier = newSession()
  await barrier`select pg_advisory_lock(4711)`
  const pruning = pruneRows(openPool({ patienceMs: 60_000 }), 'default', new Date())
  pruning.catch(() => {})
  const isLooking = () =>
    sql`select from pg_stat_activity where datname = current_database() and wait_event = 'advisory'`
  await waitFor(async () => (await isLooking()).length > 0, { what: 'it to look' })
  const { status } = await tenant.call('POST', `/v1/deliveries/${old!.delivery_id}/replay`)
  assert.equal(status, 202)
  await barrier`select pg_advisory_unlock(4711)`
  assert.deepEqual(await pruning, { events: 1, deliveries: 1, attempts: 0 })
  const kept = await Promise.all(
    [old, other].map(async (one) => (await tenant.call('GET', `/v1/deliveries/${one!.delivery_id}`)).status),
  )
  assert.deepEqual(kept, [200, 404])
  assert.deepEqual(await count(), { pending: 1, retrying: 0, delivered: 0, held: 0 })
})

test('a day that a run had put aside when it died is deleted by the next one, with its counts', async (t) => {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api' })
  const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/hook')
  const tables = ['events', 'deliveries', 'attempts'].map((kind) => [kind, `${kind}_20260102`] as const)
  for (const [kind, table] of tables)
    await sql.text(`create table waybill.${table} (like waybill.${kind} including all)`)
  await sql`
    with e as (
      insert into waybill.events_20260102 select ${tenant.tenantId}, waybill.make_id('2026-01-02 12:00Z'::timestamptz), 'old', '{}', null, 1 returning event_id
    )
    insert into waybill.deliveries_20260102 (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at, completed_at)
    select ${tenant.tenantId}, waybill.make_delivery_id(event_id), event_id, ${endpoint_id}, 'old', 'delivered', now(), now() from e`
  await sql`insert into waybill.endpoint_stats (tenant_id, endpoint_id, delivered) values (${tenant.tenantId}, ${endpoint_id}, 3)
    on conflict (tenant_id, endpoint_id) do update set delivered = 3`

  const { body } = await service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
  assert.deepEqual([body.events, body.deliveries, body.attempts], [1, 1, 0])
  const [left] =
    await sql`select count(to_regclass('waybill.' || name))::int as tables, (select delivered::int from waybill.endpoint_stats)
    from unnest(${tables.map(([, table]) => table)}::text[]) as t (name)`
  assert.deepEqual({ ...left }, { tables: 0, delivered: 2 })
})

test('while a day goes, who publishes to one of its endpoints waits for a thousand counts at most', async (t) => {
  const { sql, newSession } = await createDatabase(t)
  const day = await makeDay(sql, OLD)
  const endpoints = (
    await sql<
      { id: string }[]
    >`select waybill.make_id(clock_timestamp()) as id from generate_series(1, 5000) order by 1`
  ).map(({ id }) => id)
  await makeOld(sql, 'acme', { ago: OLD, status: 'delivered', endpoints })
  const counts = async () =>
    (
      await sql<{ n: number }[]>`
        select count(*)::int as n from waybill.endpoint_stats where delivered > 0 union all select count(*)::int from waybill.uncounted`
    ).map(({ n }) => n)
  const run = (pool: Pool) => runRetention(pool, { days: 2, apply: true, log: createLog('silent') })
  let running: Promise<unknown> | undefined
  await newSession().begin(async (publish) => {
    await publish`select from waybill.endpoint_stats where endpoint_id = ${endpoints[4500] ?? ''} for update`
    running = run(sql)
    await waitFor(async () => (await waitingForLocks(sql)) === 1, { what: 'retention to wait for the publish' })
    const [table] = await sql`select to_regclass(${`waybill.deliveries_${day}`}) as name`
    assert.equal(table?.name, null)
    assert.deepEqual(await counts(), [1000, 1000])
  })
  await running
  assert.deepEqual(await counts(), [0, 0])
  // A run may have died before that.
  await sql`update waybill.endpoint_stats set delivered = 1`
  await sql`insert into waybill.uncounted select tenant_id, endpoint_id, 'delivered', 1 from waybill.endpoint_stats`
  await run(sql)
  assert.deepEqual(await counts(), [0, 0])
})

test('what is live of an old day outlives its tables, is delivered once its endpoint is active, and then goes too', async (t) => {
  const { sql, receiver, tenant, makeEndpoint, setActive, off, runRetention, daysLeft, count } = await startOld(t, {
    mode: 'all',
  })
  const done = await makeEndpoint('/done')
  const day = await makeDay(sql, 40)
  await makeOld(sql, tenant.tenantId, { ago: 40, status: 'delivered', endpoints: [done], count: 30, attempts: 2 })
  const [live] = await makeOld(sql, tenant.tenantId, { ago: 40, status: 'retrying', endpoints: [off], attempts: 3 })
  // Another delivery of the same event, which is finished.
  const [sibling] = await sql`
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, status, updated_at, completed_at)
    select tenant_id, waybill.make_delivery_id(event_id), event_id, ${done}, event_type, 'delivered', now(), now()
    from waybill.deliveries where delivery_id = ${live!.delivery_id} returning delivery_id`
  await sql`update waybill.endpoint_stats set delivered = delivered + 1 where endpoint_id = ${done}`
  const paths = [
    `/v1/events/${live!.event_id}`,
    `/v1/deliveries/${live!.delivery_id}`,
    `/v1/deliveries/${live!.delivery_id}/attempts`,
    `/v1/deliveries/${sibling!.delivery_id}`,
    `/v1/deliveries?endpoint_id=${off}`,
  ]
  const read = () => Promise.all(paths.map(async (path) => (await tenant.call('GET', path)).text))
  const before = await read()

  assert.deepEqual(await runRetention(false), [30, 30, 60])
  assert.deepEqual(await daysLeft(day), [day])
  assert.deepEqual(await runRetention(), [30, 30, 60])
  assert.deepEqual(await daysLeft(day), [])
  assert.deepEqual(await read(), before)
  assert.deepEqual(await count(), { pending: 0, retrying: 1, delivered: 1, held: 1 })
  assert.deepEqual(await runRetention(), [0, 0, 0])

  await setActive(off, true)
  const [receipt] = await receiver.until(1, { path: '/off' })
  assert.equal(receipt!.headers['service-delivery-id'], live!.delivery_id)
  const found = async () => (await tenant.call('GET', paths[1]!)).body
  await waitFor(async () => (await found()).status === 'delivered', { what: 'the delivery to be recorded' })
  assert.equal((await found()).attempt_count, 4)
  assert.deepEqual(await count(), { pending: 0, retrying: 0, delivered: 2, held: 0 })
  assert.deepEqual(await runRetention(false), [1, 2, 4])
  assert.deepEqual(await runRetention(), [1, 2, 4])
  assert.equal((await tenant.call('GET', paths[1]!)).status, 404)
  assert.deepEqual(await count(), { pending: 0, retrying: 0, delivered: 0, held: 0 })
})

test('a day of which more is live than can be moved in a moment keeps its tables, and loses what is finished', {
  timeout: 120_000,
}, async (t) => {
  const { sql, tenant, off, runRetention, daysLeft, count } = await startOld(t)
  const days = []
  for (const ago of [40, 41, 42, 43, 44]) days.push(await makeDay(sql, ago))
  const make = (old: Omit<Old, 'endpoints'>) => makeOld(sql, tenant.tenantId, { ...old, endpoints: [off] })
  // With as many deliveries.
  await make({ ago: 40, status: 'pending', count: 5000 })
  await make({ ago: 41, status: 'pending', count: 5001 })
  const [noise] = await sql`select string_agg(md5(n::text), '') as text from generate_series(1, 3200) n`
  await make({ ago: 42, status: 'pending', count: 100, payload: JSON.stringify(noise!.text) })
  await make({ ago: 43, status: 'retrying', count: 100, attempts: 6 })
  await sql`update waybill.attempts set response_body = left(${noise!.text}, 16384)`
  await make({ ago: 44, status: 'retrying', count: 3000, attempts: 2 })
  for (const ago of [40, 41, 42, 43, 44]) await make({ ago, status: 'delivered', attempts: 1 })
  assert.deepEqual(await runRetention(false), [5, 5, 5])
  assert.deepEqual(await runRetention(), [5, 5, 5])
  assert.deepEqual(await daysLeft(...days), days.slice(1))
  assert.deepEqual(await count(), { pending: 10_101, retrying: 3100, delivered: 0, held: 13_201 })
})

test('while the default partitions are large nothing is moved there, and days of which nothing is live go', {
  timeout: 120_000,
}, async (t) => {
  const { sql, tenant, off, runRetention, daysLeft, count } = await startOld(t)
  const [day, done] = [await makeDay(sql, 40), await makeDay(sql, 41)]
  await makeOld(sql, tenant.tenantId, { ago: 40, status: 'pending', endpoints: [off] })
  await makeOld(sql, tenant.tenantId, { ago: 41, status: 'delivered', endpoints: [off] })
  await sql`alter table waybill.events_default alter payload set storage plain`
  // A row a page, 66 MiB of them.
  await makeOld(sql, 'other', { ago: 50, status: 'pending', endpoints: [], count: 8500, payload: 'x'.repeat(8000) })
  assert.deepEqual(await runRetention(), [8501, 1, 0])
  assert.deepEqual(await daysLeft(day, done), [day])
  // Whoever looks at it at the moment may keep its pages.
  const isSmall = async () => {
    await sql`vacuum (truncate) waybill.events_default`
    return (await sql`select where pg_relation_size('waybill.events_default') < 1e6`).length === 1
  }
  await waitFor(isSmall, { what: 'the default partition to be small' })
  assert.deepEqual(await runRetention(), [0, 0, 0])
  assert.deepEqual(await daysLeft(day), [])
  assert.deepEqual(await count(), { pending: 1, retrying: 0, delivered: 0, held: 1 })
})

test('whoever comes while live rows are moved waits, and finds each of them once', { timeout: 120_000 }, async (t) => {
  const {
    sql,
    newSession,
    openPool,
    service,
    receiver,
    tenant,
    makeEndpoint,
    setActive,
    off,
    runRetention,
    daysLeft,
    count,
  } = await startOld(t, { mode: 'all', env: { ATTEMPT_TIMEOUT_SECONDS: '30' } })
  const { tenantId } = tenant
  const [slow, queued, later, done] = await Promise.all(['/slow', '/queued', '/later', '/done'].map(makeEndpoint))
  const busy = gate()
  receiver.script('/slow', busy.reply)
  const day = await makeDay(sql, 40)
  // Each of an event that stays, for its other delivery.
  const make = async (endpoint: string, status: Old['status']) => {
    const rows = await makeOld(sql, tenantId, { ago: 40, status, endpoints: [endpoint] })
    await sql`
      with made as (
        insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
        select tenant_id, waybill.make_delivery_id(event_id), event_id, ${off}, event_type, true, now() from waybill.deliveries where delivery_id = ${rows[0]!.delivery_id}
        returning tenant_id, endpoint_id
      )
      insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held) select *, 1, 1 from made
      on conflict (tenant_id, endpoint_id) do update set pending = s.pending + 1, held = s.held + 1`
    return rows[0]!.delivery_id
  }
  await setActive(queued!, false)
  await setActive(later!, false)
  const ids = {
    queued: await make(queued!, 'pending'),
    later: await make(later!, 'pending'),
    done: await make(done!, 'delivered'),
    slow: await make(slow!, 'pending'),
  }
  // Its job is lost, and soon another is made.
  await sql`update waybill.deliveries set held = false, next_attempt_at = now() + interval '1 hour' where delivery_id = ${ids.queued}`
  await sql`update waybill.endpoint_stats set held = 0 where endpoint_id = ${queued!}`
  await setActive(queued!, true)

  // Connections that wait as long as it takes, and know the statements from before.
  const pool = openPool({ max: 8, patienceMs: 60_000 })
  const update = (id: string) =>
    pool`update waybill.deliveries set updated_at = now() where tenant_id = ${tenantId} and delivery_id = ${id} returning 1`
  const list = () =>
    pool`select delivery_id from waybill.deliveries where tenant_id = ${tenantId} and endpoint_id = ${off} order by delivery_id`
  const listed = [...(await list())]
  assert.equal(listed.length, 4)
  await Promise.all(Array.from({ length: 16 }, () => update(ids.done)))
  const replay = createReplay<{ status: string }>(pool, fragment`status`)
  const limits = { rate: 0, window_seconds: 60, fanout: 10, monthly_events: 1000, monthly_attempts: 1000 }
  const publish = createPublish(pool, limits)
  const { tenantId: other } = await createTenant(service)
  await receiver.until(1, { path: '/slow' })

  // Retention stops in the middle of moving, for as long as the test likes.
  await sql.text(`
    create function public.wait() returns trigger language plpgsql set lock_timeout = 0 as $$ begin
      perform pg_advisory_xact_lock_shared(4711);
      return new;
    end $$;
    create trigger wait before insert on waybill.deliveries_default for each row execute function public.wait()`)
  const barrier = newSession()
  await barrier`select pg_advisory_lock(4711)`
  const running = runRetention()
  running.catch(() => {})
  const isMoving = () =>
    sql`select from pg_stat_activity where datname = current_database() and application_name like '%retention' and wait_event = 'advisory'`
  await waitFor(async () => (await isMoving()).length > 0, { timeoutMs: 30_000, what: 'retention to move rows' })

  const answers = Promise.all([
    update(ids.later),
    list(),
    replay(tenantId, ids.done),
    publish({ tenantId: other, event: { type: 'new', payload: '{}', idempotencyKey: 'new' } }),
  ])
  answers.catch(() => {})
  busy.open()
  await setActive(later!, true)
  await sql`
    select waybill.enqueue(json_build_array(json_build_object('id', ${ids.queued}::text, 'priority', -floor(tag)::int,
      'data', json_build_object('tenant_id', ${tenantId}::text)))::text), pg_notify('waybill_due', '') from waybill.queue_clock`
  const missing = new Set([
    'update waybill',
    'select delivery_id',
    'waybill.replay',
    'publish',
    'record',
    'claim',
    'release_held',
  ])
  await waitFor(
    async () => {
      const rows = await sql<{ query: string }[]>`
        select query from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and wait_event = 'relation'`
      for (const part of missing) if (rows.some(({ query }) => query.includes(part))) missing.delete(part)
      return missing.size === 0
    },
    { timeoutMs: 30_000, intervalMs: 10 },
  ).catch(() => assert.deepEqual([...missing], [], 'these did not wait'))
  assert.equal(await waitingFor(sql, 'waybill.idempotency_keys'), 1, 'who publishes has locked nothing yet')
  await barrier`select pg_advisory_unlock(4711)`

  const [updated, found, replayed, published] = await answers
  assert.equal(updated.length, 1)
  assert.deepEqual([...found], listed)
  assert.deepEqual([replayed?.status, published.outcome], ['pending', 'accepted'])
  assert.deepEqual(await running, [0, 0, 0])
  assert.deepEqual(await daysLeft(day), [])
  const status = async (id: string) => (await tenant.call('GET', `/v1/deliveries/${id}`)).body
  for (const [name, id] of Object.entries(ids)) {
    await waitFor(async () => (await status(id)).status === 'delivered', { what: `${name} to be delivered` })
    const sent = receiver.at(`/${name}`).map(({ headers }) => headers['service-delivery-id'])
    assert.deepEqual(sent, [id], name)
    const { data } = (await tenant.call('GET', `/v1/deliveries/${id}/attempts`)).body
    assert.deepEqual([(await status(id)).attempt_count, data.length], [1, 1], name)
  }
  assert.deepEqual([...(await list())], listed)
  assert.deepEqual(await count(), { pending: 4, retrying: 0, delivered: 4, held: 4 })
})

test('what is replayed while its day goes is kept, elsewhere, or gone with it', { timeout: 120_000 }, async (t) => {
  const { sql, service, tenant, makeEndpoint, off, runRetention, daysLeft, count } = await startOld(t, {
    env: { RATE_LIMIT_DELIVERIES_REPLAY: '0' },
  })
  const done = await makeEndpoint('/done')
  const days: string[] = []
  const made: { delivery_id: string; event_id: string }[] = []
  for (let ago = 40; ago < 46; ago++) {
    days.push(await makeDay(sql, ago))
    made.push(...(await makeOld(sql, tenant.tenantId, { ago, status: 'delivered', endpoints: [done], count: 40 })))
    await makeOld(sql, tenant.tenantId, { ago, status: 'pending', endpoints: [off] })
  }
  // From all days in turn, so that some are replayed while theirs goes.
  made.sort((a, b) => a.delivery_id.slice(-4).localeCompare(b.delivery_id.slice(-4)))
  const statuses: number[] = []
  const replay = async ({ delivery_id }: { delivery_id: string }) =>
    (await tenant.call('POST', `/v1/deliveries/${delivery_id}/replay`)).status
  const running = Promise.all([runRetention(), runRetention()])
  for (let from = 0; from < made.length; from += AT_ONCE)
    statuses.push(...(await Promise.all(made.slice(from, from + AT_ONCE).map(replay))))
  const deleted = (await running).flat().reduce((sum, rows) => sum + rows, 0)
  const errors = () => service.logs.flatMap(({ level, text }) => (level === 'error' ? [text] : [])).join('\n')
  assert.deepEqual(
    [...new Set(statuses)].filter((status) => status !== 202 && status !== 404),
    [],
    errors(),
  )

  assert.deepEqual(await daysLeft(...days), [])
  const rows = await sql<{ delivery_id: string }[]>`
    select delivery_id from waybill.deliveries d join waybill.events e using (tenant_id, event_id) where d.status = 'pending' and endpoint_id = ${done} order by 1`
  const kept = made.filter((_, nth) => statuses[nth] === 202).map(({ delivery_id }) => delivery_id)
  assert.deepEqual(
    rows.map(({ delivery_id }) => delivery_id),
    kept.sort(),
  )
  assert.equal(deleted, 2 * (made.length - kept.length))
  assert.deepEqual(await count(), { pending: kept.length + 6, retrying: 0, delivered: 0, held: 6 })
})

test('a day that is read for long, as by a dump, loses its rows, is told of, and keeps nothing else from being deleted', async (t) => {
  const { sql, newSession, service, tenant, makeEndpoint, off, daysLeft, count } = await startOld(t)
  const done = await makeEndpoint('/done')
  const days: string[] = []
  for (const ago of [41, 40, 39]) days.push(await makeDay(sql, ago))
  for (const ago of [41, 40, 50])
    await makeOld(sql, tenant.tenantId, { ago, status: 'delivered', endpoints: [done], count: 300, attempts: 1 })
  await makeOld(sql, tenant.tenantId, { ago: 40, status: 'pending', endpoints: [off] })
  await sql`
    insert into waybill.idempotency_keys (tenant_id, key, event_id)
    select tenant_id, event_id::text, event_id from waybill.events where event_type = 'old'`
  // Put aside by a run that died, and read since.
  const aside = days.at(-1)
  for (const kind of KINDS) await sql.text(`alter table waybill.${kind} detach partition waybill.${kind}_${aside}`)
  const run = async () => {
    const { status, body } = await service.call('POST', '/v1/admin/retention/run', {
      key: ADMIN_KEY,
      body: { apply: true },
    })
    return [status, body.events, body.deliveries, body.attempts, body.idempotency_keys]
  }
  const told = () => service.logs.filter(({ msg }) => msg === 'retention.day_in_use')

  const reader = newSession()
  await reader`begin`
  for (const name of [...KINDS, `deliveries_${aside}`])
    await reader.text(`lock table waybill.${name} in access share mode`)
  assert.deepEqual(await run(), [200, 900, 900, 900, 900])
  assert.deepEqual(
    told().map(({ level, day }) => [level, day]),
    days.map((day) => ['warn', day]),
  )
  assert.deepEqual(await daysLeft(...days), days)
  assert.deepEqual(await count(), { pending: 1, retrying: 0, delivered: 0, held: 1 })

  await reader`rollback`
  assert.deepEqual(await run(), [200, 0, 0, 0, 0])
  assert.deepEqual(await daysLeft(...days), [])
  assert.equal(told().length, 3)
  assert.deepEqual(await count(), { pending: 1, retrying: 0, delivered: 0, held: 1 })
})

test('a day that is being vacuumed is waited for while nobody else has to wait', async (t) => {
  const { sql, service, runRetention, daysLeft } = await startOld(t)
  const day = await makeDay(sql, 40)
  const unlock = await lock(sql, `waybill.deliveries_${day} in share update exclusive mode`)
  const running = runRetention()
  // After a second, autovacuum would give way.
  const waiting = () => sql`
    select from pg_stat_activity where datname = current_database() and application_name like '%retention' and wait_event_type = 'Lock'
      and query_start < now() - interval '1.2 seconds'`
  await waitFor(async () => (await waiting()).length > 0, { what: 'retention to wait' })
  for (const kind of KINDS)
    await sql.begin((other) => other.text(`lock table only waybill.${kind} in row exclusive mode nowait`))
  await unlock()
  await running
  assert.deepEqual(await daysLeft(day), [])
  assert.ok(service.logs.every(({ msg }) => msg !== 'retention.day_in_use'))
})

test('where others do not let go of a day, there is but one try for each of the next ones', async (t) => {
  const { sql } = await createDatabase(t)
  for (const ago of [42, 41, 40]) await makeDay(sql, ago)
  let tries = 0
  const pool = new Proxy(sql, {
    get(pool, name) {
      if (name === 'begin') tries++
      return Reflect.get(pool, name)
    },
  })
  const triesBefore: number[] = []
  const log = Object.assign(createLog('silent'), {
    warn: () => void triesBefore.push(tries),
  })
  const unlock = await lock(sql, 'waybill.deliveries in access share mode')
  await runRetention(pool, { days: 30, apply: true, log })
  await unlock()
  const [first, second, third] = triesBefore as [number, number, number]
  // Of a day that stays, its rows are looked at.
  assert.deepEqual([second - first, third - second], [2, 2])
})

test('a run that cannot drop a day fails, rather than calling the day in use, once the others are dropped', async (t) => {
  const { sql, service, daysLeft } = await startOld(t)
  const day = await makeDay(sql, 40)
  const next = await makeDay(sql, 39)
  await sql.text(`create view public.theirs as select * from waybill.deliveries_${day}`)
  const run = async () =>
    (await service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })).status
  assert.equal(await run(), 500)
  assert.deepEqual(await daysLeft(day, next), [day])
  await sql`drop view public.theirs`
  assert.equal(await run(), 200)
  assert.deepEqual(await daysLeft(day, next), [])
})

test('of a day that is dropped while it is counted nothing is left to delete', async (t) => {
  const { sql, newSession, runRetention } = await startOld(t)
  const day = await makeDay(sql, 40)
  const other = newSession()
  await other`begin`
  for (const kind of KINDS) await other.text(`drop table waybill.${kind}_${day}`)
  const counted = runRetention(false)
  await waitFor(() => waitingForLocks(sql), { what: 'it to wait' })
  await other`commit`
  assert.deepEqual(await counted, [0, 0, 0])
})

test('retention keeps the last RETENTION_DAYS days and the rest of the day before, wherever they stand', async (t) => {
  const { sql, service, tenant } = await startTenant(t, { mode: 'api', env: { RETENTION_DAYS: '20' } })
  const { key } = tenant
  // The 20th and the 21st day ago have tables; the 22nd has none, nor has the 19th.
  for (const ago of [20, 21]) await makeDay(sql, ago)
  const rows = await sql<{ id: string }[]>`
    insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count)
    select ${tenant.tenantId}, waybill.make_id(date_trunc('day', now(), 'UTC') - interval '20 days' + h * interval '1 hour'), 'old', '{}', 0
    from unnest(array[-25, -1, 0, 23, 25]) h returning event_id as id`
  const { body } = await service.call('POST', '/v1/admin/retention/run', { key: ADMIN_KEY, body: { apply: true } })
  const [expected] = await sql`select date_trunc('day', now(), 'UTC') - interval '20 days' as at`
  assert.deepEqual([body.events, body.cutoff], [2, expected!.at.toISOString()])
  const statuses = await Promise.all(
    rows.map(async ({ id }) => (await service.call('GET', `/v1/events/${id}`, { key })).status),
  )
  assert.deepEqual(statuses, [404, 404, 200, 200, 200])
})

test('all keys whose events are gone are deleted, wherever the last who read their table has left off', async (t) => {
  const { sql } = await createDatabase(t)
  // More than a quarter of shared_buffers: the scans of such a table begin, by default, where the last one ended.
  await sql`
    insert into waybill.idempotency_keys (tenant_id, key, event_id)
    select 'acme', repeat('k', 1800) || i, waybill.first_id(to_timestamp(i)) from generate_series(1, 20000) i`
  await sql.begin((sql) =>
    sql.text('set local synchronize_seqscans = on; select from waybill.idempotency_keys offset 19990 limit 1'),
  )
  assert.equal(await deleteKeys(sql, new Date()), 20_000)
})

test('deleting a key takes as long however many there are, and wherever vacuum has made room for new ones', async (t) => {
  const { newSession } = await createDatabase(t)
  // A single one, which tells at once what it has read, and nobody reads beside it.
  const session = newSession()
  await session`alter table waybill.idempotency_keys set (autovacuum_enabled = off)`
  // Four to a page, of which one is old.
  await session`
    insert into waybill.idempotency_keys (tenant_id, key, event_id)
    select 'acme', repeat('k', 1800) || i, waybill.first_id(now() - case when i % 4 = 0 then interval '1 hour' else interval '0' end)
    from generate_series(1, 20000) i`
  await session`vacuum analyze waybill.idempotency_keys`
  const pagesRead = async () => {
    await session`select pg_stat_force_next_flush()`
    const [row] = await session<[{ n: number }]>`
      select (heap_blks_read + heap_blks_hit)::int as n from pg_statio_user_tables where relname = 'idempotency_keys'`
    return row.n
  }
  const before = await pagesRead()
  assert.equal(await deleteKeys(session, new Date(Date.now() - 1_800_000)), 5000)
  const pages = (await pagesRead()) - before
  // Five for each that is found, locked and deleted. Twenty batches that all began with the first page would read eight.
  assert.ok(pages < 30_000, `${pages} pages`)
})
