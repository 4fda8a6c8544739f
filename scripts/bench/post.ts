import { randomUUID } from 'node:crypto'
import { Client } from 'undici'
import { createSigner } from '../../src/flow/sign.ts'
import { nowMicros, serve } from './helper.ts'

// The ceiling of delivering: signed POSTs with undici and nothing else. Each of the `inFlight` loops has a client of
// its own, as an attempt of the worker has: a shared pool was slower.

export type Posting = { port: number; inFlight: number; seconds: number; payloadBytes: number }

const signedHeaders = createSigner('service')

async function post({ port, inFlight, seconds, payloadBytes }: Posting) {
  const secrets = [`whsec_${Buffer.alloc(32, 7).toString('base64')}`]
  const data = `{"filler":"${'x'.repeat(payloadBytes - 13)}"}`
  const begun = nowMicros()
  const until = begun + seconds * 1e6
  let posts = 0

  const once = (client: Client) =>
    new Promise<void>((resolve, reject) => {
      const eventId = randomUUID()
      const body = `{"id":"${eventId}","type":"bench.one","timestamp":"${new Date().toISOString()}","data":${data}}`
      const headers = {
        'content-type': 'application/json',
        'user-agent': 'bench',
        ...signedHeaders({
          eventId,
          deliveryId: eventId,
          timestampSeconds: Math.floor(Date.now() / 1000),
          body,
          secrets,
        }),
      }
      client.dispatch(
        { path: '/one', method: 'POST', headers, body },
        {
          onRequestStart: () => {},
          onResponseStart: () => {},
          onResponseData: () => {},
          onResponseEnd: () => resolve(),
          onResponseError: (_controller, error) => reject(error),
        },
      )
    })

  await Promise.all(
    Array.from({ length: inFlight }, async () => {
      const client = new Client(`http://127.0.0.1:${port}`, { allowH2: false })
      while (nowMicros() < until) {
        await once(client)
        posts++
      }
      await client.close()
    }),
  )
  return { posts, seconds: (nowMicros() - begun) / 1e6 }
}

serve({ run: post })
