import { memberOf } from '../../test/support/json.ts'
import { ODD_PAYLOADS, POISON, REFUSED_BODIES } from '../../test/support/poison.ts'
import type { Experiment } from './experiment.ts'
import { ALONE } from './measure.ts'
import { newPublish } from './publisher.ts'
import type { World } from './world.ts'

type Body = { body: string | Uint8Array; headers?: Record<string, string> | undefined }

const AT_ONCE = 20
/** Longer ones are the same again and again. */
const SHORT = 1000

const poisoned: Experiment = {
  id: 'F19',
  title: 'poison payloads, as they are and mixed by chance, under load',
  async run(world) {
    const mixed = world.quick ? 500 : 3000
    world.load({ rate: 20 })
    const bodies: Body[] = [
      ...ODD_PAYLOADS.map(([, payload]) => ({ body: bodyOf(payload) })),
      ...REFUSED_BODIES.map(([, body, , headers]) => ({ body, headers })),
      ...Array.from({ length: mixed }, () => ({ body: mix(world) })),
    ]
    const statuses: number[] = []
    for (let first = 0; first < bodies.length; first += AT_ONCE) {
      const some = bodies.slice(first, first + AT_ONCE)
      const answers = some.map((one, n) => send(world, `poison-${first + n}`, one))
      statuses.push(...(await Promise.all(answers)))
    }
    await world.quiesce()
    const known = statuses.slice(0, ODD_PAYLOADS.length + REFUSED_BODIES.length)
    const count = (status: number) => statuses.filter((one) => one === status).length
    const errors = world.fleet.running().flatMap(({ logs }) => logs.filter(({ level }) => level === 'error'))
    return {
      figures: { bodies: bodies.length, accepted: count(202), refused: count(400), errors_logged: errors.length },
      conditions: {
        'each is accepted or refused with 400': count(202) + count(400) === statuses.length,
        'chance makes both': count(202) > mixed / 10 && count(400) > mixed / 10,
        'what is known is accepted or refused as it should be': known.every(
          (status, index) => status === (index < ODD_PAYLOADS.length ? 202 : 400),
        ),
        'no process has been restarted, nor logs an error': world.fleet.running().length === 2 && errors.length === 0,
      },
    }
  },
}

const bodyOf = (payload: string) => `{"event_type":"order.paid","payload":${payload}}`

/** An odd payload with poison in some place, as it is or escaped as JSON wants it. */
function mix({ random }: World): string {
  const payload = random.pick(ODD_PAYLOADS.map(([, text]) => text).filter(({ length }) => length < SHORT))
  const poison = random.pick(POISON)
  const inside = random.pick([poison, JSON.stringify(poison), JSON.stringify(poison).slice(1, -1)])
  const body = bodyOf(payload)
  const at = random.integer(0, body.length)
  // On the wire there are no halves of surrogate pairs.
  return (body.slice(0, at) + inside + body.slice(at)).toWellFormed()
}

/** Publishes a body as it is. What is accepted must arrive like anything else: the oracle looks at each byte. */
async function send(world: World, key: string, { body, headers }: Body): Promise<number> {
  const options = { body, headers: { ...ALONE, 'idempotency-key': key, ...headers } }
  const answer = await world.call('POST', '/v1/events', options)
  if (answer.status === 202) {
    const text = String(body)
    const { event_type: type } = JSON.parse(text)
    const entry = newPublish({
      tenantId: world.tenant.tenantId,
      key,
      type,
      payload: memberOf(text, 'payload') ?? '',
    })
    entry.eventId = answer.body.event_id
    world.published.push(entry)
  }
  return answer.status
}

export const poisonExperiments = [poisoned]
