import { StringDecoder } from 'node:string_decoder'

/** Bytes of a response body that are read and kept. */
const MAX_RESPONSE_BYTES = 16_384

export interface ResponseBody {
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
  return {
    add(chunk) {
      if (length === 0) {
        bytes = Buffer.from(chunk.subarray(0, MAX_RESPONSE_BYTES))
        length = bytes.length
        return chunk.length <= MAX_RESPONSE_BYTES
      }
      if (bytes.length < MAX_RESPONSE_BYTES) {
        const grown = Buffer.allocUnsafeSlow(MAX_RESPONSE_BYTES)
        bytes.copy(grown)
        bytes = grown
      }
      const kept = chunk.copy(bytes, length)
      length += kept
      return kept === chunk.length
    },
    text() {
      // The decoder leaves out a character that the limit has cut in two.
      const text = new StringDecoder('utf8').write(bytes.subarray(0, length))
      return text.replaceAll('\0', '')
    },
  }
}
