import { apiExperiments } from './api.ts'
import { changeExperiments } from './changes.ts'
import { clockExperiments } from './clock.ts'
import { databaseExperiments } from './database.ts'
import { durabilityExperiments } from './durability.ts'
import type { Experiment } from './experiment.ts'
import { neighbourExperiments } from './neighbours.ts'
import { orderExperiments } from './order.ts'
import { poisonExperiments } from './poison.ts'
import { pressureExperiments } from './pressure.ts'
import { queueExperiments } from './queue.ts'
import { raceExperiments } from './races.ts'
import { replayExperiments } from './replays.ts'
import { retentionExperiments } from './retention.ts'
import { soakExperiments } from './soak.ts'
import { upkeepExperiments } from './upkeep.ts'
import { workerExperiments } from './workers.ts'

/** All of them, in the order in which they are run. */
export const EXPERIMENTS: Experiment[] = [
  ...workerExperiments,
  ...apiExperiments,
  ...databaseExperiments,
  ...durabilityExperiments,
  ...clockExperiments,
  ...poisonExperiments,
  ...neighbourExperiments,
  ...pressureExperiments,
  ...queueExperiments,
  ...raceExperiments,
  ...retentionExperiments,
  ...replayExperiments,
  ...changeExperiments,
  ...orderExperiments,
  ...upkeepExperiments,
  ...soakExperiments,
].sort((a, b) => Number(a.id.slice(1)) - Number(b.id.slice(1)))
