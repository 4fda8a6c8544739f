import { Line } from '../line.ts'
import type { Log } from '../log.ts'
import { createTurns, until } from '../pacing.ts'
import { type Claim, hasMissed, Outdated } from './claim.ts'
import type { createDeliver } from './deliver.ts'
import type { InHand } from './in-hand.ts'
import type { Lanes } from './lanes/lanes.ts'
import type { Recorded } from './record.ts'

/** Opening a connection takes as long as several requests, so only this many are opened per turn of the event loop. */
const STARTS_A_TURN = 5

/** The reason with which requests are interrupted, and waiting for them ends, when the grace is over. */
export const SHUTTING_DOWN = new Error('the worker is shutting down')

type Attempts = {
  /** Attempts a claim, which then has a slot, and, as soon as its request is over, the next one that waits for that. */
  start(claim: Claim): void
  /** From now on no waiting claim takes the slot of one that ends. */
  startNoMore(): void
  /** What is under way, or remains to be recorded, caught up with or put away. None of these rejects. */
  all: Line<Promise<unknown>>
}

/**
 * The attempts of a worker, from a claim's slot until it is let go of. `onRoom` is called when an endpoint that has held deliveries
 * has room for some; `closing` aborts with SHUTTING_DOWN.
 */
export function createAttempts(deps: {
  lanes: Lanes
  inHand: InHand
  deliver: ReturnType<typeof createDeliver>
  onRoom: () => void
  closing: AbortSignal
  log: Log
}): Attempts {
  const { lanes, inHand, deliver, closing, log } = deps
  const all = new Line<Promise<unknown>>()
  const turn = createTurns(STARTS_A_TURN)
  let mayFollow = true

  async function attempt(claim: Claim, answered: () => void): Promise<Recorded | undefined> {
    const ids = { tenant_id: claim.tenantId, delivery_id: claim.deliveryId }
    let hasBegun = false
    try {
      if (claim.startAt !== null) await until(claim.startAt, closing)
      // An endpoint that has finished nothing lately may hang, and has no open connection.
      if (lanes.pace(claim) === 0) await turn()
      if (hasMissed(claim)) throw new Outdated()
      hasBegun = true
      const recorded = await deliver(claim, answered)
      // More of a paced endpoint is released in time by itself, unless there was no room.
      const comesByClock = claim.startAt !== null && lanes.early(claim) > 0
      if (recorded.held && !comesByClock && lanes.isRoomy(claim)) deps.onRoom()
      return recorded
    } catch (error) {
      if (error === SHUTTING_DOWN) {
        // Nothing else tells that the receiver may have got the request.
        if (hasBegun) log.info(ids, 'delivery.interrupted')
        await inHand.handBack([claim])
      }
      // A fault of ours: the claim lapses, and the delivery is tried again.
      else if (!(await inHand.putOff(claim, error))) log.error({ ...ids, err: error }, 'delivery.failed')
      return undefined
    }
  }

  function start(claim: Claim): void {
    inHand.takeSlot(claim)
    let endedAt: number | undefined
    const goOn = () => {
      const next = mayFollow ? lanes.next(claim, endedAt) : undefined
      if (next !== undefined) start(next)
    }
    const answered = () => {
      endedAt = performance.now()
      if (inHand.answered(claim)) goOn()
    }
    const done = attempt(claim, answered)
      .finally(() => {
        inHand.letGo([claim])
        goOn()
      })
      .then((recorded) => recorded?.caughtUp)
      .finally(() => all.leave(place))
    const place = all.join(done)
  }

  return {
    start,
    startNoMore() {
      mayFollow = false
    },
    all,
  }
}
