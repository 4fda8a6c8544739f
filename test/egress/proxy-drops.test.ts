import assert from 'node:assert/strict'
import { once } from 'node:events'
import { connect } from 'node:net'
import { test } from 'node:test'
import { parseRange } from '../../src/egress/address.ts'
import { createSender } from '../../src/egress/send.ts'
import { listenTcp, onRequest } from '../support/tcp.ts'

test('an egress proxy that drops what it has not answered, as when it restarts, is asked once more', async (t) => {
  const receiver = await listenTcp((socket) =>
    onRequest(socket, () => socket.write('HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n')),
  )
  let dropsLeft = 1
  const proxy = await listenTcp((socket) =>
    socket.once('data', () => {
      if (dropsLeft-- > 0) return void socket.resetAndDestroy()
      const up = connect(receiver.port, '127.0.0.1', () => socket.write('HTTP/1.1 200 Connected\r\n\r\n'))
      socket.pipe(up).pipe(socket)
    }),
  )
  const sender = createSender({
    allow: [parseRange('127.0.0.0/8')!],
    timeoutMs: 2000,
    proxyUrl: `http://127.0.0.1:${proxy.port}`,
  })
  t.after(async () => {
    sender.close()
    await Promise.all([receiver.close(), proxy.close()])
  })
  const send = () => sender.send({ url: receiver.url, headers: {}, body: '{}' })
  assert.equal((await send()).statusCode, 200)
  dropsLeft = 2
  assert.equal((await send()).error, 'proxy_error')
  assert.equal(proxy.sockets.length, 4)
})

test('a connection on which an egress proxy has refused a receiver is not kept', async (t) => {
  const proxy = await listenTcp((socket) =>
    socket.once('data', () => socket.write('HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n')),
  )
  const sender = createSender({ allow: [], timeoutMs: 2000, proxyUrl: `http://127.0.0.1:${proxy.port}` })
  t.after(async () => {
    sender.close()
    await proxy.close()
  })
  const { error } = await sender.send({ url: 'http://a.example.test/', headers: {}, body: '{}' })
  assert.equal(error, 'blocked_destination')
  const [socket] = proxy.sockets
  if (!socket!.closed) await once(socket!, 'close', { signal: AbortSignal.timeout(5000) })
})
