import assert from 'node:assert/strict'
import { after, suite, test } from 'node:test'
import { startCluster } from '../scripts/chaos/cluster.ts'
import { type Experiment, runExperiment } from '../scripts/chaos/experiment.ts'
import { EXPERIMENTS } from '../scripts/chaos/experiments.ts'

/** Those of `npm run chaos` that take seconds, touch nothing but their own database, and fail for the most reasons. */
const SELECTED = ['F1', 'F8']

/** Does nothing to the service, and everything to what the oracle looks at. */
const forgery: Experiment = {
  id: 'F0',
  title: 'a forged ledger',
  async run(world) {
    const { eventId } = await world.publish({ type: 'order.sent' })
    await world.quiesce()
    const { sql } = world.database
    await sql`delete from waybill.deliveries where endpoint_id = ${world.active[1]!.endpointId}`
    const kept = world.ledger.receipts.find(({ endpoint }) => endpoint === world.active[0])!
    world.ledger.receipts.push({ ...kept, head: kept.head.replace('order.sent', 'order.paid') })
    const headers = { 'service-event-id': eventId ?? '', 'service-delivery-id': kept.deliveryId }
    await fetch(world.active[2]!.url, { method: 'POST', headers, body: '{}' })
    return { figures: {}, conditions: { 'conditions count': false } }
  },
}

suite('experiments with faults', { concurrency: true }, () => {
  const cluster = startCluster({ after })
  // All of them run in this process, and others beside it: how fast it goes is for `npm run chaos` to say.
  const run = async (experiment: Experiment) =>
    await runExperiment(experiment, await cluster, { seed: 1, quick: true, timed: false })

  for (const id of SELECTED) {
    const experiment = EXPERIMENTS.find((one) => one.id === id)!
    test(`nothing is lost, nor sent twice without need, by ${experiment.title}`, async () => {
      const { problems, judgement } = await run(experiment)
      assert.deepEqual(problems, [])
      assert.ok(judgement && judgement.published > 0)
    })
  }

  test('the oracle sees what is lost, forged and sent twice', async () => {
    const { pass, problems, judgement } = await run(forgery)
    assert.equal(pass, false)
    assert.deepEqual(
      [judgement?.lost, judgement?.unexpected, judgement?.duplicated],
      [1, 3, 2],
      'a delivery that is gone; its request, a forged one, and one with another type; the latter is there twice, and so is the forged one',
    )
    assert.ok(problems.includes('it is not so that conditions count'))
  })
})
