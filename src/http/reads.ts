import type { Context } from 'hono'
import type { Db, Pool } from '../db/open.ts'
import { createRequestRoom } from '../room.ts'
import type { Env } from './answer.ts'
import { jsonBytes } from './json-bytes.ts'

/**
 * Answers 200 with what `read` returns, as JSON unless it is text already. `read` runs one query at a time, since its turn is for
 * one connection. Throws `service overloaded` if waiting takes too long, and whatever `read` throws.
 */
export type Reads = (
  c: Context<Env>,
  tenantId: string,
  read: (sql: Db) => Promise<object | string>,
) => Promise<Response>

/** The room for answers that their clients have not read yet. A long list is usually up to 4 MiB, at worst 24. */
const UNREAD_BYTES = 64 * 1024 * 1024
/** An answer up to this size takes no room: the kernel's buffer for the connection takes it at once. */
const SMALL_BYTES = 16 * 1024
/** What is left of a request's time (http/deadline.ts) after a turn and a query that took as long as they may. */
const UNREAD_WAIT_MS = 400

/**
 * Reads from `pool`. Two things bound them, and a tenant gets at most half of what the others leave of each. Turns: `most` run at
 * once, so that publishing, authentication, limits and recording always have connections. Bytes: an answer takes room until the
 * client has read it or its connection is gone. A turn ends only when its answer has room, so at most as many answers are without
 * room as there are turns. Answers that nobody reads are cut off (http/server/unread.ts).
 */
export function createReads(pool: Pool, most: number): Reads {
  const turns = createRequestRoom(most)
  const unread = createRequestRoom(UNREAD_BYTES, { maxWaitMs: UNREAD_WAIT_MS })

  return (c, tenantId, read) =>
    turns.run(tenantId, 1, async () => {
      const found = await read(pool)
      // As text it would be copied once more for the socket.
      const body = typeof found === 'string' ? Buffer.from(found) : await jsonBytes(found)
      if (body.length > SMALL_BYTES) onceGone(c.env, await unread.enter(tenantId, body.length))
      return c.body(body, 200, { 'content-type': 'application/json' })
    })
}

/**
 * Calls `leave` when an answer has been read, or lost with its connection. The connection is watched too: if a CONNECT came behind
 * the request, Node does not report answers that were still queued.
 */
function onceGone({ incoming: { socket }, outgoing }: Env['Bindings'], leave: () => void): void {
  const gone = () => {
    outgoing.off('close', gone)
    socket.off('close', gone)
    leave()
  }
  if (outgoing.closed || socket.closed) leave()
  else for (const end of [outgoing, socket]) end.once('close', gone)
}
