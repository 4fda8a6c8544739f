import assert from 'node:assert/strict'
import { suite, type TestContext, test } from 'node:test'
import { createDatabase } from './support/database.ts'
import { assertBooks, publishMany, settled, standingOf, watchInFlight } from './support/deliveries.ts'
import { startFailing } from './support/queue.ts'
import { gate, startReceiver } from './support/receiver.ts'
import { createTenant, startService, startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

/** An API, `workers` worker processes, a receiver and a tenant. */
async function start(t: TestContext, { workers = 1, env = {} }: { workers?: number; env?: Record<string, string> }) {
  const database = await createDatabase(t)
  const receiver = await startReceiver(t)
  const all = { RETRY_DELAY_SECONDS: '1', RETRY_DELAY_MAX_SECONDS: '1', BREAKER_PROBE_SECONDS: '1', ...env }
  const begin = (mode: 'api' | 'worker') => startService(t, { databaseUrl: database.url, mode, env: all })
  const [api, ...running] = await Promise.all([begin('api'), ...Array.from({ length: workers }, () => begin('worker'))])
  return { sql: database.sql, receiver, workers: running, tenant: await createTenant(api) }
}

suite('endpoints that fail', { concurrency: 3 }, () => {
  for (const workers of [1, 2]) {
    const whose = workers === 1 ? 'one worker' : `${workers} workers`
    test(`a breaker opens, lets probes through alone, and ramps up after one succeeds (${whose})`, async (t) => {
      const { sql, receiver, tenant } = await start(t, {
        workers,
        env: { BREAKER_FAILURES: '5', BREAKER_SECONDS: '1', ENDPOINT_CONCURRENCY: '10', RETRY_LIMIT: '50' },
      })
      receiver.script('/hook', 500)
      const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'))
      await publishMany(sql, tenant.tenantId, 100)
      /** In one statement: an attempt is committed together with what it does to the breaker. */
      const failedProbes = async (atLeast: number, held: number) => {
        const [row] = await sql<{ probes: number; attempts: number; next_in: number; gap: number }[]>`
          select failed_probes as probes, extract(epoch from next_probe_at - now())::float8 as next_in,
            (select count(*)::int from waybill.attempts) as attempts,
            (select extract(epoch from max(started_at) - min(started_at))::float8
              from (select started_at from waybill.attempts order by started_at desc limit 2) last_two) as gap
          from waybill.endpoint_stats
          where endpoint_id = ${id} and breaker = 'open' and probing is null and failed_probes >= ${atLeast} and held >= ${held}`
        return row
      }
      // A probe that finds another attempt still under way is put back, and the next comes after its lease.
      const patient = { timeoutMs: 90_000, what: 'probes to fail' }
      // All are held: nothing from before it opened is under way any more.
      const before = await waitFor(() => failedProbes(1, 100), patient)
      await publishMany(sql, tenant.tenantId, 100)
      const after = await waitFor(() => failedProbes(before.probes + 2, 0), patient)
      assert.equal(after.attempts - before.attempts, after.probes - before.probes, 'nothing but probes goes out')
      const wait = 2 ** after.probes
      assert.ok(after.next_in <= wait, `the next probe comes in ${after.next_in} s`)
      assert.ok(after.gap > wait / 2 - 0.1, `the last one came after ${after.gap} s`)

      let trampled = 0
      const seen = watchInFlight(receiver, '/hook', 200, {
        delayMs: 30,
        look: (inFlight, done) => {
          if (inFlight > workers * (2 + done)) trampled++
        },
      })
      await settled(sql)
      assert.equal(trampled, 0, 'never more at once than have succeeded before')
      assert.ok(seen.most <= 10 * workers, `never more than the cap: ${seen.most}`)
      assert.equal((await standingOf(sql, id)).breaker, 'closed')
      const ids = new Set(receiver.receipts.map(({ headers }) => headers['webhook-id']))
      assert.equal(ids.size, 200)
      await assertBooks(sql)
      const [attempts] = await sql`select count(*)::int as n from waybill.attempts`
      assert.equal(attempts!.n, receiver.receipts.length)
    })
  }

  test('a delivery that was held goes on with the retries it had left', async (t) => {
    const { sql, receiver, tenant } = await start(t, {
      env: { BREAKER_FAILURES: '1', BREAKER_SECONDS: '0', RETRY_LIMIT: '3' },
    })
    receiver.script('/hook', 500)
    await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.publish()
    await settled(sql)
    const attempts = await sql`select attempt_number, retry_state from waybill.attempts order by 1`
    assert.deepEqual(
      attempts.map((row) => [row.attempt_number, row.retry_state]),
      [
        [1, 'will_retry'],
        [2, 'will_retry'],
        [3, 'will_retry'],
        [4, 'exhausted'],
      ],
    )
    assert.equal(receiver.receipts.length, 4)
    await assertBooks(sql)
  })

  test('an inactive endpoint holds 5,000 deliveries and goes on where it stopped', async (t) => {
    const { sql, receiver, tenant } = await start(t, { workers: 2 })
    // Else a slow machine might have sent all of them before the change is made.
    const change = gate(200)
    const reply = () => (receiver.receipts.length < 300 ? 200 : change.reply)
    watchInFlight(receiver, '/hook', reply, { delayMs: 20 })
    const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'))
    await publishMany(sql, tenant.tenantId, 5000)
    await receiver.until(300, { timeoutMs: 30_000 })
    await tenant.call('PATCH', `/v1/endpoints/${id}`, { body: { is_active: false } })
    const atOnce = receiver.receipts.length
    change.open()
    await waitFor(async () => (await standingOf(sql, id)).held === 5000 - receiver.receipts.length, {
      timeoutMs: 60_000,
      what: 'the rest to be held',
    })
    const stopped = receiver.receipts.length
    assert.ok(stopped - atOnce <= 500, `${stopped - atOnce} came after the deactivation`)
    // What is ordered goes out as one look at what is held follows another.
    const ordered = { url: receiver.url('/later'), subscribed_events: ['later'], ordered: true }
    await tenant.call('POST', '/v1/endpoints', { body: ordered })
    await publishMany(sql, tenant.tenantId, 50, 'later')
    await receiver.until(50, { path: '/later' })
    assert.equal(receiver.at('/hook').length, stopped)
    const queued = () => sql`select from pgboss.job where name = 'deliveries'`
    await waitFor(async () => (await queued()).length === 0, { what: 'nothing to be queued' })
    await assertBooks(sql)
    await tenant.call('PATCH', `/v1/endpoints/${id}`, { body: { is_active: true } })
    await settled(sql)
    assert.equal(receiver.at('/hook').length, 5000, 'each arrived once')
    await assertBooks(sql)
  })

  test('an endpoint that has only failed for days is disabled, and any success starts the days anew', async (t) => {
    const { sql, receiver, tenant } = await start(t, { env: { RETRY_LIMIT: '20', BREAKER_FAILURES: '3' } })
    const backdate = (id: string) =>
      sql`update waybill.endpoint_stats set failing_since = now() - interval '5 days 1 minute' where endpoint_id = ${id}`
    const failing = await tenant.createEndpoint(receiver.url('/failing'), { subscribed_events: ['a'] })
    const lucky = await tenant.createEndpoint(receiver.url('/lucky'), { subscribed_events: ['b'] })
    receiver.script('/failing', 500)
    const luck = gate(200)
    receiver.script('/lucky', 500, luck.reply, 500, 200)
    await tenant.publish('a')
    await tenant.publish('b')
    const failed = (id: string) =>
      sql`select from waybill.endpoint_stats where endpoint_id = ${id} and failure_streak > 0`
    await waitFor(
      async () => (await failed(failing.endpoint_id)).length + (await failed(lucky.endpoint_id)).length === 2,
    )
    await backdate(failing.endpoint_id)
    await backdate(lucky.endpoint_id)
    luck.open()
    await receiver.until(2, { path: '/lucky' })
    await waitFor(async () => (await failed(lucky.endpoint_id)).length === 0, { what: 'the success to count' })
    await tenant.publish('b')
    await receiver.until(4, { path: '/lucky' })
    const disabled = await waitFor(
      async () => {
        const [row] =
          await sql`select * from waybill.endpoints where endpoint_id = ${failing.endpoint_id} and not is_active`
        return row
      },
      { what: 'the endpoint to be disabled' },
    )
    assert.equal(disabled.inactive_reason, 'failing')
    assert.ok(receiver.at('/failing').length >= 3, 'days that lie between two failures are not enough')
    assert.ok(Date.now() - disabled.inactive_since < 60_000)
    const [active] = await sql`select is_active from waybill.endpoints where endpoint_id = ${lucky.endpoint_id}`
    assert.equal(active!.is_active, true)

    // Active again, it has its days again: the next failure does not disable it.
    const since = receiver.at('/failing').length
    await tenant.call('PATCH', `/v1/endpoints/${failing.endpoint_id}`, { body: { is_active: true } })
    await receiver.until(since + 2, { path: '/failing' })
    const [again] = await sql`select is_active from waybill.endpoints where endpoint_id = ${failing.endpoint_id}`
    assert.equal(again!.is_active, true)
    await waitFor(() => assertBooks(sql).then(() => true))
  })

  for (const [what, since, days] of [
    ['not failed for as many days yet', '4 days 23 hours', '5'],
    ['failed for a year, where no number of days is set', '1 year', '0'],
  ] as const) {
    test(`an endpoint that has ${what} stays active`, async (t) => {
      const { sql, receiver, tenant } = await start(t, {
        env: { ENDPOINT_DISABLE_DAYS: days, RETRY_LIMIT: '20', BREAKER_FAILURES: '3' },
      })
      receiver.script('/hook', 500)
      await tenant.createEndpoint(receiver.url('/hook'))
      await tenant.publish()
      const backdate = () => sql`
        update waybill.endpoint_stats set failing_since = now() - ${since}::text::interval where failure_streak > 0 returning failure_streak`
      const [before] = await waitFor(async () => {
        const rows = await backdate()
        return rows.length > 0 ? rows : null
      })
      // An attempt is committed together with what it does to the endpoint.
      const later = await waitFor(
        async () => {
          const [row] = await sql`
            select is_active, failing_since < now() - ${since}::text::interval as is_old from waybill.endpoints
            join waybill.endpoint_stats using (tenant_id, endpoint_id)
            where failure_streak >= greatest(3, ${before!.failure_streak}::int) + 2 or not is_active`
          return row
        },
        { timeoutMs: 30_000, what: 'more failures' },
      )
      assert.deepEqual({ ...later }, { is_active: true, is_old: true })
    })
  }

  test('operational events reach endpoints that name them, never the one they are about, and do not go in circles', async (t) => {
    const { sql, receiver, tenant } = await start(t, {})
    const told = ['endpoint.disabled', 'endpoint.recovered', 'delivery.dead_lettered']
    receiver.script('/gone', 410)
    receiver.script('/gone-too', 410)
    const gone = await tenant.createEndpoint(receiver.url('/gone'), { subscribed_events: ['a', ...told] })
    const goneToo = await tenant.createEndpoint(receiver.url('/gone-too'), { subscribed_events: told })
    await tenant.createEndpoint(receiver.url('/watcher'), { subscribed_events: told })
    await tenant.createEndpoint(receiver.url('/all'))
    const { event_id, delivery_ids } = await tenant.publish('a')
    await receiver.until(3, { path: '/watcher' })
    // What came for an endpoint as it went away waits there.
    const due = () =>
      sql`select from waybill.deliveries join waybill.endpoints using (tenant_id, endpoint_id) where status in ('pending', 'retrying') and is_active`
    await waitFor(async () => (await due()).length === 0, { what: 'what is due to be sent' })
    // What is told of these comes behind whatever else there is to tell.
    receiver.script('/gone-last', 410)
    const goneLast = await tenant.createEndpoint(receiver.url('/gone-last'), { subscribed_events: ['last'] })
    await tenant.publish('last')
    await receiver.until(5, { path: '/watcher' })
    await waitFor(async () => (await due()).length === 0, { what: 'what is due to be sent' })
    const bodies = receiver.at('/watcher').map(({ body }) => JSON.parse(body.toString()))
    const about = bodies.map(({ type, data }) => `${type} ${data.endpoint_id}`).sort()
    assert.deepEqual(
      about,
      [
        `delivery.dead_lettered ${gone.endpoint_id}`,
        `delivery.dead_lettered ${goneLast.endpoint_id}`,
        `endpoint.disabled ${gone.endpoint_id}`,
        `endpoint.disabled ${goneToo.endpoint_id}`,
        `endpoint.disabled ${goneLast.endpoint_id}`,
      ].sort(),
    )
    const { delivery_id, ...dead } = bodies.find(({ type }) => type === 'delivery.dead_lettered').data
    assert.ok(delivery_ids.includes(delivery_id))
    const { endpoint_id } = gone
    const why = { event_type: 'a', dead_letter_reason: 'endpoint_gone', attempt_count: 1 }
    assert.deepEqual(dead, { event_id, endpoint_id, ...why })
    const {
      state_since: since,
      created_at,
      updated_at,
    } = (await tenant.call('GET', `/v1/endpoints/${endpoint_id}`)).body
    const disabled = bodies.find(({ data }) => data.endpoint_id === endpoint_id && data.reason)?.data
    assert.deepEqual(disabled, { endpoint_id, url: receiver.url('/gone'), reason: 'gone', since })
    assert.notEqual(updated_at, created_at)
    assert.equal(receiver.at('/gone').length, 1)
    assert.equal(receiver.at('/all').length, 2, '* does not stand for operational events')
    await assertBooks(sql)
  })

  test('an endpoint that says twice that it is gone is disabled, and announced, once, by an event that the month does not count', async (t) => {
    const { receiver, tenant } = await start(t, {})
    const [first, second] = [gate(410), gate(410)]
    receiver.script('/gone', first.reply, second.reply)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/gone'), { subscribed_events: ['a'] })
    await tenant.createEndpoint(receiver.url('/watcher'), {
      subscribed_events: ['endpoint.disabled', 'delivery.dead_lettered'],
    })
    await Promise.all([tenant.publish('a'), tenant.publish('a')])
    await receiver.until(2, { path: '/gone' })
    first.open()
    const told = () => receiver.at('/watcher').map(({ body }) => JSON.parse(body.toString()).type)
    await receiver.until(2, { path: '/watcher' })
    const { updated_at } = (await tenant.call('GET', `/v1/endpoints/${endpoint_id}`)).body
    second.open()
    await receiver.until(3, { path: '/watcher' })
    assert.deepEqual(told().sort(), ['delivery.dead_lettered', 'delivery.dead_lettered', 'endpoint.disabled'])
    const usage = (await tenant.call('GET', '/v1/usage/current')).body
    assert.deepEqual([usage.events_count, usage.attempts_count], [2, 5])
    assert.equal((await tenant.call('GET', `/v1/endpoints/${endpoint_id}`)).body.updated_at, updated_at)
  })

  for (const [what, retrySeconds, held, replayed] of [
    ['is held behind another', '1', 2, 1],
    ['waits for its retry while another is held', '3600', 1, 0],
  ] as const) {
    test(`a replay of what ${what} has a failing endpoint probed with it at once`, async (t) => {
      const { sql, receiver, tenant } = await start(t, {
        env: {
          BREAKER_FAILURES: '1',
          BREAKER_SECONDS: '0',
          BREAKER_PROBE_SECONDS: '3600',
          BREAKER_PROBE_MAX_SECONDS: '3600',
          RETRY_DELAY_SECONDS: retrySeconds,
          RETRY_DELAY_MAX_SECONDS: retrySeconds,
        },
      })
      receiver.script('/hook', 500, 200)
      const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'))
      const [first] = (await tenant.publish()).delivery_ids
      await waitFor(async () => (await standingOf(sql, id)).breaker === 'open', { what: 'the breaker to be open' })
      const [second] = (await tenant.publish()).delivery_ids
      await waitFor(async () => (await standingOf(sql, id)).held === held, { what: 'what is not queued to be held' })
      const probe = [first, second][replayed]
      assert.equal((await tenant.call('POST', `/v1/deliveries/${probe}/replay`)).status, 202)
      await receiver.until(2)
      assert.equal(receiver.receipts[1]!.headers['service-delivery-id'], probe)
      await settled(sql)
      assert.equal(receiver.receipts.length, 3)
      await assertBooks(sql)
    })
  }

  test('a probe that meets an older attempt is made once that has ended', async (t) => {
    const { sql, receiver, tenant } = await start(t, {
      env: {
        BREAKER_FAILURES: '3',
        BREAKER_SECONDS: '0',
        BREAKER_PROBE_SECONDS: '1',
        RETRY_DELAY_SECONDS: '3600',
        RETRY_DELAY_MAX_SECONDS: '3600',
        // A probe that is not heard of is given up after ten seconds more.
        ATTEMPT_TIMEOUT_SECONDS: '60',
      },
    })
    const older = gate(500)
    receiver.script('/hook', older.reply, 500, 500, 500, 200)
    const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.publish()
    await receiver.until(1)
    for (let n = 0; n < 3; n++) await tenant.publish()
    await waitFor(async () => (await standingOf(sql, id)).breaker === 'open', { what: 'the breaker to be open' })
    const [probe] = (await tenant.publish()).delivery_ids
    const [published] = await sql`select updated_at::text as at from waybill.deliveries where delivery_id = ${probe!}`
    const heldAgain = () =>
      sql`select from waybill.deliveries where delivery_id = ${probe!} and held and updated_at > ${published!.at}::text::timestamptz`
    await waitFor(async () => (await heldAgain()).length > 0, { what: 'the probe to be turned away' })
    older.open()
    await receiver.until(5)
    await assertBooks(sql)
  })

  test('while an endpoint recovers, the API says so, and how many deliveries are held', async (t) => {
    const { sql, receiver, tenant } = await start(t, {
      env: {
        BREAKER_FAILURES: '1',
        BREAKER_SECONDS: '0',
        RETRY_DELAY_SECONDS: '3600',
        RETRY_DELAY_MAX_SECONDS: '3600',
      },
    })
    const { reply, open } = gate()
    receiver.script('/hook', 500, 200, reply)
    const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/hook'))
    await tenant.publish()
    await waitFor(async () => (await standingOf(sql, id)).breaker === 'open', { what: 'the breaker to be open' })
    await publishMany(sql, tenant.tenantId, 7)
    const shown = async () => {
      const { state, state_reason, state_since, held_count, next_probe_at } = (
        await tenant.call('GET', `/v1/endpoints/${id}`)
      ).body
      return { state, state_reason, isDated: state_since !== null, held_count, next_probe_at }
    }
    const heldOfAll = async () => (await tenant.call('GET', '/v1/metrics/summary')).body.held_count
    // The first, the probe, and the first two that follow it. Two more are queued.
    await receiver.until(4)
    // These are held again after a moment, and queued again, until the first two are answered.
    const recovering = await waitFor(
      async () => {
        const now = await shown()
        return now.held_count === 2 && (await heldOfAll()) === 2 ? now : undefined
      },
      { what: 'the last two to be held' },
    )
    const reason = 'it is getting what was held, in growing chunks'
    assert.deepEqual(recovering, {
      state: 'recovering',
      state_reason: reason,
      isDated: true,
      held_count: 2,
      next_probe_at: null,
    })
    open()
    await receiver.until(8)
    await waitFor(async () => (await shown()).state === 'active', { what: 'it to have recovered' })
    assert.deepEqual(await shown(), {
      state: 'active',
      state_reason: null,
      isDated: false,
      held_count: 0,
      next_probe_at: null,
    })
    assert.equal(await heldOfAll(), 0)
  })

  test('no probe is shown of an ordered endpoint whose first delivery waits for its own retry', async (t) => {
    const { url: databaseUrl, sql } = await createDatabase(t)
    const { call } = await createTenant(await startService(t, { databaseUrl, mode: 'api' }), { tenant_id: 'acme' })
    const { endpoint } = await startFailing(sql, [false, true])
    const probeAt = async () => (await call('GET', `/v1/endpoints/${endpoint}`)).body.next_probe_at
    assert.notEqual(await probeAt(), null)
    await sql`update waybill.endpoints set ordered = true`
    assert.equal(await probeAt(), null)
  })

  test('an endpoint that recovers is announced', async (t) => {
    const { sql, receiver, tenant } = await start(t, { env: { BREAKER_FAILURES: '1', BREAKER_SECONDS: '0' } })
    receiver.script('/hook', 500, 200)
    const { endpoint_id } = await tenant.createEndpoint(receiver.url('/hook'), { subscribed_events: ['a'] })
    await tenant.createEndpoint(receiver.url('/watcher'), { subscribed_events: ['endpoint.recovered'] })
    await tenant.publish('a')
    const [receipt] = await receiver.until(1, { path: '/watcher' })
    const body = JSON.parse(receipt!.body.toString())
    assert.deepEqual([body.type, body.data.endpoint_id], ['endpoint.recovered', endpoint_id])
    await settled(sql)
    await assertBooks(sql)
  })

  test('an endpoint with a new URL is not blamed for what fails at the old one', async (t) => {
    const env = { ATTEMPT_TIMEOUT_SECONDS: '4', ENDPOINT_CONCURRENCY: '20', RETRY_DELAY_SECONDS: '1' }
    const { sql, receiver, tenant, workers } = await start(t, { env })
    receiver.script('/old', 500, () => new Promise<never>(() => {}))
    const { endpoint_id: id } = await tenant.createEndpoint(receiver.url('/old'))
    await publishMany(sql, tenant.tenantId, 60)
    await receiver.until(15, { path: '/old' })
    await waitFor(async () => (await standingOf(sql, id)).held > 20, { what: 'some to be held' })
    await tenant.call('PATCH', `/v1/endpoints/${id}`, { body: { url: receiver.url('/new') } })
    await settled(sql)
    const moves = workers[0]!.logs.filter(({ msg }) => msg === 'endpoint.state_changed').map(({ to }) => to)
    assert.ok(!moves.includes('open'), moves.join())
    assert.equal(receiver.at('/new').length, 60)
    await assertBooks(sql)
  })

  test('what waits for a failing endpoint is dead-lettered with all else when the month is used up', async (t) => {
    const { databaseUrl, sql, tenant } = await startTenant(t, { mode: 'api' })
    const { endpoint_id } = await tenant.createEndpoint('http://127.0.0.1:9/failing')
    await sql`
      insert into waybill.endpoint_stats (tenant_id, endpoint_id, breaker, breaker_since, next_probe_at)
      values (${tenant.tenantId}, ${endpoint_id}, 'open', now(), now())`
    await publishMany(sql, tenant.tenantId, 5)
    await startService(t, {
      databaseUrl,
      mode: 'worker',
      env: { MONTHLY_ATTEMPT_LIMIT: '0', ATTEMPT_TIMEOUT_SECONDS: '60' },
    })
    const dead = () => sql`select from waybill.deliveries where status = 'dead_lettered'`
    await waitFor(async () => (await dead()).length === 5, { timeoutMs: 30_000, what: 'all to be dead-lettered' })
  })
})
