import assert from 'node:assert/strict'
import { after, suite, test } from 'node:test'
import { startCluster } from '../scripts/chaos/cluster.ts'
import { runExperiment } from '../scripts/chaos/experiment.ts'
import { EXPERIMENTS } from '../scripts/chaos/experiments.ts'

/** Those of `npm run chaos` that take seconds, touch nothing but their own database, and fail for the most reasons. */
const SELECTED = ['F1', 'F8']

suite('experiments with faults', { concurrency: true }, () => {
  const cluster = startCluster({ after })
  for (const id of SELECTED) {
    const experiment = EXPERIMENTS.find((one) => one.id === id)!
    test(`nothing is lost, nor sent twice without need, by ${experiment.title}`, async () => {
      const { problems, judgement } = await runExperiment(experiment, await cluster, { seed: 1, quick: true })
      assert.deepEqual(problems, [])
      assert.ok(judgement && judgement.published > 0)
    })
  }
})
