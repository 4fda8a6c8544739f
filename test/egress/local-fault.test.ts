import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { test } from 'node:test'
import { promisify } from 'node:util'
import { startReceiver } from '../support/receiver.ts'

const SOURCE = new URL('../../src/egress/', import.meta.url)
/** Sends once with no file left to open, and once more when there are some again. */
const SENDING = `
import { closeSync, openSync } from 'node:fs'
import { parseRange } from '${SOURCE}address.ts'
import { LocalFault } from '${SOURCE}failure.ts'
import { createSender } from '${SOURCE}send.ts'
const request = { url: process.argv[1], headers: {}, body: '{}' }
const sender = createSender({ allow: [parseRange('127.0.0.0/8')], timeoutMs: 5000 })
const files = []
try {
  for (;;) files.push(openSync('/dev/null'))
} catch {}
const without = await sender.send(request).then(({ error }) => error, (error) => error instanceof LocalFault)
for (const file of files) closeSync(file)
const { statusCode } = await sender.send(request)
console.log(JSON.stringify({ without, statusCode }))
process.exit()`

test('that this process cannot open a connection is not held against the receiver', async (t) => {
  const receiver = await startReceiver(t)
  const run = ['-c', 'ulimit -n 100; exec "$@"', 'sh', process.execPath, '--input-type=module', '-e', SENDING]
  const { stdout } = await promisify(execFile)('sh', [...run, receiver.url('/hook')])
  assert.deepEqual(JSON.parse(stdout), { without: true, statusCode: 200 })
  assert.equal(receiver.receipts.length, 1)
})
