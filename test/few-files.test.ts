import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { connect, createServer } from 'node:net'
import { test } from 'node:test'
import { limitClients } from '../src/http/server/limit-clients.ts'
import { cleanUp } from './support/cleanup.ts'
import { startReceiver } from './support/receiver.ts'
import { startTenant } from './support/service.ts'
import { listen, listenTcp, onRequest } from './support/tcp.ts'
import { waitFor } from './support/wait.ts'

const FILES = 128
const FEWER = 96
const skip = spawnSync('prlimit', ['--version']).status === 0 ? false : 'needs Linux (prlimit)'
/** Lowers the limit of the process that imports it. */
const limited = (files: number) =>
  `data:text/javascript,import { execFileSync } from 'node:child_process'; execFileSync('prlimit', ['--pid', String(process.pid), '--nofile=${files}'])`

test('clients leave the files that delivering takes, and the log tells that they are refused', { skip }, async (t) => {
  const receiver = await startReceiver(t)
  const { sql, service, tenant } = await startTenant(t, { flags: ['--import', limited(FILES)] })
  await tenant.createEndpoint(receiver.url('/hook'))
  const began = performance.now()
  // They ask, stay, and come back when they are cut off.
  let isOver = false
  let answered = 0
  cleanUp(t, () => {
    isOver = true
  })
  const stay = (): void => {
    if (isOver) return
    const socket = connect(service.port, '127.0.0.1')
    cleanUp(t, () => void socket.destroy())
    socket.on('error', () => {}).on('data', () => answered++)
    socket.once('close', () => setTimeout(stay, 200).unref())
    socket.write('GET /v1/endpoints HTTP/1.1\r\nhost: waybill\r\n\r\n')
  }
  for (let n = 0; n < 2 * FILES; n++) stay()
  await waitFor(() => answered > 10)
  await tenant.publish()
  await receiver.until(1, { path: '/hook' })
  // And those that it takes to get back lost connections to the database.
  await sql`
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and application_name like 'waybill%'`
  const isPublished = () =>
    tenant.publish().then(
      () => true,
      () => false,
    )
  await waitFor(isPublished, { intervalMs: 250, what: 'an event to be accepted' })
  await receiver.until(2, { path: '/hook' })
  const { refused, connections } = await service.logged('http.full')
  // As many again are for receivers.
  assert.ok(Number(refused) > 10 && Number(connections) < FILES / 4, `${refused} refused at ${connections}`)
  const told = service.logs.filter(({ msg }) => msg === 'http.full').length
  assert.ok(told <= 1 + (performance.now() - began) / 1000, `told ${told} times`)
})

test('where nothing is delivered, clients may have all files that are left', { skip }, async (t) => {
  const { service } = await startTenant(t, { mode: 'api', flags: ['--import', limited(FILES)] })
  for (let n = 0; n < FILES; n++) {
    const socket = connect(service.port, '127.0.0.1').on('error', () => {})
    cleanUp(t, () => void socket.destroy())
  }
  const { connections } = await service.logged('http.full')
  assert.ok(Number(connections) > FILES / 4, `full at ${connections}`)
})

test('a worker makes no more attempts at once than there are files for receivers, and says so', { skip }, async (t) => {
  let underWay = 0
  let most = 0
  const receiver = await listenTcp(
    (socket) =>
      onRequest(socket, () => {
        most = Math.max(most, ++underWay)
        setTimeout(() => {
          underWay--
          socket.end('HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n')
        }, 100)
      }),
    '0.0.0.0',
  )
  cleanUp(t, receiver.close)
  const { service, tenant } = await startTenant(t, {
    flags: ['--import', limited(FILES)],
    env: { WORKER_CONCURRENCY: '100', ENDPOINT_CONCURRENCY: '100' },
  })
  const concurrency = Number((await service.logged('worker.few_files')).concurrency)
  assert.ok(concurrency < FILES / 4, `${concurrency} at once`)
  for (let n = 1; n <= 50; n++) await tenant.createEndpoint(`http://127.0.1.${n}:${receiver.port}/`)
  await tenant.publish()
  await tenant.publish()
  await waitFor(
    () =>
      service.logs.filter(({ msg, status_code }) => msg === 'delivery.attempted' && status_code === 200).length === 100,
  )
  assert.ok(most > 1 && most <= concurrency, `${most} at once`)
})

test('an endpoint has recovered once it gets as much at once as files allow a worker', { skip }, async (t) => {
  const receiver = await startReceiver(t)
  const { sql, service, tenant } = await startTenant(t, {
    flags: ['--import', limited(FILES)],
    env: { WORKER_CONCURRENCY: '100', ENDPOINT_CONCURRENCY: '100' },
  })
  const { concurrency } = await service.logged('worker.few_files')
  await tenant.createEndpoint(receiver.url('/hook'))
  await tenant.publish()
  await receiver.until(1, { path: '/hook' })
  // As if more were held than are there: an endpoint has recovered, too, once nothing is.
  await sql`update waybill.endpoint_stats set breaker = 'half_open', ramp = ${Number(concurrency)}, held = 1000`
  await tenant.publish()
  await waitFor(async () => (await sql`select from waybill.endpoint_stats where breaker = 'closed'`).length === 1)
})

test('clients that are refused after the log has told of others are told of, too, and each once', async (t) => {
  const told: number[] = []
  const server = createServer()
  limitClients(server, 1, (refused) => told.push(refused))
  const { port, close } = await listen(server, 'unused', () => {})
  cleanUp(t, close)
  const come = () => {
    const socket = connect(port, '127.0.0.1').on('error', () => {})
    cleanUp(t, () => void socket.destroy())
  }
  come()
  for (const refused of [[2], [2, 3]]) {
    for (let n = 0; n < (refused.at(-1) ?? 0); n++) come()
    await waitFor(() => told.length === refused.length)
    assert.deepEqual(told, refused)
  }
})

test('connections to receivers are kept only while others need no file for theirs', { skip }, async (t) => {
  const receiver = await listenTcp(
    (socket) => onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n')),
    '0.0.0.0',
  )
  cleanUp(t, receiver.close)
  const { service, tenant } = await startTenant(t, {
    flags: ['--import', limited(FEWER)],
    env: { WORKER_CONCURRENCY: '20' },
  })
  for (let n = 1; n <= 100; n++) await tenant.createEndpoint(`http://127.0.1.${n}:${receiver.port}/`)
  const { delivery_ids } = await tenant.publish()
  const attempted = () => service.logs.filter(({ msg }) => msg === 'delivery.attempted')
  await waitFor(() => attempted().length === delivery_ids.length)
  assert.deepEqual(
    service.logs.filter(({ msg }) => msg === 'delivery.put_off'),
    [],
  )
  assert.ok(attempted().every(({ status_code }) => status_code === 200))
})
