import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { once } from 'node:events'
import { readFile } from 'node:fs/promises'
import { createServer } from 'node:http'
import { test } from 'node:test'
import { cleanUp } from './support/cleanup.ts'

/** Docker passes a proxy of its own settings on to each container; the health check is to ask the service itself. */
const PROXIED = { NODE_USE_ENV_PROXY: '1', HTTP_PROXY: 'http://127.0.0.1:9' }

/** 10080 is among the ports that fetch refuses to ask. */
for (const [host, port] of [
  ['127.0.0.1', 0],
  ['::1', 0],
  ['127.0.0.1', 10_080],
] as const) {
  test(`the image's health check asks ${host}${port ? `, port ${port}` : ''}`, async (t) => {
    const dockerfile = await readFile(new URL('../Dockerfile', import.meta.url), 'utf8')
    const [, ...args] = JSON.parse(/^HEALTHCHECK [^[]*CMD (.*)$/m.exec(dockerfile)?.[1] ?? '')
    let status = 200
    const server = createServer((request, response) =>
      response.writeHead(request.url === '/health' ? status : 404).end('{}'),
    )
    cleanUp(t, () => server.close())
    await once(server.listen(port, host), 'listening')
    const { port: own } = server.address() as { port: number }
    const check = () =>
      new Promise((resolve) => {
        const child = execFile(process.execPath, args, { env: { HOST: host, PORT: String(own), ...PROXIED } })
        child.on('exit', resolve)
      })
    assert.equal(await check(), 0)
    status = 503
    assert.equal(await check(), 1)
  })
}
