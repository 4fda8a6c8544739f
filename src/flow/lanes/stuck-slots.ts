import type { Standing } from '../claim.ts'
import { arriving, busyIn, keptSlots, type Lane, paceOf, taken as slotsOf, stuckIn } from './lane.ts'
import { inPatience, newPace, noteFinished, PATIENCE_MS } from './pace.ts'

/** An attempt that has been under way for longer than this is hanging. */
const HANGING_MS = 1000
/** How long a worker counts as strained after half of its slots were hanging. */
const STRAINED_MS = 30_000
const NO_WORSE: Record<Standing, Standing[]> = {
  failing: ['failing', 'unsure', 'good'],
  unsure: ['unsure', 'good'],
  good: ['good'],
}
/** The part of a strained worker's slots for which endpoints of each standing, or of a worse one, contend. */
const PARTS: Record<Standing, number> = { failing: 1 / 4, unsure: 7 / 8, good: 1 }
/**
 * What was released for failing endpoints may take this part more, if it arrives after its place has lapsed, or in another worker than the
 * one that kept the place. It needs a bound of its own: while the database pauses, ever more is released in place of what has not
 * arrived, and all of it together could take all slots of retries for a minute.
 */
const LATE_PART = 1 / 8
/**
 * The part that one tenant's attempts may take, however quick they are: its endpoints can begin to hang at any moment, all at once. Those
 * of endpoints that are not well take less, which leaves something to other tenants' new endpoints: of these nothing is known yet, so
 * they are unsure, and contend for less than all slots.
 */
const TENANT_PARTS: Record<Standing, number> = { failing: 3 / 4, unsure: 3 / 4, good: 7 / 8 }
/**
 * The part that is left to tenants that have no more than that under way: endpoints of several can begin to hang at once, too. While
 * the others' slots are all busy, claims are made for these and put away again, all the time: that costs a worker with few slots a lot,
 * so one with fewer than 64 leaves none.
 */
const LAST_PART = 1 / 64

/**
 * An endpoint that has finished nothing has no pace, so each of its slots would count as stuck. With a backlog for thousands of such
 * endpoints most claims would be held, only to be released and claimed again. So slots that were taken a moment ago do not count as
 * stuck: as many as the worker, at its present pace, will soon have back, but at most this part of those that are not stuck. The price:
 * if these endpoints do hang, their tenant has got three quarters of the free slots instead of half.
 */
const TRUSTED_PART = 1 / 4

/** How many slots of endpoints of each standing or of a worse one. */
type Counts = Record<Standing, number>
type Whose = { tenantId: string; standing: Standing }
const nothing = (): Counts => ({ failing: 0, unsure: 0, good: 0 })

/** Counts in all, and of each tenant. */
type Tally = { all: Counts; byTenant: Map<string, Counts> }
const newTally = (): Tally => ({ all: nothing(), byTenant: new Map() })
const ofTenant = ({ byTenant }: Tally, tenantId: string) => byTenant.get(tenantId) ?? nothing()

function addTo(tally: Tally, { tenantId, standing }: Whose, count: number): void {
  const own = ofTenant(tally, tenantId)
  tally.byTenant.set(tenantId, own)
  for (const one of NO_WORSE[standing]) {
    tally.all[one] += count
    own[one] += count
  }
}

/**
 * How many slots of this process are stuck, and for whom, and how many each tenant has taken. Usually all endpoints contend for all
 * slots. When the worker is strained, because endpoints of hundreds of tenants hang, an endpoint contends with those that are no
 * better for a part of them, so that those that are well do not wait for the others.
 */
export function createStuckSlots(slots: number) {
  let stuck = newTally()
  let taken = newTally()
  /** How many released deliveries are on their way to each tenant's endpoints that have no pace yet, with no slot kept for them. */
  const coming = new Map<string, number>()
  let strainedUntil = -Infinity
  let countedAt = -Infinity
  /** Those that have something in hand, and perhaps some that had. There may be thousands beside them, as each is kept for a second. */
  let busy: Lane[] = []
  /** Of each tenant's that were not released and are beyond their endpoints' pace: how many, and how many taken only now. */
  let beyondPace = new Map<string, { all: number; fresh: number }>()
  /** How fast attempts are finished, whatever the endpoint. */
  const pace = newPace(-Infinity)

  const last = Math.floor(slots * LAST_PART)

  /** For how many slots endpoints of a standing, or of a worse one, contend. Rounded up: of fewer than eight, the unsure do for all. */
  const slotsFor = (standing: Standing) => Math.ceil(slots * PARTS[standing])

  /** How many of them are not stuck. */
  const notStuck = (standing: Standing) => Math.min(...NO_WORSE[standing].map((one) => slotsFor(one) - stuck.all[one]))

  const isStrained = (now: number) => now < strainedUntil

  const take = (whose: Whose, count: number) => addTo(taken, whose, count)

  const expect = (tenantId: string, count: number) => coming.set(tenantId, comingFor(tenantId) + count)
  const comingFor = (tenantId: string) => coming.get(tenantId) ?? 0

  function add(
    { tenantId, standing }: Whose,
    count: number,
    { isReleased, now }: { isReleased: boolean; now: number },
  ): void {
    if (count > 0) addTo(stuck, { tenantId, standing: isReleased || isStrained(now) ? standing : 'good' }, count)
  }

  return {
    /** The lane has something in hand. */
    noteBusy(lane: Lane): void {
      if (!lane.isBusy) busy.push(lane)
      lane.isBusy = true
    },

    /** Counts anew, at most once a millisecond; in between, what comes is added. */
    count(now: number): void {
      if (now - countedAt < 1) return
      countedAt = now
      busy = busy.filter((lane) => {
        lane.isBusy = busyIn(lane, now) > 0
        return lane.isBusy
      })
      stuck = newTally()
      taken = newTally()
      coming.clear()
      let hanging = 0
      beyondPace = new Map()
      for (const lane of busy) {
        let released = keptSlots(lane, now)
        if (paceOf(lane, now) === 0) expect(lane.tenantId, arriving(lane, now) - released)
        let old = 0
        for (const { since, isReleased } of lane.started) {
          if (isReleased) released++
          else if (now - since > PATIENCE_MS) old++
          if (now - since > HANGING_MS) hanging++
        }
        const all = stuckIn(lane, now)
        const others = Math.max(0, all - released)
        const fresh = lane.standing === 'failing' || isStrained(now) ? 0 : Math.max(0, others - old)
        const own = beyondPace.get(lane.tenantId) ?? { all: 0, fresh: 0 }
        if (others > 0) beyondPace.set(lane.tenantId, { all: own.all + others, fresh: own.fresh + fresh })
        add(lane, Math.min(all, released), { isReleased: true, now })
        add(lane, others - fresh, { isReleased: false, now })
        take(lane, slotsOf(lane, now))
      }
      if (hanging >= slots / 2) strainedUntil = now + STRAINED_MS
      let likely = Math.min(inPatience(pace, now), Math.floor(TRUSTED_PART * notStuck('good')))
      for (const [tenantId, { fresh }] of beyondPace) {
        add({ tenantId, standing: 'good' }, fresh - likely, { isReleased: false, now })
        likely = Math.max(0, likely - fresh)
      }
    },

    /** An attempt is finished, soon enough to tell of the worker's pace. */
    noteFinished: (now: number): void => noteFinished(pace, now),

    /** `count` more are taken, stuck or not. */
    take,

    /**
     * `count` more are stuck. What was released for an endpoint always counts for its standing. The rest does so in a strained worker
     * only: retries of a single tenant would keep everybody's probes from being released.
     */
    add,

    /** So many more are on their way to one of the tenant's endpoints, with no slot kept for them. */
    expect,

    /** How many such are on their way. */
    comingFor,

    /** How many slots a tenant has taken. */
    takenBy: (tenantId: string): number => ofTenant(taken, tenantId).good,

    isStrained,

    notStuck,

    /** Whether those that were released for failing endpoints have taken so many that no more may start for which no slot was kept. */
    hasTooMany: (standing: Standing): boolean =>
      standing === 'failing' && notStuck(standing) + Math.floor(slots * LATE_PART) <= 0,

    /** How many more a tenant may take for an endpoint. */
    mayTake({ tenantId, standing }: Whose): number {
      const own = ofTenant(taken, tenantId)
      const most = Math.min(...NO_WORSE[standing].map((one) => Math.ceil(slots * TENANT_PARTS[one]) - own[one]))
      if (last === 0) return most
      const left = (one: Standing) => slotsFor(one) - taken.all[one] - last
      return Math.max(last - own.good, Math.min(most, left('good'), standing === 'good' ? Infinity : left('unsure')))
    },

    /** Whether at least half of a tenant's that are beyond their endpoints' pace have been taken only now, so that others end soon. */
    isTurningOver(tenantId: string): boolean {
      const { all, fresh } = beyondPace.get(tenantId) ?? { all: 0, fresh: 0 }
      return 2 * fresh >= all
    },

    /** How many more may be stuck for one tenant's endpoints: in all, half of what is not stuck for other tenants. */
    spareOf(tenantId: string, standing: Standing): number {
      const own = ofTenant(stuck, tenantId)
      const half = (one: Standing) => Math.max(1, Math.floor((notStuck(one) + own[one]) / 2))
      const spare = Math.min(...NO_WORSE[standing].map((one) => half(one) - own[one]))
      return standing === 'good' ? spare : Math.min(spare, notStuck(standing))
    },
  }
}
