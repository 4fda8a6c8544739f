import { caller } from '../../test/support/service.ts'
import { waitFor } from '../../test/support/wait.ts'
import type { Experiment } from './experiment.ts'
import type { Receipt } from './ledger.ts'
import { ALONE } from './measure.ts'
import type { World } from './world.ts'

const AT_ONCE = 100
const STRANGERS = 10

const replayed: Experiment = {
  id: 'F41',
  title: `${AT_ONCE} replays of one delivery at once, by two APIs`,
  // A retry comes from a replay, and not by itself.
  setup: { apis: 2, workers: 2, env: { RETRY_DELAY_SECONDS: '600' } },
  async run(world) {
    const stranger = world.tenants.find(({ tenantId }) => tenantId !== world.tenant.tenantId)!
    const rounds = world.quick ? 4 : 10
    const statuses = new Set<number>()
    const foreign = new Set<number>()
    async function replay(id: string, key: string, times: number, seen: Set<number>) {
      const calls = world.fleet.urls().map((url) => caller(url, key))
      const ask = (nth: number) => calls[nth % calls.length]!('POST', `/v1/deliveries/${id}/replay`, { headers: ALONE })
      for (const { status } of await Promise.all(Array.from({ length: times }, (_, nth) => ask(nth)))) seen.add(status)
    }
    const storm = (id: string) => replay(id, world.tenant.key, AT_ONCE, statuses)

    let first = 200
    let gate = Promise.withResolvers<void>()
    let together = 0
    const paid = world.active[2]!
    paid.reply = async ({ deliveryId }, nth) => {
      if (nth === 1) return first
      together = Math.max(together, world.ledger.open().filter((one) => one.deliveryId === deliveryId).length)
      await gate.promise
      return 200
    }
    world.load({ rate: 20, types: ['order.sent'] })
    const one: number[] = []
    const several: number[] = []
    for (let nth = 0; nth < rounds; nth++) {
      // Delivered, or waiting for its retry.
      first = nth % 2 === 0 ? 200 : 500
      gate = Promise.withResolvers()
      const { eventId } = await world.publish()
      const ofEvent = (receipt: Receipt) => receipt.endpoint === paid && receipt.eventId === eventId
      const { deliveryId: id } = await waitFor(() => world.ledger.receipts.find(ofEvent))
      await isDone(world, id, first === 200 ? 'delivered' : 'retrying')
      await Promise.all([storm(id), replay(id, stranger.key, STRANGERS, foreign)])
      await waitFor(() => world.ledger.of(id).length > 1, { what: 'the replay to be sent' })
      // What is under way stays as it is.
      await storm(id)
      gate.resolve()
      await isDone(world, id, 'delivered')
      one.push(world.ledger.of(id).length - 1)
      // Where attempts end meanwhile, each of these may begin another, after the last.
      await storm(id)
      await isDone(world, id, 'delivered')
      several.push(world.ledger.of(id).length - 2)
      world.replays.set(id, 1 + AT_ONCE)
    }
    return {
      figures: {
        storms: 3 * rounds,
        replays_each: AT_ONCE,
        runs_of_a_slow_one: Math.max(...one),
        runs_of_a_fast_one_max: Math.max(...several),
        at_once_max: together,
        answers: [...statuses].join(' '),
      },
      conditions: {
        'each replay is accepted': statuses.size === 1 && statuses.has(202),
        'all that come before its attempt ends are one run': one.every((runs) => runs === 1),
        'those that come later are at least one more, and at most one each': several.every(
          (runs) => runs >= 1 && runs <= AT_ONCE,
        ),
        'a delivery is never sent twice at once': together === 1,
        'another tenant is told that there is none': foreign.size === 1 && foreign.has(404),
      },
    }
  },
}

const isDone = ({ database: { sql } }: World, id: string, status: string) =>
  waitFor(
    async () => (await sql`select from waybill.deliveries where delivery_id = ${id} and status = ${status}`).length > 0,
    { timeoutMs: 30_000, what: `a delivery to be ${status}` },
  )

export const replayExperiments = [replayed]
