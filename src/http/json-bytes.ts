import { heavyTurn } from '../pacing.ts'

/** How much of a list is written in one turn of the event loop: a page of 24 MiB would take a tenth of a second at a stretch. */
const PIECE_LENGTH = 64 * 1024
/** Lists that are longer than so many pieces are written one after the other: side by side, each would be in memory twice. */
const SHORT_PIECES = 16

let last = Promise.resolve()

/** Resolves when those who came before have finished, with what is to be called at the end. */
async function oneAfterTheOther(): Promise<() => void> {
  const before = last
  const { promise, resolve } = Promise.withResolvers<void>()
  last = promise
  await before
  return resolve
}

/**
 * `JSON.stringify(value)` in UTF-8. The items of a list, an object's `data`, are written in pieces, between which everybody else is
 * served.
 */
export async function jsonBytes(value: { data?: unknown }): Promise<Buffer<ArrayBuffer>> {
  const { data } = value
  if (!Array.isArray(data)) return Buffer.from(JSON.stringify(value))
  const frame = JSON.stringify({ ...value, data: [] })
  const start = frame.indexOf('"data":[') + '"data":['.length
  const pieces: Buffer<ArrayBuffer>[] = []
  let text = frame.slice(0, start)
  let end = () => {}
  try {
    for (const [index, item] of data.entries()) {
      text += (index === 0 ? '' : ',') + JSON.stringify(item)
      if (text.length < PIECE_LENGTH) continue
      pieces.push(Buffer.from(text))
      text = ''
      if (pieces.length === SHORT_PIECES) end = await oneAfterTheOther()
      await heavyTurn()
    }
    pieces.push(Buffer.from(text + frame.slice(start)))
    return Buffer.concat(pieces)
  } finally {
    end()
  }
}
