import { once } from 'node:events'
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net'

export interface TcpReceiver {
  port: number
  url: string
  /** Every connection that was ever accepted. */
  sockets: Socket[]
  close(): Promise<void>
}

/** A receiver that speaks whatever bytes the test wants, on a free port. */
export async function listenTcp(onConnection: (socket: Socket) => void, host = '127.0.0.1', port = 0) {
  return listen(createServer({ noDelay: true }), 'connection', onConnection, host, port)
}

/** Puts any server (TCP, TLS, HTTP) on a free port and keeps count of its sockets. */
export async function listen<Connection extends Socket>(
  server: Server,
  event: string,
  onConnection: (socket: Connection) => void,
  host = '127.0.0.1',
  port = 0,
): Promise<TcpReceiver> {
  const sockets: Socket[] = []
  server.on('connection', (socket: Socket) => {
    sockets.push(socket)
    socket.on('error', () => {})
  })
  server.on(event, onConnection)
  server.listen(port, host)
  await once(server, 'listening')
  const address = server.address() as AddressInfo
  return {
    port: address.port,
    url: `http://${host}:${address.port}/hook`,
    sockets,
    close: async () => {
      for (const socket of sockets) socket.destroy()
      if (server.listening) await new Promise((resolve) => server.close(resolve))
    },
  }
}

/** Calls back for each whole POST (with a content-length) that arrives on the socket. */
export function onRequest(socket: Socket, answer: (head: string, body: string) => void): void {
  let received = ''
  socket.on('data', (chunk) => {
    received += chunk.toString('latin1')
    for (;;) {
      const end = received.indexOf('\r\n\r\n')
      if (end === -1) return
      const head = received.slice(0, end)
      const length = Number(/content-length: (\d+)/i.exec(head)?.[1] ?? 0)
      if (received.length < end + 4 + length) return
      const body = received.slice(end + 4, end + 4 + length)
      received = received.slice(end + 4 + length)
      answer(head, body)
    }
  })
}
