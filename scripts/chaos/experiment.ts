import type { Scope } from '../../test/support/cleanup.ts'
import type { Cluster } from './cluster.ts'
import { type Judgement, judge } from './oracle.ts'
import { createScope } from './scope.ts'
import { createWorld, type Setup, type World } from './world.ts'

// How an experiment is added: write an Experiment (below) in a file of this folder that has its theme, and name it in the
// list of experiments.ts. It gets a World (world.ts says all that is in it) with a fresh database, services that run,
// endpoints and a ledger of what arrives. It publishes with `world.load` or `world.publish`, makes its fault, says with
// `world.fault(when)` when that was (what was in flight then is the bound for duplicates), waits with
// `world.quiesce()` if it has to measure until the end, and returns its figures and its conditions. Processes are ended
// with `world.fleet.kill` or `.stop`: one that ends by itself is a finding. What `run` decides by chance, it decides with
// `world.random`. Afterwards the oracle looks at everything, whatever the experiment looked at. `world.quick` asks for fewer
// repetitions.

export type Experiment = {
  /** As in the fault matrix: F1. */
  id: string
  /** What is done, in a few words. */
  title: string
  setup?: Setup
  /** Brings a Postgres of its own; without, it shares one with others, and leaves it as it was. */
  cluster?: (scope: Scope) => Promise<Cluster>
  /** After so many seconds, all included, it has failed. */
  limitSeconds?: number
  run: (world: World) => Promise<Finding>
}

export type Finding = {
  /** Its own figures, for the table: numbers with their unit in the name, or words. */
  figures: Record<string, number | string>
  /** What must be true, said as a sentence that is true when it passes. */
  conditions: Record<string, boolean>
  /** Those that also hang on how fast the machine is: left out where the run is not `timed`. */
  inTime?: Record<string, boolean>
}

export type Outcome = {
  id: string
  title: string
  seed: number
  pass: boolean
  seconds: number
  peakMiB: number
  /** Why it did not pass. */
  problems: string[]
  /** Null when it did not come to its end. */
  judgement: Omit<Judgement, 'problems'> | null
  figures: Finding['figures']
}

const LIMIT_SECONDS = 300

/** Runs one experiment with one seed, in a world of its own, and never throws. */
export async function runExperiment(
  experiment: Experiment,
  shared: Cluster,
  { seed, quick, timed = true }: { seed: number; quick: boolean; timed?: boolean },
): Promise<Outcome> {
  const { id, title, setup = {}, limitSeconds = LIMIT_SECONDS } = experiment
  const begun = performance.now()
  const { scope, close } = createScope()
  let world: World | undefined
  const outcome = (result: Pick<Outcome, 'problems' | 'judgement' | 'figures'>): Outcome => ({
    id,
    title,
    seed,
    pass: result.problems.length === 0,
    seconds: Math.round((performance.now() - begun) / 1000),
    peakMiB: world?.fleet.peakMiB() ?? 0,
    ...result,
  })
  try {
    return await within(limitSeconds, async () => {
      const cluster = (await experiment.cluster?.(scope)) ?? shared
      world = await createWorld(scope, cluster, { seed, quick, setup })
      const { figures, inTime, ...found } = await experiment.run(world)
      const conditions = { ...found.conditions, ...(timed && inTime) }
      await world.quiesce()
      const { problems, ...judgement } = await judge(world)
      const broken = Object.keys(conditions).filter((condition) => !conditions[condition])
      problems.push(...broken.map((condition) => `it is not so that ${condition}`))
      return outcome({ problems, judgement, figures })
    })
  } catch (error) {
    const problems = [String((error as Error).stack), ...(world?.fleet.problems() ?? [])]
    return outcome({ problems, judgement: null, figures: {} })
  } finally {
    await close()
  }
}

async function within<T>(seconds: number, run: () => Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`it took more than ${seconds} s`)), seconds * 1000)
  })
  return await Promise.race([run(), late]).finally(() => clearTimeout(timer))
}
