import { randomUUID } from 'node:crypto'
import { Client, Pool } from 'undici'
import { createSigner } from '../../src/flow/sign.ts'
import { signingKey } from '../../src/secrets.ts'
import { AUTHORITY } from '../../test/support/certificates.ts'
import { nowMicros, serve } from './serve.ts'

// The ceiling of delivering: signed POSTs with undici and nothing else, in two ways. `request` is how one would write it: on a
// pool of as many connections as are in flight. `dispatch` is the leanest there is, and a third faster: a client for each, whose answers
// nobody reads.

export type Posting = {
  origin: string
  inFlight: number
  seconds: number
  payloadBytes: number
  by: 'request' | 'dispatch'
}

const signedHeaders = createSigner('service')

async function post({ origin, inFlight, seconds, payloadBytes, by }: Posting) {
  const keys = [signingKey(`whsec_${Buffer.alloc(32, 7).toString('base64')}`)]
  const data = `{"filler":"${'x'.repeat(payloadBytes - 13)}"}`
  const begun = nowMicros()
  const until = begun + seconds * 1e6
  let posts = 0

  function signed() {
    const eventId = randomUUID()
    const body = `{"id":"${eventId}","type":"bench.one","timestamp":"${new Date().toISOString()}","data":${data}}`
    const timestampSeconds = Math.floor(Date.now() / 1000)
    const headers = {
      'content-type': 'application/json',
      'user-agent': 'bench',
      ...signedHeaders({ eventId, deliveryId: eventId, timestampSeconds, body, keys }),
    }
    return { path: '/one', method: 'POST', headers, body } as const
  }

  const dispatch = (client: Client) =>
    new Promise<void>((resolve, reject) => {
      client.dispatch(signed(), {
        onRequestStart: () => {},
        onResponseStart: () => {},
        onResponseData: () => {},
        onResponseEnd: () => resolve(),
        onResponseError: (_controller, error) => reject(error),
      })
    })

  const options = { allowH2: false, connect: { ca: AUTHORITY } }
  const pool = new Pool(origin, { ...options, connections: inFlight })
  async function loop(): Promise<void> {
    const client = new Client(origin, options)
    while (nowMicros() < until) {
      if (by === 'dispatch') await dispatch(client)
      else await (await pool.request(signed())).body.dump()
      posts++
    }
    await client.close()
  }
  await Promise.all(Array.from({ length: inFlight }, loop))
  await pool.close()
  return { posts, seconds: (nowMicros() - begun) / 1e6 }
}

serve({ run: post })
