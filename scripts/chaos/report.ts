import type { Outcome } from './experiment.ts'

const HEAD = [
  '',
  'seed',
  'published',
  'received',
  'lost',
  'unexpected',
  'duplicated',
  'at most',
  'recovered',
  's',
  'pass',
]

/** The table of all runs: the oracle's columns, then what is the experiment's own, then what is wrong. */
export function printReport(outcomes: Outcome[]): void {
  const rows = outcomes.map((outcome) => [
    outcome.id,
    String(outcome.seed),
    ...(outcome.kind === 'run'
      ? [
          outcome.published,
          outcome.received,
          outcome.lost,
          outcome.unexpected,
          outcome.duplicated,
          outcome.bound,
          outcome.recovered,
        ].map(String)
      : Array(7).fill('-')),
    String(outcome.seconds),
    outcome.kind === 'skipped' ? 'skip' : outcome.pass ? 'yes' : 'NO',
  ])
  const widths = HEAD.map((name, column) => Math.max(name.length, ...rows.map((row) => row[column]!.length)))
  const line = (cells: string[]) => cells.map((cell, column) => cell.padStart(widths[column]!)).join('  ')
  let last = ''
  process.stdout.write(`\n${line(HEAD)}\n`)
  outcomes.forEach((outcome, index) => {
    if (outcome.id !== last) process.stdout.write(`${outcome.id} ${outcome.title}\n`)
    last = outcome.id
    process.stdout.write(`${line(rows[index]!)}  ${figuresOf(outcome)}\n`)
    if (outcome.kind === 'skipped') process.stdout.write(`      skipped: ${outcome.reason}\n`)
    if (!outcome.pass) for (const problem of outcome.problems) process.stdout.write(`      ${problem.slice(0, 600)}\n`)
  })
}

function figuresOf(outcome: Outcome): string {
  if (outcome.kind !== 'run') return ''
  const figures = Object.entries({ ...outcome.finding.figures, rss_MiB: outcome.peakMiB })
  return figures.map(([name, value]) => `${name} ${value}`).join(', ')
}
