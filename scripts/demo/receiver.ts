import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { Webhook } from 'standardwebhooks'
import type { Observations } from './observations.ts'

/** How one endpoint behaves: what it answers to its nth request, and the secret that its requests are signed with. */
export type Behaviour = { answer: (nth: number) => number; secret?: string }

/**
 * A customer's server with one path per endpoint. It checks every request with the `standardwebhooks` package, which
 * shares no code with the service, and answers 400 to what does not verify.
 */
export async function startReceiver(behaviours: Record<string, Behaviour>, observations: Observations) {
  const counts = new Map<string, number>()
  const server = createServer(async (request, response) => {
    const chunks: Buffer[] = []
    for await (const chunk of request) chunks.push(chunk)
    const endpoint = (request.url ?? '').slice(1)
    const behaviour = behaviours[endpoint]
    if (!behaviour?.secret) return void response.writeHead(404).end()
    const nth = (counts.get(endpoint) ?? 0) + 1
    counts.set(endpoint, nth)
    const event = verify(behaviour.secret, Buffer.concat(chunks), request.headers as Record<string, string>)
    const problem = event instanceof Error ? event.message : null
    const status = problem ? 400 : behaviour.answer(nth)
    observations.add({
      msg: problem ? 'receiver.refused' : 'receiver.verified',
      endpoint,
      status,
      problem,
      event_id: request.headers['webhook-id'],
      ...('type' in event && { event_type: event.type }),
    })
    response.writeHead(status, { 'content-type': 'text/plain' }).end(status === 200 ? 'thank you' : 'not today')
  })
  await new Promise<void>((listening) => server.listen(0, '127.0.0.1', listening))
  const { port } = server.address() as AddressInfo
  return {
    urlOf: (endpoint: string) => `http://127.0.0.1:${port}/${endpoint}`,
    close: () => {
      server.close()
      server.closeAllConnections()
    },
  }
}

function verify(secret: string, body: Buffer, headers: Record<string, string>): { type: string } | Error {
  try {
    return new Webhook(secret).verify(body, headers) as { type: string }
  } catch (error) {
    return error as Error
  }
}
