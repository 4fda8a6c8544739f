import assert from 'node:assert/strict'
import { createServer, type Socket } from 'node:net'
import { test } from 'node:test'
import { parseRange } from '../../src/egress/address.ts'
import { createSender } from '../../src/egress/send.ts'
import { listen } from '../support/tcp.ts'

/** handshake_failure, fatal. */
const ALERT = Buffer.from('15030300020228', 'hex')

for (const how of ['leaves', 'resets the connection', 'leaves without a word'])
  test(`many attempts at once to a receiver that refuses TLS and ${how} fail at once, and are told why`, async (t) => {
    // All at once, so that what each sends waits for its turn.
    const refused: Socket[] = []
    const receiver = await listen(createServer(), 'connection', (socket: Socket) => {
      socket.on('error', () => {})
      socket.once('data', () => {
        if (refused.push(socket) < 50) return
        for (const one of refused.splice(0)) {
          if (how === 'leaves without a word') one.destroy()
          else one.end(ALERT)
          if (how === 'resets the connection') setTimeout(() => one.resetAndDestroy(), 1)
        }
      })
    })
    t.after(() => receiver.close())
    const sender = createSender({ allow: [parseRange('127.0.0.0/8')!], timeoutMs: 3000 })
    t.after(() => sender.close())
    const url = receiver.url.replace('http:', 'https:')
    const errors = await Promise.all(
      Array.from({ length: 50 }, async () => (await sender.send({ url, headers: {}, body: '{}' })).error),
    )
    assert.deepEqual(new Set(errors), new Set([how === 'leaves without a word' ? 'connection_reset' : 'tls_error']))
  })
