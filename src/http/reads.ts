import type { Pool } from '../db.ts'
import { createRoom } from './room.ts'

/** Runs `read` when it is the tenant's turn. It asks one query at a time: its turn is good for one connection. */
export type Reads = <Result>(tenantId: string, read: (sql: Pool) => Promise<Result>) => Promise<Result>

/**
 * Lists and sums, which may go through many rows, on a `pool` that serves nothing else: however many there are and however
 * long they take, publishing, keys, limits and recording have connections of their own. Of the pool's, a tenant gets
 * at most half of what others leave, and `service overloaded` when it has to wait for too long.
 */
export function createReads(pool: Pool): Reads {
  const room = createRoom(pool.options.max)
  return (tenantId, read) => room.hold(tenantId, 1, () => read(pool))
}
