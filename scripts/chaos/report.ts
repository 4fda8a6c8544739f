import type { Outcome } from './experiment.ts'

const COUNTS = ['published', 'received', 'lost', 'unexpected', 'duplicated', 'bound', 'recovered'] as const
const HEAD = ['', 'seed', ...COUNTS, 's', 'pass']

/** The table of all runs: the oracle's columns, then what is the experiment's own, then what is wrong. */
export function printReport(outcomes: Outcome[]): void {
  const rows = outcomes.map(({ id, seed, judgement: judged, seconds, pass }) => [
    id,
    String(seed),
    ...COUNTS.map((count) => String(judged?.[count] ?? '-')),
    String(seconds),
    pass ? 'yes' : 'NO',
  ])
  const widths = HEAD.map((name, column) => Math.max(name.length, ...rows.map((row) => row[column]!.length)))
  const line = (cells: string[]) => cells.map((cell, column) => cell.padStart(widths[column]!)).join('  ')
  let last = ''
  process.stdout.write(`\n${line(HEAD)}\n`)
  outcomes.forEach((outcome, index) => {
    if (outcome.id !== last) process.stdout.write(`${outcome.id} ${outcome.title}\n`)
    last = outcome.id
    process.stdout.write(`${line(rows[index]!)}  ${figuresOf(outcome)}\n`)
    for (const problem of outcome.problems) process.stdout.write(`      ${problem.slice(0, 600)}\n`)
  })
}

const figuresOf = ({ figures, peakMiB }: Outcome) =>
  Object.entries({ ...figures, rss_MiB: peakMiB })
    .map(([name, value]) => `${name} ${value}`)
    .join(', ')
