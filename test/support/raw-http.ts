import { connect } from 'node:net'

export type RawAnswer = { status: number; headers: Headers; body: string; text: string }

/**
 * Sends bytes to a port of this machine as they are and resolves with the first answer, or null when the connection ends
 * without one. `then` sends more, once connected.
 */
export function rawRequest(
  port: number,
  head: string,
  then: (write: (bytes: string | Buffer) => void, end: () => void) => void = () => {},
): Promise<RawAnswer | null> {
  return new Promise((resolve) => {
    const socket = connect(port, '127.0.0.1')
    let text = ''
    const finish = () => {
      resolve(parse(text))
      socket.destroy()
    }
    socket.on('data', (chunk) => {
      text += chunk.toString('latin1')
      const answer = parse(text)
      if (answer && answer.body.length >= Number(answer.headers.get('content-length') ?? 0)) finish()
    })
    socket.on('error', finish)
    socket.on('close', finish)
    socket.write(Buffer.from(head, 'latin1'))
    then(
      (bytes) => void (socket.writable && socket.write(bytes)),
      () => socket.end(),
    )
  })
}

function parse(text: string): RawAnswer | null {
  const final = text.replace(/^HTTP\/1\.1 100 Continue\r\n\r\n/, '')
  const end = final.indexOf('\r\n\r\n')
  if (end === -1) return null
  const [statusLine = '', ...lines] = final.slice(0, end).split('\r\n')
  const headers = new Headers(
    lines.map((line) => [line.slice(0, line.indexOf(':')), line.slice(line.indexOf(':') + 1)]),
  )
  return { status: Number(statusLine.split(' ')[1]), headers, body: final.slice(end + 4), text }
}
