import { StringDecoder } from 'node:string_decoder'

/** Bytes of a response body that are read and kept. */
const MAX_RESPONSE_BYTES = 16_384
/** In how many chunks they may come: each takes time from other attempts, and could be of one byte. */
const MAX_CHUNKS = 1024

type ResponseBody = {
  /** Takes a chunk; false when it went past the limit, so that no more need be read. */
  add(chunk: Buffer): boolean
  /** What was kept, as text that Postgres and JSON can hold: no NUL, invalid UTF-8 replaced. */
  text(): string
}

/**
 * Keeps the head of a response body in a buffer of its own. The chunks themselves are windows on socket buffers of
 * 64 KiB: a receiver that sends single bytes would hold thousands of them in memory.
 */
export function collectBody(): ResponseBody {
  let bytes: Buffer = Buffer.alloc(0)
  let length = 0
  let chunks = 0
  let isCut = false
  return {
    add(chunk) {
      isCut = length + chunk.length > MAX_RESPONSE_BYTES || ++chunks > MAX_CHUNKS
      if (length === 0) {
        bytes = Buffer.from(chunk.subarray(0, MAX_RESPONSE_BYTES))
        length = bytes.length
        return !isCut
      }
      if (bytes.length < MAX_RESPONSE_BYTES) {
        const grown = Buffer.allocUnsafeSlow(MAX_RESPONSE_BYTES)
        bytes.copy(grown)
        bytes = grown
      }
      length += chunk.copy(bytes, length)
      return !isCut
    },
    text() {
      const decoder = new StringDecoder('utf8')
      const text = decoder.write(bytes.subarray(0, length))
      // A character that the limit has cut in two is left out; one that the receiver never ended is replaced.
      return (isCut ? text : text + decoder.end()).replaceAll('\0', '')
    },
  }
}
