import type { HttpBindings } from '@hono/node-server'
import type { Context } from 'hono'
import type { Pool } from '../db.ts'
import { createRoom } from './room.ts'
import type { Env } from './route.ts'

/**
 * Answers 200 with the JSON of what `read` finds, which may be text already. `read` asks one query at a time: its turn is good
 * for one connection. Throws `service overloaded` when either wait takes too long, and what `read` throws.
 */
export type Reads = (
  c: Context<Env>,
  tenantId: string,
  read: (sql: Pool) => Promise<object | string>,
) => Promise<Response>

/** What answers that their clients have not taken yet may come to. One of many rows is 4 MiB as a rule, 24 at worst. */
const UNREAD_BYTES = 64 * 1024 * 1024
/** Up to this size an answer is not ours for long: the buffer that the kernel has for every connection takes it. */
const SMALL_BYTES = 16 * 1024
/** What is left of a request's time (http/deadline.ts) after a turn and a query that both came late. */
const UNREAD_WAIT_MS = 400

/**
 * What may be large: lists, sums, payloads. They are bounded twice, and of either a tenant gets at most half of what others
 * leave. Turns: they are read on a `pool` that serves nothing else, so that publishing, keys, limits and recording have
 * connections of their own however many there are and however long they take. Bytes: an answer has room until it is read or its
 * connection is gone, and its turn lasts until it has room, so that no more than the turns' are without. Those
 * that nobody reads are cut off in time (http/listen.ts).
 */
export function createReads(pool: Pool): Reads {
  const turns = createRoom(pool.options.max)
  const unread = createRoom(UNREAD_BYTES, UNREAD_WAIT_MS)

  const takeRoom = (c: Context<Env>, tenantId: string, bytes: number) =>
    new Promise<void>((enter, refuse) => {
      const keep = () => {
        enter()
        return untilGone(c.env)
      }
      unread.hold(tenantId, bytes, keep).catch(refuse)
    })

  return (c, tenantId, read) =>
    turns.hold(tenantId, 1, async () => {
      const found = await read(pool)
      // As bytes, it is kept once; as text, once more for the socket.
      const body = Buffer.from(typeof found === 'string' ? found : JSON.stringify(found))
      if (body.length > SMALL_BYTES) await takeRoom(c, tenantId, body.length)
      return c.body(body, 200, { 'content-type': 'application/json' })
    })
}

/**
 * Resolves when an answer has been taken, or lost with its connection: where CONNECT came behind it, Node does not say so of
 * those that still had their turn to come.
 */
const untilGone = ({ incoming: { socket }, outgoing }: HttpBindings): Promise<void> =>
  new Promise((resolve) => {
    const gone = () => {
      outgoing.off('close', gone)
      socket.off('close', gone)
      resolve()
    }
    if (outgoing.closed || socket.closed) resolve()
    else for (const end of [outgoing, socket]) end.once('close', gone)
  })
