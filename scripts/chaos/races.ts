import { caller } from '../../test/support/service.ts'
import type { Experiment } from './experiment.ts'
import { ALONE } from './measure.ts'
import { newPublish } from './publisher.ts'
import type { World } from './world.ts'

const ROUNDS = 50
const AT_ONCE = 50

/** Publishes with one key, all at once, by each API in turn; the payloads take turns as well. */
async function race(world: World, key: string, payloads: string[]) {
  const calls = world.fleet.urls().map((url) => caller(url, world.tenant.key))
  const replies = await Promise.all(
    Array.from({ length: AT_ONCE }, async (_, nth) => {
      const payload = payloads[nth % payloads.length]!
      // Each payload goes to each API.
      const call = calls[Math.floor(nth / payloads.length) % calls.length]!
      const body = `{"event_type":"order.paid","payload":${payload}}`
      const reply = await call('POST', '/v1/events', { body, headers: { ...ALONE, 'idempotency-key': key } })
      return { payload, status: reply.status, body: reply.body }
    }),
  )
  const first = replies.find(({ status }) => status === 202)
  const { tenantId } = world.tenant
  const entry = newPublish({ tenantId, key, type: 'order.paid', payload: first?.payload ?? payloads[0]! })
  entry.eventId = first?.body.event_id ?? null
  world.published.push(entry)
  const winners = replies.filter(({ status }) => status < 300)
  const losers = replies.filter(({ status }) => status === 409)
  return {
    sound: replies.every(({ status }) => status < 300 || status === 409),
    winners: winners.length,
    losers: losers.length,
    accepted: replies.filter(({ status }) => status === 202).length,
    same:
      winners.every(({ body, payload }) => body.event_id === entry.eventId && payload === entry.payload) &&
      losers.every(({ body, payload }) => body.details.event_id === entry.eventId && payload !== entry.payload),
  }
}

const raced = (id: string, title: string, bodies: number): Experiment => ({
  id,
  title,
  setup: { apis: 2 },
  async run(world) {
    const rounds = world.quick ? ROUNDS / 5 : ROUNDS
    world.load({ rate: 20 })
    const races = []
    for (let nth = 0; nth < rounds; nth++) {
      const payloads = Array.from({ length: bodies }, (_, body) => `{"race":${nth},"body":${body}}`)
      races.push(await race(world, `race-${nth}`, payloads))
    }
    await world.quiesce()
    return {
      figures: { races: races.length, publishes_each: AT_ONCE },
      conditions: {
        'each is answered with the event, or 409': races.every(({ sound }) => sound),
        'one is accepted, and all others are told its id': races.every(({ accepted, same }) => accepted === 1 && same),
        'a body wins for all who sent it': races.every(
          ({ winners, losers }) => winners === AT_ONCE / bodies && losers === AT_ONCE - winners,
        ),
      },
    }
  },
})

export const raceExperiments = [
  raced('F16', '50 publishes at once with one key and body, by two APIs', 1),
  raced('F17', '50 publishes at once with one key and two bodies, by two APIs', 2),
]
