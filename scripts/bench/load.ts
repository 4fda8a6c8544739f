import { connect, type Socket } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import { nowMicros, serve } from './serve.ts'

// The load generator: publishes over plain keep-alive sockets with requests written by hand, several times cheaper than
// an HTTP client, so that it is not what is measured.

export type Load = {
  ports: number[]
  /** Of the tenants whose turn it is, one after the other. */
  apiKeys: string[]
  connections: number
  /** The payload of each event is this long. */
  payloadBytes: number
  /** Of each event the next one, in turn. */
  eventTypes: string[]
  /** What ends it: so many requests, or so many seconds. */
  stop: { count: number } | { seconds: number }
  /** Requests a second in an open loop, each timed from its intended moment; null: each connection sends the next at once. */
  rate: number | null
  /** What each connection of a closed loop waits after an answer. */
  pauseMs?: number
}

export type LoadResult = {
  requests: number
  refused: number
  seconds: number
  latencies: Float64Array
  firstRefusal: string | null
}

type Connection = { socket: Socket; sentMicros: number }

const MAX_OPEN_LOOP_CONNECTIONS = 512

let keys = 0
const run = String(nowMicros())

function makeRequest(load: Load, intendedMicros: number): string {
  const start = `{"at":${intendedMicros},"filler":"`
  const payload = `${start}${'x'.repeat(Math.max(0, load.payloadBytes - start.length - 2))}"}`
  const body = `{"event_type":"${load.eventTypes[keys % load.eventTypes.length]}","payload":${payload}}`
  return (
    `POST /v1/events HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer ${load.apiKeys[keys % load.apiKeys.length]}\r\ncontent-type: application/json\r\n` +
    `idempotency-key: ${run}-${++keys}\r\ncontent-length: ${body.length}\r\n\r\n${body}`
  )
}

async function generate(load: Load): Promise<LoadResult> {
  const result: LoadResult = { requests: 0, refused: 0, seconds: 0, latencies: new Float64Array(), firstRefusal: null }
  const latencies: number[] = []
  const started = nowMicros()
  const most = 'count' in load.stop ? load.stop.count : Number.POSITIVE_INFINITY
  const until = 'seconds' in load.stop ? started + load.stop.seconds * 1e6 : Number.POSITIVE_INFINITY
  const all: Connection[] = []
  const idle: Connection[] = []
  let sent = 0
  let open = 0
  const done = Promise.withResolvers<void>()
  done.promise.catch(() => {})

  const more = () => sent < most && nowMicros() < until
  function send(connection: Connection, intendedMicros: number): void {
    sent++
    open++
    connection.sentMicros = intendedMicros
    connection.socket.write(makeRequest(load, intendedMicros), 'latin1')
  }

  function answered(connection: Connection, answer: string): void {
    open--
    result.requests++
    latencies.push(nowMicros() - connection.sentMicros)
    if (!answer.startsWith('HTTP/1.1 2')) {
      result.refused++
      result.firstRefusal ??= answer.slice(0, 500)
    }
    if (load.rate !== null) idle.push(connection)
    else if (more() && load.pauseMs) setTimeout(() => send(connection, nowMicros()), load.pauseMs)
    else if (more()) send(connection, nowMicros())
    if (open === 0 && !more()) done.resolve()
  }

  async function add(): Promise<Connection> {
    const socket = connect({ port: load.ports[all.length % load.ports.length] ?? 0, host: '127.0.0.1', noDelay: true })
    const connection = { socket, sentMicros: 0 }
    all.push(connection)
    await new Promise<void>((resolve, reject) => socket.once('connect', resolve).once('error', reject))
    socket.on('error', done.reject).on('close', () => {
      const at = idle.indexOf(connection)
      if (at === -1) done.reject(new Error('the service closed a connection with a request on it'))
      else idle.splice(at, 1)
    })
    let rest = ''
    socket.setEncoding('latin1').on('data', (chunk: string) => {
      rest += chunk
      const end = rest.indexOf('\r\n\r\n')
      if (end === -1) return
      const length = Number(/\r\ncontent-length: (\d+)/i.exec(rest.slice(0, end + 2))?.[1])
      if (rest.length < end + 4 + length) return
      const answer = rest
      rest = ''
      answered(connection, answer)
    })
    return connection
  }

  await Promise.all(Array.from({ length: load.connections }, add))
  const begun = nowMicros()
  if (load.rate === null) for (const connection of all) if (more()) send(connection, nowMicros())
  if (load.rate !== null) {
    idle.push(...all)
    for (let nth = 0; more(); nth++) {
      const intended = begun + (nth * 1e6) / load.rate
      const early = intended - nowMicros()
      if (early > 0) await sleep(early / 1000)
      // The one that has rested longest, so that none is closed for being idle.
      const connection = idle.shift()
      // All are busy: a new one, up to a number that says the service has stopped answering.
      if (connection) send(connection, Math.round(intended))
      else if (all.length < MAX_OPEN_LOOP_CONNECTIONS) send(await add(), Math.round(intended))
      else throw new Error('the service does not keep up with the open loop')
    }
    if (open === 0) done.resolve()
  }
  await done.promise
  result.seconds = (nowMicros() - begun) / 1e6
  for (const { socket } of all) socket.removeAllListeners('close').destroy()
  result.latencies = Float64Array.from(latencies)
  return result
}

serve({ run: generate })
