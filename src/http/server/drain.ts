import type { IncomingMessage } from 'node:http'
import { Server as NetServer, type Socket } from 'node:net'
import type { Duplex } from 'node:stream'
import { setLate } from '../../pacing.ts'

/** How long connections without a request stay once the service stops: for requests that are on their way already. */
const LEAVE_MS = 1000
/** How long a request may still be arriving once the service stops. */
const ARRIVING_MS = 3000

/**
 * `last`: the request that came last, until it has arrived and is answered. `unanswered`: what begins each request whose answer is
 * not handed to the system yet. `ahead`: the weight (see http/server/listen.ts) of those that wait for others to be answered. `read`: how many
 * bytes had come when the last answer was.
 */
export type Connection = { last: IncomingMessage | undefined; unanswered: (() => void)[]; ahead: number; read: number }

export const newConnection = (): Connection => ({ last: undefined, unanswered: [], ahead: 0, read: 0 })

/** Node takes a client that is still reading an answer for idle, and one that has not sent anything yet for busy. */
export const isIdle = (socket: Duplex, { unanswered, read }: Connection) =>
  unanswered.length === 0 && (socket as Socket).bytesRead === read

export type Connections = Map<Duplex, Connection>

/** `haveIdleLeft`: idle connections have been closed. `taken`: how many connections there have been. */
export type State = { isDraining: boolean; haveIdleLeft: boolean; taken: number }

/**
 * Takes the connections that are on their way, and no more, answers what is under way, then closes. Clients that have not sent a
 * whole request within three seconds, or not read their answer within `graceMs`, are cut off.
 */
export function drain(server: NetServer, connections: Connections, state: State, graceMs: number): Promise<void> {
  return new Promise((resolve) => {
    const cut = (isOver: (socket: Duplex, connection: Connection) => boolean) => {
      for (const [socket, connection] of connections) if (isOver(socket, connection)) socket.destroy()
    }
    state.isDraining = true
    server.once('close', () => {
      clearTimeout(leave)
      clearInterval(unfinished)
      clearTimeout(over)
      resolve()
    })
    const closeIdle = () => {
      state.haveIdleLeft = true
      cut(isIdle)
    }
    let leave: NodeJS.Timeout | undefined
    const until = performance.now() + Math.min(ARRIVING_MS, graceMs)
    // To close it resets the connections that wait to be taken, with the requests on them. Each turn takes one, if there is any.
    const closeOnceTaken = (before: number) => {
      if (state.taken !== before && performance.now() < until) return void setImmediate(closeOnceTaken, state.taken)
      // Not Node's own for HTTP, which closes idle connections at once.
      NetServer.prototype.close.call(server)
      leave = setLate(closeIdle, Math.min(LEAVE_MS, graceMs))
    }
    setImmediate(closeOnceTaken, -1)
    const unfinished = setInterval(
      () => cut((_socket, { last, unanswered }) => unanswered.length === 0 || !last?.complete),
      Math.min(ARRIVING_MS, graceMs),
    )
    const over = setTimeout(() => cut(() => true), graceMs)
  })
}
