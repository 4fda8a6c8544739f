import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { connect } from 'node:net'
import { test } from 'node:test'
import { cleanUp } from './support/cleanup.ts'
import { startReceiver } from './support/receiver.ts'
import { startTenant } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const FILES = 128
const skip = spawnSync('prlimit', ['--version']).status === 0 ? false : 'needs Linux (prlimit)'
/** Lowers the limit of the process that imports it. */
const LIMITED = `data:text/javascript,import { execFileSync } from 'node:child_process'; execFileSync('prlimit', ['--pid', String(process.pid), '--nofile=${FILES}'])`

test('clients leave the files that delivering takes, and the log tells that they are refused', { skip }, async (t) => {
  const receiver = await startReceiver(t)
  const { sql, service, tenant } = await startTenant(t, { flags: ['--import', LIMITED] })
  await tenant.createEndpoint(receiver.url('/hook'))
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
  assert.ok(Number(refused) > 10 && Number(connections) < FILES / 2, `${refused} refused at ${connections}`)
})
