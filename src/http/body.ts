import type { IncomingMessage } from 'node:http'
import type { Context } from 'hono'
import { LARGEST_PAYLOAD_BYTES } from '../config.ts'
import { AppError } from '../errors.ts'
import { Line } from '../line.ts'
import { createTurns } from '../pacing.ts'
import { createRequestRoom } from '../room.ts'
import type { Env } from './answer.ts'
import { MAX_DEPTH, NotJson, outline, TooDeep } from './json-outline.ts'

/** What a body may hold besides a payload: other fields, their names, white space. */
const ENVELOPE_BYTES = 65_536

/** A body that stalls for this long is given up: it takes room that others wait for. */
const STALL_MS = 10_000
/** What others wait for is not kept by a body that comes more slowly, but for its first moment. */
const SLOW = { bytesPerMs: 64, afterMs: 500 }
type Arriving = { tenantId: string; giveUpIfSlow: () => void }
/** Tenants' bodies that have not all come yet, in each of their rooms. */
const arriving = { small: new Line<Arriving>(), large: new Line<Arriving>() }

/** Bodies up to this size do not wait for larger ones. */
const SMALL_BYTES = 4096
/**
 * How many bytes of bodies are decoded and parsed in one turn of the event loop, of small ones and of larger ones: 256 KiB of numbers
 * take ten milliseconds, and a tenant can let hundreds of bodies end at once.
 */
const smallTurn = createTurns(32 * SMALL_BYTES)
const largeTurn = createTurns(128 * 1024)

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/**
 * Reads a JSON body that may carry a payload of `maxPayloadBytes`, stopping as soon as it is larger than such a body can be. `value` is
 * what it holds but, unless `maxPayloadBytes` is 0, objects and lists in it are empty. `payload` is that object, or list, as it was sent.
 * Throws `payload too large`, `invalid JSON` (not UTF-8, not JSON) or `invalid request` (another content type, an encoding, nested too
 * deep, more than 64 KiB besides the payload; with 408: it stalled, or came slowly while others waited for its room).
 */
export async function readJson(c: Context<Env>, maxPayloadBytes: number): Promise<{ payload: string; value: unknown }> {
  const { 'content-type': type = '', 'content-encoding': encoding } = c.env.incoming.headers
  // Whatever charset it names: what is not UTF-8 is found below.
  const [mediaType = ''] = type.split(';')
  if (mediaType.trim().toLowerCase() !== 'application/json') throw invalid('content-type', 'must be application/json')
  if (encoding && encoding.toLowerCase() !== 'identity')
    throw invalid('content-encoding', 'compressed bodies are not accepted')
  const bytes = await readBytes(c, maxPayloadBytes)
  await (bytes.length > SMALL_BYTES ? largeTurn : smallTurn)(Math.max(1, bytes.length))
  let text: string
  try {
    text = utf8.decode(bytes)
  } catch {
    throw new AppError('invalid_json', 'the body is not valid UTF-8')
  }
  const { payload, withoutPayload } = outlineOf(text)
  if (maxPayloadBytes === 0) return { payload, value: JSON.parse(text) }
  if (withoutPayload.length > ENVELOPE_BYTES)
    throw invalid('', `must hold at most ${ENVELOPE_BYTES} characters besides the payload object`)
  return { payload, value: JSON.parse(withoutPayload) }
}

function outlineOf(text: string): { payload: string; withoutPayload: string } {
  let payload = ''
  try {
    const withoutPayload = outline(text, (key, value) => {
      // Of several the last counts, as in JSON.parse.
      if (isPayload(key)) payload = value
    })
    return { payload, withoutPayload }
  } catch (error) {
    if (error instanceof TooDeep) throw invalid('', `must not nest deeper than ${MAX_DEPTH}`)
    if (!(error instanceof NotJson)) throw error
    throw new AppError('invalid_json', text.trim() === '' ? 'the body is empty' : error.message)
  }
}

/** Whether a key, in quotes, is `payload`, perhaps with escapes. */
const isPayload = (key: string) => key === '"payload"' || (key.includes('\\') && JSON.parse(key) === 'payload')

/** How large the body may turn out to be, as far as its headers tell; at most what `readJson` reads of it. */
export function expectedBytes(c: Context<Env>, maxPayloadBytes: number): number {
  const declared = Number(c.env.incoming.headers['content-length'] ?? Number.NaN)
  return Math.min(Number.isNaN(declared) ? Infinity : declared, maxPayloadBytes + ENVELOPE_BYTES)
}

/**
 * Room for bodies of requests under way. As text, parsed, and on its way to the database, a body takes five times its size. Two of the
 * largest fit, as of a thing that is shared a tenant gets at most half; and small bodies, which nearly all are, wait for no larger ones.
 * `maxPayloadBytes` is that of `readJson`, which `work` calls.
 */
export function createBodyRoom() {
  const roomFor = (kind: keyof typeof arriving, bytes: number) =>
    createRequestRoom(bytes, {
      onWanted(tenantId) {
        for (const body of [...arriving[kind]]) if (body.tenantId !== tenantId) body.giveUpIfSlow()
      },
    })
  const rooms = {
    small: roomFor('small', 8 * 1024 * 1024),
    large: roomFor('large', 2 * (LARGEST_PAYLOAD_BYTES + ENVELOPE_BYTES)),
  }
  return {
    run<Result>(c: Context<Env>, tenantId: string, maxPayloadBytes: number, work: () => Promise<Result>) {
      const bytes = expectedBytes(c, maxPayloadBytes)
      return rooms[kindOf(bytes)].run(tenantId, bytes, work)
    },
  }
}

const kindOf = (bytes: number) => (bytes <= ENVELOPE_BYTES ? 'small' : 'large')

/** Node reads two pieces of a body before anybody asks for it. */
const UNASKED_BYTES = 2 * 65_536
/** Room for what has come of bodies that it is not known yet whether they will be read. */
export const createUnaskedRoom = () => createRequestRoom(32 * 1024 * 1024)

/** How much of its body may have come before anybody asks for it. */
export function unaskedBytes(c: Context<Env>): number {
  const { 'content-length': length = 0, 'transfer-encoding': coding } = c.env.incoming.headers
  return coding === undefined ? Math.min(Number(length), UNASKED_BYTES) : UNASKED_BYTES
}

const invalid = (path: string, message: string) => new AppError('invalid_request', [{ path, message }])

async function readBytes(c: Context<Env>, maxPayloadBytes: number): Promise<Uint8Array> {
  const limitBytes = maxPayloadBytes + ENVELOPE_BYTES
  const tooLarge = (actualBytes: number) =>
    new AppError('payload_too_large', { limit_bytes: maxPayloadBytes || limitBytes, actual_bytes: actualBytes })
  const declared = Number(c.env.incoming.headers['content-length'] ?? 0)
  if (declared > limitBytes) throw tooLarge(declared)
  let bytes: Uint8Array = new Uint8Array()
  let size = 0
  // Put together as they come: kept one by one, pieces of single bytes would take three hundred times the room they fill.
  const add = (chunk: Uint8Array) => {
    const end = size + chunk.length
    if (size === 0) bytes = chunk
    else if (end <= limitBytes) {
      if (end > bytes.length) bytes = grown(bytes, Math.min(limitBytes, Math.max(end, declared, 2 * bytes.length)))
      bytes.set(chunk, size)
    }
    size = end
    return size <= limitBytes
  }
  try {
    c.env.outgoing.askForBody()
    // Node's own stream: the web stream around it costs more than the rest of the request.
    await readAll(c.env.incoming, add, c.get('tenantId'), arriving[kindOf(expectedBytes(c, maxPayloadBytes))])
  } catch (error) {
    throw error instanceof AppError ? error : new AppError('invalid_json', 'the body ended early')
  }
  if (size > limitBytes) throw tooLarge(size)
  return bytes.subarray(0, size)
}

function grown(bytes: Uint8Array, length: number): Uint8Array {
  const larger = new Uint8Array(length)
  larger.set(bytes)
  return larger
}

/**
 * Resolves at the end of the body, or as soon as `add` returns false; rejects if the client leaves first or the body stalls. The
 * stream is never destroyed, since the socket, and with it the answer, would go too; nor paused, since the next request comes
 * behind the rest of it. A tenant's body is in `line` until it has come.
 */
function readAll(
  incoming: IncomingMessage,
  add: (chunk: Uint8Array) => boolean,
  tenantId: string | undefined,
  line: Line<Arriving>,
): Promise<void> {
  return new Promise((resolve, reject) => {
    let size = 0
    const giveUp = () => {
      stop()
      reject(new AppError('request_timeout', [{ path: '', message: 'the request took too long to arrive' }]))
    }
    const stalled = setTimeout(giveUp, STALL_MS)
    const begun = performance.now()
    const giveUpIfSlow = () => {
      if (size < SLOW.bytesPerMs * (performance.now() - begun - SLOW.afterMs)) giveUp()
    }
    // Nearly all have come by now.
    const isArriving = tenantId !== undefined && !incoming.complete
    const place = isArriving ? line.join({ tenantId, giveUpIfSlow }) : null
    const stop = () => {
      clearTimeout(stalled)
      if (place) line.leave(place)
      incoming.off('data', onData).off('end', onEnd).off('error', onGone).off('close', onGone)
    }
    const onData = (chunk: Uint8Array) => {
      stalled.refresh()
      size += chunk.length
      if (!add(chunk)) onEnd()
    }
    const onEnd = () => {
      stop()
      resolve()
    }
    const onGone = () => {
      stop()
      reject(new Error('the client left'))
    }
    incoming.on('data', onData).on('end', onEnd).on('error', onGone).on('close', onGone)
    if (incoming.readableEnded) onEnd()
    else if (incoming.destroyed) onGone()
  })
}
