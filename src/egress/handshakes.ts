import type { Socket } from 'node:net'
import { Duplex } from 'node:stream'
import { LRUCache } from 'lru-cache'
import { createTurns } from '../pacing.ts'
import { ConnectError } from './failure.ts'

/**
 * As much may come in during a watched handshake; certificates of well-known authorities take 3 to 10 KB. OpenSSL checks all that a
 * receiver shows at one go, trusted or not, up to 100 KB: seventy keys of 3,072 bits with exponents of the same length take half a
 * second.
 */
const HANDSHAKE_BYTES = 32 * 1024
/** A handshake that takes this much CPU is dear: a usual one takes 2 ms. */
const DEAR_MS = 5
/** A receiver whose dear handshakes failed after as much in all gets no further one until so long after the last. */
const MAX_DEAR_MS = 100
const REFUSED_MS = 600_000
/**
 * A connection whose handshake is watched costs a fifth more for each delivery, as long as it lasts. So a receiver is trusted, and its
 * handshakes are not watched, if its last one succeeded and none has failed for DISTRUST_MS. At most MAX_UNWATCHED are under way at
 * once: should all of these turn out hostile, the worker stands still for seven seconds. To keep that from happening again and again, at
 * other ports, an unwatched handshake that fails after SUSPECT_MS of CPU has all receivers watched for SUSPICIOUS_MS.
 */
const DISTRUST_MS = 3_600_000
const MAX_UNWATCHED = 16
const SUSPECT_MS = 200
const SUSPICIOUS_MS = 600_000

const TOO_DEAR = {
  error: 'tls_error',
  errorMessage: 'TLS handshakes with this receiver failed and took too long; there is a pause of ten minutes',
} as const

const TOO_LARGE = {
  error: 'response_too_large',
  errorMessage: 'the TLS handshake is too large; most of it are certificates',
} as const

/** What TLS is to read from and write to; and who began the handshake says, once, when it is over, and how it went. */
type Handshake = { stream: Duplex; over: (succeeded: boolean) => void }

function cpuMsSince(before: NodeJS.CpuUsage): number {
  const { user, system } = process.threadCpuUsage(before)
  return (user + system) / 1000
}

/** Begins TLS handshakes such that no receiver can stop this process with what it shows. `receiver` is a name and a port. */
export function createHandshakes(): (tcp: Socket, receiver: string) => Handshake {
  /** What dear handshakes that failed have taken, in ms. */
  const dear = new LRUCache<string, number>({ max: 10_000, ttl: REFUSED_MS })
  const trusted = new LRUCache<string, boolean>({ max: 10_000, ttl: DISTRUST_MS })
  const turn = createTurns(1)
  let unwatched = 0
  let suspiciousUntil = -Infinity

  const judge = (receiver: string, succeeded: boolean) => {
    if (!succeeded) trusted.set(receiver, false)
    else if (trusted.get(receiver) !== false) trusted.set(receiver, true)
  }

  function trust(tcp: Socket, receiver: string): Handshake {
    unwatched++
    const before = process.threadCpuUsage()
    const over = (succeeded: boolean) => {
      unwatched--
      // One that has shown nothing has cost nothing, however much the process did meanwhile.
      if (!succeeded && tcp.bytesRead > 0 && cpuMsSince(before) >= SUSPECT_MS)
        suspiciousUntil = performance.now() + SUSPICIOUS_MS
      judge(receiver, succeeded)
    }
    return { stream: tcp, over }
  }

  function watch(tcp: Socket, receiver: string): Handshake {
    let isOver = false
    let takenMs = 0
    let countedMs = 0
    const count = (ms: number) => {
      dear.set(receiver, (dear.get(receiver) ?? 0) + ms - countedMs)
      countedMs = ms
    }
    const step = (work: () => void) => {
      if ((dear.get(receiver) ?? 0) >= MAX_DEAR_MS) return void tcp.destroy(new ConnectError(TOO_DEAR))
      const before = process.threadCpuUsage()
      work()
      takenMs += cpuMsSince(before)
      if (!isOver && takenMs >= DEAR_MS) count(takenMs)
    }
    const over = (succeeded: boolean) => {
      isOver = true
      if (succeeded && countedMs > 0) count(0)
      judge(receiver, succeeded)
    }
    return { stream: inSteps(tcp, { isOver: () => isOver, turn, step }), over }
  }

  return (tcp, receiver) => {
    const mayTrust = performance.now() >= suspiciousUntil && unwatched < MAX_UNWATCHED
    return mayTrust && trusted.get(receiver) ? trust(tcp, receiver) : watch(tcp, receiver)
  }
}

/**
 * The connection, of which each chunk that comes in before the handshake is over is handed on by `step` in a `turn` of its own, so
 * that many dear ones at once do not stop everything else. No more is read until then: hundreds of receivers that drip would fill
 * the line of turns, which is everybody's. Given the socket itself, TLS would read from it unseen.
 */
function inSteps(
  tcp: Socket,
  handshake: { isOver: () => boolean; turn: () => Promise<void>; step: (work: () => void) => void },
): Duplex {
  let last = Promise.resolve()
  const stream = new Duplex({
    read: () => void tcp.resume(),
    write: (chunk: Buffer, _encoding, done) => void tcp.write(chunk, done),
    final: (done) => void tcp.end(done),
    destroy(error, done) {
      tcp.destroy()
      done(error)
    },
  })
  const handOn = (chunk: Buffer) => void (stream.push(chunk) || tcp.pause())
  tcp.on('data', (chunk) => {
    if (handshake.isOver()) return handOn(chunk)
    if (tcp.bytesRead > HANDSHAKE_BYTES) return void tcp.destroy(new ConnectError(TOO_LARGE))
    tcp.pause()
    last = handshake.turn().then(() => {
      if (handshake.isOver()) handOn(chunk)
      else handshake.step(() => handOn(chunk))
    })
  })
  // After what came in before: it may tell why the receiver leaves.
  tcp.once('end', () => void last.then(() => stream.push(null)))
  tcp.on('error', (error) => void last.then(() => stream.destroy(error)))
  tcp.once('close', () => void last.then(() => stream.destroy()))
  return stream
}
