import type { Socket } from 'node:net'
import { createWatch } from '../../watch.ts'

/** An answer of which nothing is read for this long is dropped, with its connection: others wait for its memory. */
const UNREAD_MS = 30_000
const LOOK_MS = 2000

const watch = createWatch(LOOK_MS)

/**
 * Looks at a connection as long as it lasts, and destroys it once nothing of an answer has gone out for `UNREAD_MS`. It
 * looks at what is left of the present write. The kernel takes more only when a third of its buffer is free, so a reader needs
 * 30 KiB/s if the buffer is 3 MiB. Node's own socket timeout would also cut off clients that wait for our answer.
 */
export function cutUnread(socket: Socket): void {
  let left = 0
  let looks = 0
  const leave = watch(() => {
    const before = left
    left = (socket as Socket & { _handle?: { writeQueueSize: number } })._handle?.writeQueueSize ?? 0
    looks = left > 0 && left === before ? looks + 1 : 0
    // Looks are counted, not seconds: while this process is stopped, nothing goes out either.
    if (looks * LOOK_MS >= UNREAD_MS) socket.destroy()
  })
  socket.once('close', leave)
}
