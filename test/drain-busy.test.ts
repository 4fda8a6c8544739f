import assert from 'node:assert/strict'
import { once } from 'node:events'
import { test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { Worker } from 'node:worker_threads'
import type { App } from '../src/http/route.ts'
import { listen } from '../src/http/server/listen.ts'

/** A client on a thread of its own: asks at once, and again over the same connection when it is told to. */
const CLIENT = `
  const { parentPort, workerData: { port, sent } } = require('node:worker_threads')
  const socket = require('node:net').connect(port, '127.0.0.1')
  const ask = (done) => socket.write('GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n', done)
  socket.on('data', (chunk) => parentPort.postMessage(String(chunk)))
  socket.on('error', ({ code }) => parentPort.postMessage(code))
  parentPort.on('message', () => ask(() => Atomics.store(sent, 0, 1)))
  ask()
`

test('a request that has come while the process was busy is answered before its connection is closed', async (t) => {
  const app = { fetch: () => new Response('well') } as unknown as App
  const server = await listen(app, { hostname: '127.0.0.1', port: 0, maxClients: Infinity, onFull: () => {} })
  const sent = new Int32Array(new SharedArrayBuffer(4))
  const client = new Worker(CLIENT, { eval: true, workerData: { port: server.port, sent } })
  t.after(() => client.terminate())
  const [first] = await once(client, 'message')
  assert.match(first, /^HTTP\/1.1 200/)
  const closed = server.close(5000)
  await sleep(100)
  // As if an answer were made: timers that are due come next, then what has arrived.
  await new Promise(setImmediate)
  client.postMessage('ask')
  // Until it is sent, and idle connections are to be closed.
  for (const begun = performance.now(); Atomics.load(sent, 0) === 0 || performance.now() - begun < 1500; );
  const [second] = await once(client, 'message')
  assert.match(second, /^HTTP\/1.1 200[\s\S]*connection: close/i)
  await closed
})
