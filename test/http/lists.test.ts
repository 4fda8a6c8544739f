import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { gate, startReceiver } from '../support/receiver.ts'
import { startTenant } from '../support/service.ts'
import { waitFor } from '../support/wait.ts'

type Row = Record<string, string> & { created_at: string }
type Page = { data: Row[]; limit: number; offset: number; has_more: boolean; next_cursor: string | null }

const { tenant } = await startTenant({ after }, { env: { RETRY_DELAY_SECONDS: '3600' } })
const receiver = await startReceiver({ after })
const list = async (path: string): Promise<Page> => {
  const { status, body, text } = await tenant.call('GET', path)
  assert.equal(status, 200, text)
  return body
}

/** Follows the cursors from `path` to the end; `between` runs after each page. */
async function walk(path: string, between: () => Promise<unknown> = async () => {}): Promise<Row[]> {
  const rows: Row[] = []
  let cursor: string | null = null
  do {
    const page: Page = await list(cursor ? `${path}&cursor=${cursor}` : path)
    assert.equal(page.has_more, page.next_cursor !== null)
    assert.ok(page.data.length > 0)
    if (page.has_more) assert.equal(page.data.length, page.limit)
    rows.push(...page.data)
    cursor = page.next_cursor
    await between()
  } while (cursor !== null)
  return rows
}

const column = (rows: Row[], name: string) => rows.map((row) => row[name])
const isFalling = (values: (string | undefined)[]) =>
  values.every((value, index) => index === 0 || (value ?? '') < (values[index - 1] ?? ''))

describe('filters of deliveries', () => {
  const ids: Record<string, string> = {}
  const deliveries: Record<string, string[]> = {}
  const { reply, open } = gate()
  after(open)
  before(async () => {
    for (const [name, answer] of Object.entries({
      delivered: 200,
      retrying: 500,
      dead_lettered: 410,
      pending: reply,
    })) {
      receiver.script(`/${name}`, answer)
      ids[name] = (
        await tenant.createEndpoint(receiver.url(`/${name}`), { subscribed_events: [`to.${name}`, 'to.all'] })
      ).endpoint_id
    }
    for (const name of Object.keys(ids)) deliveries[name] = (await tenant.publish(`to.${name}`)).delivery_ids
    await waitFor(async () => (await list('/v1/dlq')).data.length === 1)
    await waitFor(async () => (await list('/v1/deliveries?status=retrying')).data.length === 1)
    await waitFor(async () => (await list('/v1/deliveries?status=delivered')).data.length === 1)
  })

  test('status, endpoint and event type, alone and together', async () => {
    assert.equal((await list('/v1/deliveries')).data.length, 4)
    for (const [name, expected] of Object.entries(deliveries)) {
      for (const filter of [
        `status=${name}`,
        `endpoint_id=${ids[name]}`,
        `endpoint_id=${ids[name]?.toUpperCase()}`,
        `event_type=to.${name}`,
        `status=${name}&endpoint_id=${ids[name]}&event_type=to.${name}`,
      ]) {
        const { data } = await list(`/v1/deliveries?${filter}`)
        assert.deepEqual(column(data, 'delivery_id'), expected, filter)
        assert.deepEqual(column(data, 'status'), [name])
      }
      const other = name === 'pending' ? 'delivered' : 'pending'
      assert.deepEqual((await list(`/v1/deliveries?status=${other}&endpoint_id=${ids[name]}`)).data, [])
      assert.deepEqual((await list(`/v1/deliveries?event_type=to&endpoint_id=${ids[name]}`)).data, [])
    }
  })

  test('the dead letters are those that were given up on, with the same filters', async () => {
    const { data } = await list('/v1/dlq')
    assert.deepEqual(column(data, 'delivery_id'), deliveries.dead_lettered)
    assert.equal(data[0]?.dead_letter_reason, 'endpoint_gone')
    assert.deepEqual((await list(`/v1/dlq?endpoint_id=${ids.dead_lettered}&event_type=to.dead_lettered`)).data, data)
    assert.deepEqual((await list(`/v1/dlq?endpoint_id=${ids.delivered}`)).data, [])
  })

  test('since includes its moment, until does not', async () => {
    const { data } = await list('/v1/deliveries')
    for (const { created_at: at, delivery_id } of data) {
      const next = new Date(Date.parse(at) + 1).toISOString()
      const find = async (query: string) => column((await list(`/v1/deliveries?${query}`)).data, 'delivery_id')
      assert.ok((await find(`since=${at}`)).includes(delivery_id))
      assert.ok(!(await find(`since=${next}`)).includes(delivery_id))
      assert.ok((await find(`until=${next}`)).includes(delivery_id))
      assert.ok(!(await find(`until=${at}`)).includes(delivery_id))
      assert.deepEqual(
        await find(
          `since=${at}&until=${next}&event_type=${data.find((row) => row.delivery_id === delivery_id)?.event_type}`,
        ),
        [delivery_id],
      )
      // Between this millisecond and the next one.
      const finer = at.replace('Z', '4Z')
      assert.ok(!(await find(`since=${finer}`)).includes(delivery_id))
      assert.ok((await find(`until=${finer}`)).includes(delivery_id))
      const offset = `${new Date(Date.parse(at) + 2 * 3_600_000).toISOString().slice(0, -1)}%2B02:00`
      assert.deepEqual(await find(`since=${at.toLowerCase()}`), await find(`since=${at}`))
      assert.deepEqual(await find(`since=${offset}`), await find(`since=${at}`))
    }
  })

  test('active endpoints only', async () => {
    // 410 has made one inactive.
    const all = (await list('/v1/endpoints')).data
    assert.equal(all.length, 4)
    assert.equal((await list('/v1/endpoints?active_only=false')).data.length, 4)
    const active = (await list('/v1/endpoints?active_only=true')).data
    assert.deepEqual(
      active,
      all.filter((row) => row.endpoint_id !== ids.dead_lettered),
    )
  })
})

describe('pages', () => {
  const other = { id: '' }
  before(async () => {
    for (let i = 0; i < 12; i++) await tenant.createEndpoint(receiver.url('/many'), { subscribed_events: ['many'] })
    for (let i = 0; i < 4; i++) other.id = (await tenant.publish('many')).event_id
  })

  test('of deliveries go on where they ended, while others arrive', async () => {
    const before = column((await list('/v1/deliveries?event_type=many&limit=250')).data, 'delivery_id')
    assert.equal(before.length, 48)
    assert.ok(isFalling(before), 'newest first')
    const rows = await walk('/v1/deliveries?event_type=many&limit=7', () => tenant.publish('many'))
    assert.deepEqual(column(rows, 'delivery_id'), before)
  })

  test('by offset skip rows', async () => {
    const all = (await list('/v1/deliveries?event_type=many&limit=250')).data
    const page = await list('/v1/deliveries?event_type=many&limit=5&offset=10')
    assert.deepEqual(column(page.data, 'delivery_id'), column(all.slice(10, 15), 'delivery_id'))
    assert.deepEqual([page.limit, page.offset, page.has_more], [5, 10, true])
    const last = await list(`/v1/deliveries?event_type=many&limit=5&offset=${all.length - 5}`)
    assert.deepEqual([last.data.length, last.has_more, last.next_cursor], [5, false, null])
    const beyond = await list('/v1/deliveries?event_type=many&offset=10000')
    assert.deepEqual([beyond.data.length, beyond.has_more, beyond.next_cursor], [0, false, null])
    const { data, ...defaults } = await list('/v1/deliveries')
    assert.equal(data.length, 50)
    assert.deepEqual([defaults.limit, defaults.offset, defaults.has_more], [50, 0, true])
  })

  test('of an event’s deliveries', async () => {
    const path = `/v1/events/${other.id}/deliveries`
    const all = (await list(path)).data
    assert.equal(all.length, 12)
    assert.ok(isFalling(column(all, 'delivery_id')))
    assert.deepEqual(column(await walk(`${path}?limit=5`), 'delivery_id'), column(all, 'delivery_id'))
    assert.deepEqual(new Set(column(all, 'event_id')), new Set([other.id]))
  })

  test('of endpoints', async () => {
    const all = column((await list('/v1/endpoints?limit=250')).data, 'endpoint_id')
    assert.equal(all.length, 16)
    assert.ok(isFalling(all))
    const arrive = () => tenant.createEndpoint(receiver.url('/late'), { subscribed_events: ['late'] })
    assert.deepEqual(column(await walk('/v1/endpoints?limit=5', arrive), 'endpoint_id'), all)
  })

  test('of dead letters and attempts, oldest attempt first', async () => {
    receiver.script('/fails', 503)
    await tenant.createEndpoint(receiver.url('/fails'), { subscribed_events: ['fails'] })
    const { delivery_ids } = await tenant.publish('fails')
    const path = `/v1/deliveries/${delivery_ids[0]}`
    for (let made = 1; made <= 7; made++) {
      await waitFor(async () => (await tenant.call('GET', path)).body.attempt_count === made)
      if (made < 7) assert.equal((await tenant.call('POST', `${path}/replay`)).status, 202)
    }
    const rows = await walk(`${path}/attempts?limit=3`)
    assert.deepEqual(column(rows, 'attempt_number'), [1, 2, 3, 4, 5, 6, 7])
    assert.deepEqual(column((await list(`${path}/attempts?limit=2&offset=3`)).data, 'attempt_number'), [4, 5])
  })
})
