import type { Claim, Standing } from '../claim.ts'
import { busyIn, inTime, isFresh, type Lane, paceOf, stuckIn, taken } from './lane.ts'
import { inPatience } from './pace.ts'
import type { createSlotTurns } from './slot-turns.ts'
import type { createStuckSlots } from './stuck-slots.ts'

/**
 * How many of one tenant's deliveries may be released into the queue in half a second, for each slot of the worker. It is enough for most
 * of what is held when a backlog begins, while nothing is known of its endpoints.
 */
const COMING = 2

/** What may be released for an endpoint. */
type Releasable = {
  /** How many more; none if it is not above 0. */
  most: number
  /** For how many of them a slot can be kept. */
  mostKept: number
  /** Whether they count: those in `slots` as stuck, those in the `queue` as coming, one in `line` and those of a quick endpoint not. */
  as: 'slots' | 'queue' | 'line' | 'quick'
}

/**
 * How much room the endpoints of a process with so many `slots` have in it, by what `stuck` has counted last. `now` is in milliseconds
 * by the clock of the lanes.
 */
export function createLaneRoom({
  cap,
  slots,
  stuck,
  turns,
}: {
  /** How many requests to an endpoint may be under way. */
  cap: number
  slots: number
  stuck: ReturnType<typeof createStuckSlots>
  turns: ReturnType<typeof createSlotTurns>
}) {
  /** The standing as which an endpoint contends for slots: usually all are equal. */
  const contendsAs = (lane: Lane, now: number): Standing => (stuck.isStrained(now) ? lane.standing : 'good')

  /** How many more slots may be stuck for the endpoints of its tenant that stand like this one. */
  const spareOf = (lane: Lane, now: number) => stuck.spareOf(lane.tenantId, contendsAs(lane, now))

  /** A quarter of the slots that are not stuck in other lanes. */
  const share = (lane: Lane, now: number) =>
    Math.max(1, Math.floor(Math.min(slots, stuck.notStuck(contendsAs(lane, now)) + stuckIn(lane, now)) / 4))

  /** How many may be under way at once. */
  const limitOf = (lane: Lane, now: number) => Math.min(cap, Math.max(paceOf(lane, now), share(lane, now)))

  /** How many deliveries this process can start at once, or finish in half a second; any number, if none would wait for long. */
  const roomOf = (lane: Lane, now: number) => Math.max(limitOf(lane, now), paceOf(lane, now), inTime(lane, now, slots))

  /**
   * Whether it may wait for a slot of its tenant's others. As many endpoints may as there are such slots, so that none waits for long;
   * twice as many where something is released, or an endpoint of which all is held would never have a turn.
   */
  const mayLineUp = (lane: Lane, isReleased = false) =>
    turns.mayJoin(lane, stuck.takenBy(lane.tenantId) * (isReleased ? 2 : 1))

  return {
    spareOf,
    limitOf,
    mayLineUp,

    /** How many may wait here, if one of them is this claim. */
    mostWaiting(lane: Lane, { atOnce }: Claim, now: number): number {
      const soon = inPatience(lane.pace, now)
      // Without one under way, the tenant's others make room for it.
      if (lane.started.size === 0) return Math.max(1, soon)
      if (atOnce === 1) return 0
      return isFresh(lane, now) ? Math.max(share(lane, now), soon) : soon
    },

    /** Whether at least half of it is free. */
    isRoomy: (lane: Lane, now: number): boolean => busyIn(lane, now) <= roomOf(lane, now) / 2,

    /** For which endpoints of its tenant there is a slot, if they stand like this one. */
    roomFor: (lane: Lane, now: number) =>
      stuck.mayTake(lane) <= 0 ? 'none' : spareOf(lane, now) > 0 ? 'any' : 'quick',

    /** What may be released for a roomy endpoint. `comeAtOnce`: it does not stand behind others in the queue. */
    releasable(lane: Lane, { comeAtOnce, now }: { comeAtOnce: boolean; now: number }): Releasable {
      const busy = busyIn(lane, now)
      const left = stuck.mayTake(lane)
      const isQuick = busy < Math.max(paceOf(lane, now), inTime(lane, now, slots))
      const joinsLine = left <= 0 && busy === 0 && mayLineUp(lane, true)
      // One that has some under way and is slow would otherwise find none on arrival, as new ones leave it half of its places only.
      const needsSlots = comeAtOnce || lane.standing === 'failing' || (!isQuick && lane.started.size > 0)
      const mostKept = needsSlots && !joinsLine ? Math.max(0, Math.min(left, cap - taken(lane, now))) : 0
      const byRoom = Math.min(roomOf(lane, now) - busy, joinsLine ? 1 : left)
      if (isQuick) {
        // As long as anything is held, all that is published is held first and then released, which takes twice as long. A quick
        // endpoint must not fall behind for that alone, so it gets all at once: a few at a time would never be all. But it is only as
        // quick as its pace says if it has all the slots that it could use.
        const isAtItsPace = left >= limitOf(lane, now) - lane.started.size
        const most = isAtItsPace ? Math.max(byRoom, inTime(lane, now, slots) - busy) : byRoom
        return { most, mostKept, as: joinsLine ? 'line' : 'quick' }
      }
      const byComing = needsSlots ? Infinity : COMING * slots - stuck.comingFor(lane.tenantId)
      const most = Math.min(byRoom, byComing, stuck.spareOf(lane.tenantId, lane.standing))
      return { most, mostKept, as: joinsLine ? 'line' : needsSlots ? 'slots' : 'queue' }
    },
  }
}
