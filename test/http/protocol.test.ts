import assert from 'node:assert/strict'
import { connect } from 'node:net'
import { after, before, describe, test } from 'node:test'
import { cpuSeconds } from '../../scripts/bench/usage.ts'
import { waitingForLocks } from '../support/database.ts'
import { type RawAnswer, rawRequest } from '../support/raw-http.ts'
import { ADMIN_KEY, startTenant } from '../support/service.ts'
import { waitFor } from '../support/wait.ts'

const { sql, service, tenant } = await startTenant({ after }, { mode: 'api' })
const HOST = 'Host: localhost\r\n'
const AUTH = `Authorization: Bearer ${tenant.key}\r\n`
const JSON_TYPE = 'Content-Type: application/json\r\n'
const UUID = /^[0-9a-f]{8}-[0-9a-f-]{27}$/

/** An answer of ours: the error shape, a request id, and the headers that all answers have. */
function assertOurs(answer: RawAnswer | null, status: number, error: string | null): void {
  assert.equal(answer?.status, status, answer?.text)
  assert.ok(answer.headers.get('x-request-id'), 'x-request-id')
  assert.equal(answer.headers.get('x-content-type-options'), 'nosniff')
  assert.equal(answer.headers.get('content-security-policy'), "default-src 'none'; frame-ancestors 'none'")
  assert.equal(answer.headers.get('referrer-policy'), 'no-referrer')
  assert.equal(answer.headers.get('cache-control'), 'no-store')
  assert.equal(answer.headers.get('access-control-allow-origin'), null)
  assert.equal(answer.headers.get('www-authenticate'), status === 401 ? 'Bearer' : null)
  const body = JSON.parse(answer.body)
  assert.equal(body.ok, error === null)
  assert.equal(body.error, error ?? undefined)
}

/** Sends bytes, keeps its side open after the answer, and resolves, with whether there was one, when the connection is closed. */
async function keepOpen(head: string): Promise<boolean> {
  const socket = connect({ port: service.port, host: '127.0.0.1', allowHalfOpen: true })
  let answered = false
  socket.once('data', () => {
    answered = true
  })
  socket.write(head)
  // The answer's end has been read long before; what is written to a closed connection is refused.
  const prod = setInterval(() => answered && socket.write('x'), 200)
  await new Promise<void>((gone) => {
    socket.once('error', () => gone()).once('close', () => gone())
    // Nothing would be written after it.
    socket.once('end', () => answered || gone())
  })
  clearInterval(prod)
  socket.destroy()
  return answered
}

async function askLate() {
  const started = Date.now()
  const answers = await Promise.all([
    rawRequest(service.port, `GET /health HTTP/1.1\r\n${HOST}`),
    rawRequest(service.port, `POST /v1/events HTTP/1.1\r\n${HOST}X: `, (write) => {
      setInterval(() => write('x'), 500).unref()
    }),
  ])
  return { answers, tookMs: Date.now() - started }
}

const KEPT_OPEN = {
  garbage: 'hello\r\n\r\n',
  'a request without Host': 'GET /health HTTP/1.1\r\n\r\n',
  CONNECT: `CONNECT localhost:80 HTTP/1.1\r\n${HOST}\r\n`,
  'headers that do not end': `GET /health HTTP/1.1\r\n${HOST}`,
}

let lateAnswers: ReturnType<typeof askLate>
const keptOpen = new Map<string, Promise<boolean>>()
// Asked before all else, because the answers take ten seconds.
before(() => {
  lateAnswers = askLate()
  for (const [name, head] of Object.entries(KEPT_OPEN)) keptOpen.set(name, keepOpen(head))
})

describe('what is not HTTP', () => {
  const refused: [string, string, number][] = [
    ['no HTTP at all', 'hello\r\n\r\n', 400],
    ['HTTP/2', 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', 400],
    ['a TLS handshake', '\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03', 400],
    ['no Host', 'GET /health HTTP/1.1\r\n\r\n', 400],
    ['a bad Host', 'GET /health HTTP/1.1\r\nHost: a b\r\n\r\n', 400],
    ['a target that is no path', `OPTIONS * HTTP/1.1\r\n${HOST}\r\n`, 400],
    ['a backslash in the path', `GET /v1\\dlq HTTP/1.1\r\n${HOST}\r\n`, 400],
    [
      'a length beside chunks',
      `POST /v1/events HTTP/1.1\r\n${HOST}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n`,
      400,
    ],
    ['two lengths', `POST /v1/events HTTP/1.1\r\n${HOST}Content-Length: 3\r\nContent-Length: 4\r\n\r\n`, 400],
    ...['abc', '-1', '+5', '1e3', '0x10'].map((length): [string, string, number] => [
      `the length ${length}`,
      `POST /v1/events HTTP/1.1\r\n${HOST}Content-Length: ${length}\r\n\r\n`,
      400,
    ]),
    ['an unknown encoding', `POST /v1/events HTTP/1.1\r\n${HOST}Transfer-Encoding: xchunked\r\n\r\n`, 400],
    ['a space before the colon', `GET /health HTTP/1.1\r\n${HOST}A : b\r\n\r\n`, 400],
    ['a folded header', `GET /health HTTP/1.1\r\n${HOST}A: b\r\n c\r\n\r\n`, 400],
    ['a NUL in a header', `GET /health HTTP/1.1\r\n${HOST}A: b\0c\r\n\r\n`, 400],
    ['bare line feeds', 'GET /health HTTP/1.1\nHost: localhost\n\n', 400],
    ['a Host of more letters than any', `GET /health HTTP/1.1\r\nHost: ${'a'.repeat(301)}\r\n\r\n`, 400],
    ['a Host longer than any', `GET /health HTTP/1.1\r\nHost: ${'%E4%B8%80'.repeat(34)}\r\n\r\n`, 400],
    ['a host in the target longer than any', `GET http://${'a'.repeat(301)}/health HTTP/1.1\r\n${HOST}\r\n`, 400],
    ['1,001 headers', `GET /health HTTP/1.1\r\n${HOST}${'a:b\r\n'.repeat(1000)}\r\n`, 431],
    ['headers of 17 KiB', `GET /health HTTP/1.1\r\n${HOST}A: ${'x'.repeat(17_000)}\r\n\r\n`, 431],
  ]
  for (const [name, head, status] of refused) {
    test(`${name}: ${status} in the error shape`, async () => {
      assertOurs(await rawRequest(service.port, head), status, 'invalid request')
    })
  }
})

describe('HTTP that is unusual', () => {
  const fine: [string, string][] = [
    ['HTTP/1.0 without a Host', 'GET /health HTTP/1.0\r\n\r\n'],
    ['an absolute target', `GET http://localhost/health HTTP/1.1\r\n${HOST}\r\n`],
    [
      'an upgrade that nobody needs',
      `GET /health HTTP/1.1\r\n${HOST}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n`,
    ],
    ['an expectation that nobody knows', `GET /health HTTP/1.1\r\n${HOST}Expect: tea\r\n\r\n`],
  ]
  for (const [name, head] of fine) {
    test(`${name} is answered`, async () => assertOurs(await rawRequest(service.port, head), 200, null))
  }

  for (const method of ['OPTIONS', 'TRACE', 'PUT', 'DELETE', 'PATCH', 'PROPFIND', 'QUERY']) {
    test(`${method} on a route that does not have it is not found`, async () => {
      assertOurs(
        await rawRequest(service.port, `${method} /v1/events HTTP/1.1\r\n${HOST}${AUTH}\r\n`),
        404,
        'not found',
      )
    })
  }

  test('CONNECT is not found', async () => {
    assertOurs(await rawRequest(service.port, `CONNECT a.example:443 HTTP/1.1\r\n${HOST}\r\n`), 404, 'not found')
  })

  test('CONNECT from a client that resets ends no process, and is not answered in the place of another request', async () => {
    const begin = (text: string) => {
      const socket = connect(service.port, '127.0.0.1').on('error', () => {})
      socket.write(text)
      return socket
    }
    const head = `CONNECT a.example:443 HTTP/1.1\r\n${HOST}\r\n`
    for (let n = 0; n < 20; n++) {
      const socket = begin(head)
      if (n % 2 === 0) socket.once('connect', () => socket.resetAndDestroy())
      else socket.once('data', () => socket.resetAndDestroy())
      await new Promise<void>((closed) => socket.once('close', () => closed()))
    }
    const behind = begin(`GET /v1/deliveries HTTP/1.1\r\n${HOST}${AUTH}\r\n${head}`)
    let text = ''
    for await (const chunk of behind) text += chunk
    assert.doesNotMatch(text, /404/)
    assert.equal((await service.call('GET', '/health')).status, 200)
  })

  test('HEAD is GET without its body', async () => {
    const answer = await tenant.call('HEAD', '/v1/deliveries')
    assert.equal(answer.status, 200)
    assert.equal(answer.text, '')
    assert.equal((await service.call('HEAD', '/v1/deliveries')).status, 401)
    assert.equal((await tenant.call('HEAD', '/v1/events')).status, 404)
  })

  test('100-continue is met, and a body that comes in pieces is put together', async () => {
    const head = `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n`
    const answer = await rawRequest(service.port, head, (write) => {
      for (const part of ['{"event_type":"a.b","pay', 'load":{"a":"', '\u00e9"}}']) {
        write(`${Buffer.byteLength(part).toString(16)}\r\n${part}\r\n`)
      }
      write('0\r\n\r\n')
    })
    assertOurs(answer, 202, null)
  })

  test('a body that is not wanted is not asked for', async () => {
    const head = (auth: string, type: string, length: number) =>
      `POST /v1/events HTTP/1.1\r\n${HOST}${auth}${type}Expect: 100-continue\r\nContent-Length: ${length}\r\n\r\n`
    for (const [request, status, error] of [
      [head('Authorization: Bearer wb_live_x\r\n', JSON_TYPE, 100), 401, 'invalid API key'],
      [head(AUTH, JSON_TYPE, 1_000_000), 400, 'payload too large'],
      [head(AUTH, 'Content-Type: text/plain\r\n', 100), 400, 'invalid request'],
    ] as const) {
      const answer = await rawRequest(service.port, request)
      assertOurs(answer, status, error)
      assert.doesNotMatch(answer?.text ?? '', /100 Continue/)
      // The client may send it all the same, or not.
      assert.equal(answer?.headers.get('connection'), 'close')
    }
  })

  for (const [how, header, chunk] of [
    ['declared', 'Content-Length: 20000000', (part: string) => part],
    ['chunked', 'Transfer-Encoding: chunked', (part: string) => `${part.length.toString(16)}\r\n${part}\r\n`],
  ] as const) {
    test(`a body that is ${how} and far too large is refused before it is read`, async () => {
      const answer = await rawRequest(
        service.port,
        `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}${header}\r\n\r\n`,
        (write) => {
          for (let i = 0; i < 16; i++) write(chunk(' '.repeat(65_536)))
        },
      )
      assertOurs(answer, 400, 'payload too large')
      const { limit_bytes, actual_bytes } = JSON.parse(answer?.body ?? '').details
      assert.equal(limit_bytes, 262_144)
      assert.ok(actual_bytes > limit_bytes)
    })
  }

  test('a body holds at most 64 KiB besides its payload object', async () => {
    for (const body of [
      `{"event_type":"a","payload":"${'x'.repeat(70_000)}"}`,
      `{"event_type":"${'x'.repeat(70_000)}","payload":{}}`,
      `[${'1,'.repeat(40_000)}1]`,
    ]) {
      const answer = await rawRequest(
        service.port,
        `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}Content-Length: ${body.length}\r\n\r\n${body}`,
      )
      assertOurs(answer, 400, 'invalid request')
      assert.match(JSON.parse(answer?.body ?? '').details[0].message, /65536 characters besides the payload object/)
    }
  })

  test('the request behind a body that is too large is answered', async () => {
    const piece = `10000\r\n${' '.repeat(65_536)}\r\n`
    const head = `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}Transfer-Encoding: chunked\r\n\r\n`
    const socket = connect(service.port, '127.0.0.1')
    socket.write(`${head}${piece.repeat(32)}0\r\n\r\nGET /health HTTP/1.1\r\n${HOST}Connection: close\r\n\r\n`)
    const began = performance.now()
    let text = ''
    for await (const chunk of socket) text += chunk
    assert.match(text, /^HTTP\/1.1 400 [\s\S]+payload too large[\s\S]+HTTP\/1.1 200 /)
    assert.ok(performance.now() - began < 20_000, 'before its time was over')
  })

  test('clients that close their side behind a request, or behind several, are answered', async () => {
    const body = '{"event_type":"a.b","payload":{}}'
    const publish = `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}Content-Length: ${body.length}\r\n\r\n${body}`
    for (const requests of [1, 5]) {
      const socket = connect({ port: service.port, host: '127.0.0.1', allowHalfOpen: true })
      socket.end(publish.repeat(requests))
      let text = ''
      for await (const chunk of socket) text += chunk
      assert.equal(text.match(/HTTP\/1.1 202 /g)?.length, requests, text)
    }
  })

  test('a client that leaves in the middle of its body is no fault of ours', async () => {
    const head = `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}Content-Length: 100\r\n\r\n{`
    const answer = await rawRequest(service.port, head, (_write, end) => setTimeout(end, 50))
    assertOurs(answer, 400, 'invalid request')
    assert.equal((await service.call('GET', '/health')).status, 200)
    assert.deepEqual(
      service.logs.filter((line) => line.level === 'error'),
      [],
    )
  })
})

describe('the request id', () => {
  const inner = async (path: string, given?: string) => {
    const headers: Record<string, string> = given === undefined ? {} : { 'x-request-id': given }
    return (await service.call('GET', path, { headers })).headers.get('x-request-id')
  }

  test('is the client’s own when it is sane, also on errors', async () => {
    for (const id of ['a', 'A-z_0.9:1', 'x'.repeat(128)]) {
      assert.equal(await inner('/health', id), id)
      assert.equal(await inner('/v1/dlq', id), id)
      assert.equal(await inner('/nowhere', id), id)
    }
  })

  test('is the client’s own also where the request is none that we answer', async () => {
    for (const head of [
      'GET /health HTTP/1.1\r\n',
      'CONNECT a.example:443 HTTP/1.1\r\nHost: x\r\n',
      'GET /health HTTP/1.1\r\nHost: a b\r\n',
    ]) {
      const answer = await rawRequest(service.port, `${head}X-Request-Id: mine\r\n\r\n`)
      assert.equal(answer?.headers.get('x-request-id'), 'mine')
    }
    const head = `POST /v1/events HTTP/1.1\r\n${HOST}${AUTH}${JSON_TYPE}X-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\n`
    assert.equal((await rawRequest(service.port, `${head}no chunk\r\n`))?.headers.get('x-request-id'), 'mine')
  })

  test('is a new one otherwise', async () => {
    for (const id of [undefined, '', 'a b', 'x'.repeat(129), 'a"b', '\u00e9', 'a,b']) {
      assert.match((await inner('/health', id)) ?? '', UUID)
    }
  })
})

describe('a bearer token', () => {
  const ask = (path: string, method: string, headers: string) =>
    rawRequest(service.port, `${method} ${path} HTTP/1.1\r\n${HOST}${headers}\r\n`)

  for (const [name, header, error] of [
    ['none', '', 'missing bearer token'],
    ['an empty one', 'Authorization: \r\n', 'missing bearer token'],
    ['another scheme', 'Authorization: Basic dXNlcjpwYXNz\r\n', 'missing bearer token'],
    ['the scheme alone', 'Authorization: Bearer\r\n', 'missing bearer token'],
    ['the scheme and a space', 'Authorization: Bearer \r\n', 'missing bearer token'],
    ['no space', 'Authorization: Bearerabc\r\n', 'missing bearer token'],
    ['a quoted key', 'Authorization: Bearer "abc"\r\n', null],
    ['bytes beyond ASCII', 'Authorization: Bearer wb_live_\xe9\xff\r\n', null],
    ['a long one', `Authorization: Bearer wb_live_${'x'.repeat(8000)}\r\n`, null],
    ['two of them', `Authorization: Bearer ${ADMIN_KEY}\r\nAuthorization: Bearer ${tenant.key}\r\n`, null],
    ['a list of them', `Authorization: Bearer ${tenant.key}, Bearer ${tenant.key}\r\n`, null],
    ['more after it', `Authorization: Bearer ${tenant.key} x\r\n`, null],
  ] as const) {
    test(`${name}: 401`, async () => {
      assertOurs(await ask('/v1/dlq', 'GET', header), 401, error ?? 'invalid API key')
      assertOurs(await ask('/v1/admin/tenants', 'POST', header), 401, error ?? 'invalid admin key')
    })
  }

  test('may be spelled in any case, with more than one space', async () => {
    assertOurs(await ask('/v1/dlq', 'GET', `authorization: bEaReR   ${tenant.key}  \r\n`), 200, null)
  })
})

test('headers that do not end are answered with 408 after ten seconds, however they drip', {
  timeout: 60_000,
}, async () => {
  const { answers, tookMs } = await lateAnswers
  for (const answer of answers) assertOurs(answer, 408, 'invalid request')
  // By itself Node would look for them every 30 seconds.
  assert.ok(tookMs >= 9500 && tookMs < 25_000, `${tookMs} ms`)
})

for (const name of Object.keys(KEPT_OPEN)) {
  test(`a client that keeps its side open after ${name} does not keep the connection`, {
    timeout: 60_000,
  }, async () => {
    assert.ok(await keptOpen.get(name), 'it was answered')
  })
}

/** It has no deadline, so there is no answer while waybill.idempotency_keys is locked. */
const RETENTION_RUN = `POST /v1/admin/retention/run HTTP/1.1\r\n${HOST}Authorization: Bearer ${ADMIN_KEY}\r\n${JSON_TYPE}Content-Length: 15\r\n\r\n{"apply":false}`

test('behind a request that is being answered, what is no request ends the connection and is not taken for its answer', {
  timeout: 60_000,
}, async () => {
  const noRequests = ['hello\r\n\r\n', 'GET /health HTTP/1.1\r\n\r\n']
  await sql.begin(async (tx) => {
    await tx`lock table waybill.idempotency_keys in access exclusive mode`
    for (const [before, behind] of noRequests.entries()) {
      const isUnderWay = async () => (await waitingForLocks(sql)) > before
      const answer = await rawRequest(service.port, RETENTION_RUN, (write) => {
        void waitFor(isUnderWay, { what: 'the request to wait' }).then(() => write(behind))
      })
      assert.equal(answer, null)
    }
    for (const behind of noRequests) assert.equal(await rawRequest(service.port, RETENTION_RUN + behind), null)
  })
})

/** Of what is answered on a connection on which so many requests are sent at once. */
const statuses = (ahead: number, headers = '') =>
  new Promise<string[]>((resolve) => {
    const socket = connect(service.port, '127.0.0.1')
    let text = ''
    const found = () => text.match(/HTTP\/1\.1 \d+/g) ?? []
    socket.on('data', (chunk) => {
      text += chunk.toString('latin1')
      if (found().length === ahead) socket.destroy()
    })
    socket.on('error', () => {}).on('close', () => resolve(found()))
    socket.write(RETENTION_RUN + `GET /v1/usage/limits HTTP/1.1\r\n${HOST}${AUTH}${headers}\r\n`.repeat(ahead - 1))
  })

test('a hundred requests sent ahead are answered, and who sends one more before they are is cut off', {
  timeout: 60_000,
}, async () => {
  let hundred: Promise<string[]> | undefined
  await sql.begin(async (tx) => {
    await tx`lock table waybill.idempotency_keys in access exclusive mode`
    hundred = statuses(100)
    assert.deepEqual(await statuses(101), [])
  })
  assert.deepEqual(await hundred, Array(100).fill('HTTP/1.1 200'))
  assert.equal((await tenant.call('GET', '/v1/usage/limits')).status, 200)
})

test(
  'what all connections send ahead is bounded by what it takes: who sends more is cut off, and the others are answered',
  {
    timeout: 60_000,
  },
  assertBounded,
)

async function assertBounded(): Promise<void> {
  const answers: string[][] = []
  let all: Promise<unknown> | undefined
  await sql.begin(async (tx) => {
    await tx`lock table waybill.idempotency_keys in access exclusive mode`
    const each = Array.from({ length: 30 }, () => statuses(80, 'a: b\r\n'.repeat(100)))
    all = Promise.all(each.map((one) => one.then((found) => answers.push(found))))
    await waitFor(() => answers.length >= 15, { what: 'half of them to be cut off' })
    assert.deepEqual(answers.flat(), [])
  })
  await all
  const served = answers.filter(({ length }) => length > 0)
  assert.ok(served.length >= 5, `${served.length} were answered`)
  for (const found of served) assert.deepEqual(found, Array(80).fill('HTTP/1.1 200'))
  assert.equal((await tenant.call('GET', '/v1/usage/limits')).status, 200)
}

test('requests that were sent ahead by clients that have left weigh nothing any more, nor less', {
  timeout: 60_000,
}, async () => {
  const headers = 'a: b\r\n'.repeat(100)
  const ahead = `GET /v1/usage/limits HTTP/1.1\r\n${HOST}${AUTH}${headers}\r\n`.repeat(79)
  await sql.begin(async (tx) => {
    await tx`lock table waybill.idempotency_keys in access exclusive mode`
    // Each time nine tenths of what all connections may send ahead.
    for (let time = 0; time < 3; time++) {
      const sockets = Array.from({ length: 9 }, () => connect(service.port, '127.0.0.1').on('error', () => {}))
      for (const socket of sockets) socket.write(RETENTION_RUN + ahead)
      await waitFor(() => waitingForLocks(sql))
      await service.call('GET', '/health')
      for (const socket of sockets) socket.resetAndDestroy()
    }
  })
  await waitFor(async () => (await statuses(80, headers)).length === 80, { what: 'as many of another to be answered' })
  await assertBounded()
})

test('a connection is kept for longer than the minute for which load balancers keep it', async () => {
  assert.match(
    (await rawRequest(service.port, `GET /health HTTP/1.1\r\n${HOST}\r\n`))?.headers.get('keep-alive') ?? '',
    /^timeout=6[1-9]$/,
  )
})

const procStat = { skip: cpuSeconds(process.pid) === null && 'only Linux tells what another process has used' }
/** The service's CPU time for a hundred requests, in seconds. */
async function cpuOf(ask: () => Promise<void>): Promise<number> {
  const before = cpuSeconds(service.pid) ?? 0
  for (let nth = 0; nth < 100; nth++) await ask()
  return (cpuSeconds(service.pid) ?? 0) - before
}

test('a hundred times as many parameters of one query take less than twenty times as long', procStat, async () => {
  const withNames = (names: number) => {
    const query = Array.from({ length: names }, (_, nth) => nth.toString(36)).join('&')
    return cpuOf(async () => {
      const { status, body } = await tenant.call('GET', `/v1/deliveries?${query}`)
      assert.deepEqual([status, body.details.length], [400, 20])
    })
  }
  const [few, many] = [await withNames(35), await withNames(3500)]
  // It is 5 times as long, for most of a request is something else, and 50 times where each name is looked up among all.
  assert.ok(many < 20 * Math.max(few, 0.05), `${few} s for few, ${many} s for many`)
})

for (const [where, path] of [
  ['no route has', (times: number) => `/${'%ff/'.repeat(times)}%`],
  ['are in an id', (times: number) => `/v1/deliveries/${'%ff-'.repeat(times)}`],
] as const) {
  test(
    `a hundred times as many escapes that are not UTF-8, and ${where}, take less than ten times as long`,
    procStat,
    async () => {
      const withEscapes = (times: number) =>
        cpuOf(async () => assert.equal((await tenant.call('GET', path(times))).status, 404))
      const [few, many] = [await withEscapes(38), await withEscapes(3800)]
      // Where each is decoded by itself, it is 40 ms for each request.
      assert.ok(many < 10 * Math.max(few, 0.05), `${few} s for few, ${many} s for many`)
    },
  )
}

test('escapes in a path stand for what they escape', async () => {
  const statusOf = async (path: string) =>
    (await rawRequest(service.port, `GET ${path} HTTP/1.1\r\n${HOST}${AUTH}Connection: close\r\n\r\n`))?.status
  assert.equal(await statusOf('/%76%31/deliveries'), 200)
  assert.equal(await statusOf('/v1/deliveries%3Flimit=1'), 404)
  assert.equal(await statusOf('/v1%2Fdeliveries'), 404)
})

test('nothing above was a fault of ours', () => {
  assert.deepEqual(
    service.logs.filter((line) => line.level === 'error'),
    [],
  )
})
