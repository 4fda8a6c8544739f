import assert from 'node:assert/strict'
import { once } from 'node:events'
import { readFile } from 'node:fs/promises'
import { connect, type Socket } from 'node:net'
import { type TestContext, test } from 'node:test'
import { cleanUp } from './support/cleanup.ts'
import { createDatabase } from './support/database.ts'
import { type Service, startService } from './support/service.ts'
import { waitFor } from './support/wait.ts'

const REQUEST = 'GET /v1/endpoints HTTP/1.1\r\nhost: waybill\r\n\r\n'

async function start(t: TestContext): Promise<{ service: Service; open: (count: number) => Socket[] }> {
  const { url: databaseUrl } = await createDatabase(t)
  const service = await startService(t, { databaseUrl, mode: 'api' })
  const open = (count: number) =>
    Array.from({ length: count }, () => {
      const socket = connect(service.port, '127.0.0.1')
      cleanUp(t, () => void socket.destroy())
      return socket
    })
  return { service, open }
}

async function ask(socket: Socket, request = REQUEST): Promise<void> {
  socket.write(request)
  const [answer] = await once(socket, 'data')
  assert.match(String(answer), /^HTTP\/1\.1 401 /)
}

test('new connections are taken while hundreds of others ask as fast as they are answered', async (t) => {
  const { open } = await start(t)
  let answered = 0
  for (const socket of open(800)) {
    socket.on('data', () => {
      answered++
      socket.write(REQUEST)
    })
    socket.write(REQUEST)
  }
  const meanwhile: number[] = []
  for (let round = 1; round <= 3; round++) {
    await waitFor(() => answered > round * 2000)
    const before = answered
    await Promise.all(open(100).map((socket) => ask(socket)))
    meanwhile.push(answered - before)
  }
  t.diagnostic(`answered meanwhile: ${meanwhile}`)
  // Each waits for one turn of the event loop, or two, in which 32 others begin. Once they were all who had asked.
  assert.ok(Math.min(...meanwhile) < 100 * 80, `${meanwhile} others were answered meanwhile`)
})

test('connections that come while the process is busy wait, a thousand at least, unless the system keeps fewer', async (t) => {
  const { service, open } = await start(t)
  const count = Math.min(1000, Number(await readFile('/proc/sys/net/core/somaxconn', 'utf8')))
  service.signal('SIGSTOP')
  cleanUp(t, () => service.signal('SIGCONT'))
  const sockets = open(count)
  await Promise.all(sockets.map((socket) => once(socket, 'connect')))
  service.signal('SIGCONT')
  await Promise.all(sockets.map((socket) => ask(socket)))
})

test('thousands of requests with a thousand headers at once are not kept waiting together', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  // Each takes 130 KiB.
  const service = await startService(t, { databaseUrl, mode: 'api', flags: ['--max-old-space-size=100'] })
  const request = REQUEST.replace(/\r\n$/, `${Array.from({ length: 900 }, (_, n) => `a${n}:${n}\r\n`).join('')}\r\n`)
  const sockets: Socket[] = []
  while (sockets.length < 1600) {
    const some = Array.from({ length: 200 }, () => connect(service.port, '127.0.0.1'))
    for (const socket of some) cleanUp(t, () => void socket.destroy())
    await Promise.all(some.map((socket) => once(socket, 'connect')))
    sockets.push(...some)
  }
  await Promise.all(sockets.map((socket) => ask(socket, request)))
})
