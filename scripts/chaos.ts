import { writeFileSync } from 'node:fs'
import { parseArgs } from 'node:util'
import { sweepDirectories } from '../test/support/directory.ts'
import { startCluster } from './chaos/cluster.ts'
import { type Outcome, runExperiment } from './chaos/experiment.ts'
import { EXPERIMENTS } from './chaos/experiments.ts'
import { printReport } from './chaos/report.ts'
import { closeAll, createScope } from './chaos/scope.ts'

const USAGE = `Usage: npm run chaos -- [--only F1,F7,…] [--seeds 1,2,3,4,5] [--quick] [--json FILE]

Does to the service what production does, and then holds what was published, what arrived and what the service
says against each other. Exits with 1 when anything is not as promised.

  --only     these experiments; all of them without
  --seeds    each experiment is run once with each; 1,2,3,4,5 without
  --quick    fewer repetitions, and seed 1 alone
  --json     writes all figures there

${EXPERIMENTS.map(({ id, title }) => `  ${id.padEnd(4)} ${title}`).join('\n')}
`

const { values: flags } = parseArgs({
  options: {
    only: { type: 'string' },
    seeds: { type: 'string' },
    quick: { type: 'boolean', default: false },
    json: { type: 'string' },
    help: { type: 'boolean', default: false },
  },
})
const wanted = flags.only?.split(',')
const unknown = (wanted ?? []).filter((id) => !EXPERIMENTS.some((experiment) => experiment.id === id))
if (flags.help || unknown.length > 0) {
  process.stderr.write(unknown.length > 0 ? `chaos: no such experiment: ${unknown.join(', ')}\n\n${USAGE}` : USAGE)
  process.exit(flags.help ? 0 : 1)
}
const seeds = (flags.seeds ?? (flags.quick ? '1' : '1,2,3,4,5')).split(',').map(Number)
const chosen = EXPERIMENTS.filter(({ id }) => wanted?.includes(id) ?? true)

const { scope } = createScope()
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
  process.on(signal, () => void closeAll().then(() => process.exit(130)))
}

const outcomes: Outcome[] = []
try {
  await sweepDirectories()
  const cluster = await startCluster(scope)
  for (const experiment of chosen) {
    for (const seed of seeds) {
      process.stderr.write(`${experiment.id} ${experiment.title}, seed ${seed}`)
      const outcome = await runExperiment(experiment, cluster, { seed, quick: flags.quick })
      process.stderr.write(`: ${outcome.pass ? 'passed' : 'FAILED'}\n`)
      outcomes.push(outcome)
    }
  }
} finally {
  await closeAll()
}
printReport(outcomes)
if (flags.json) writeFileSync(flags.json, `${JSON.stringify(outcomes, null, 2)}\n`)
process.exit(outcomes.every(({ pass }) => pass) ? 0 : 1)
