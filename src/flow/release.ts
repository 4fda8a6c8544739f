import type { Pool } from '../db/open.ts'
import { retried } from '../db/retried.ts'
import { inTurn } from '../in-turn.ts'
import type { Log } from '../log.ts'
import type { Standing } from './claim.ts'
import type { Lanes } from './lanes/lanes.ts'
import { type Loop, startLoop } from './loop.ts'
import { createPortion } from './portion.ts'

/** Held deliveries are looked at this often, and whenever more may go out. */
const LOOK_MS = 250
/** Looks begin at least so long after each other, so that one serves many settled attempts. */
const PAUSE_MS = 10
/** Looks for probes that are due begin at least so long after each other. */
const PROBES_PAUSE_MS = 100
/**
 * Where thousands of endpoints have held deliveries, looking takes long, and would keep Postgres from all else just when an outage has
 * made them so many. So looks begin at least so many times as long after each other, up to this.
 */
const PAUSE_TIMES = 5
const MOST_PAUSE_MS = { others: 250, probes: 5000 }
/** And the next one, where nothing gives a reason for it, comes so many times as long after the last, up to this. */
const IDLE_TIMES = 20
const MOST_IDLE_MS = 1000
const MAX_LANES = 500
/** They are kept until the next look for them, as there is room for few at once. */
const MAX_PROBES = 2000
/** From how many failures in a row an endpoint counts as failing although it answers. */
const FAILS_ON = 3
/** As many as waybill.release_held releases at once. */
const MAX_RELEASED = 2000

/** So many of an endpoint may be released in any look, whatever the others want. */
const PART = 64
/** With more than so many retries, they are released only as they can be sent: in the queue they would stand before all that are due later. */
const FEW_RETRIES = 64

/** For how long ahead the time slots of paced endpoints are given out. Looks are up to 25 ms apart where there are many at once. */
const SECONDS_AHEAD = { least: 0.025, most: 0.5 }

type Candidate = {
  tenantId: string
  endpointId: string
  standing: Standing
  wanted: number
  hasManyRetries: boolean
  comesAtOnce: boolean
  maxPerSecond: number | null
  isProbe: boolean
}
/** `busy`: how many the endpoint has in hand here; `room`: for how many more a place is kept. */
type Granted = Candidate & { busy: number; room: number }

/**
 * Puts held deliveries back in the queue as their endpoints can take them: probes when they are due, what is paced as its moments come, the
 * rest in chunks for which this worker's lanes have room. `hasBacklog` tells whether first attempts wait in the queue: those released that
 * are not urgent (waybill.release_held) come after them. `leaseSeconds`: how long a probe may be under way before another takes its place.
 */
export function startReleaser(deps: {
  pool: Pool
  lanes: Lanes
  hasBacklog: () => boolean
  slots: number
  leaseSeconds: number
  log: Log
}): Loop {
  const { pool, lanes, slots, log } = deps
  const portion = createPortion(MAX_RELEASED)
  /** Of those that were due at the last look for them, what has not been granted a place since that began. */
  let probes: Candidate[] = []
  /** The endpoints that have. */
  let served = new Set<string>()
  /** How long the last looks took, in milliseconds. */
  const took = { others: 0, probes: 0 }

  async function look(what: 'others' | 'probes', most: number): Promise<Candidate[]> {
    const begun = performance.now()
    try {
      return await findCandidates(pool, { probes: what === 'probes', most })
    } finally {
      took[what] = performance.now() - begun
    }
  }

  const pauseAfter = (what: 'others' | 'probes') => Math.min(PAUSE_TIMES * took[what], MOST_PAUSE_MS[what])
  const idleAfter = (what: 'others' | 'probes') => Math.max(LOOK_MS, Math.min(IDLE_TIMES * took[what], MOST_IDLE_MS))

  /** Tenants take turns, and so do a tenant's probes and its others. */
  function inOrder(others: Candidate[]): Candidate[] {
    const both = [...others.entries(), ...probes.entries()].sort(([one], [other]) => one - other)
    return inTurn(
      both.map(([, lane]) => lane),
      ({ tenantId, isProbe }) => `${isProbe} ${tenantId}`,
    )
  }

  /**
   * For how many seconds ahead what is paced is released. It has slots here while it waits for its moment: at most half of them, since what
   * finds none is held again, and has lost its moment.
   */
  function secondsAhead(candidates: Candidate[]): number {
    const perSecond = candidates.reduce((sum, { maxPerSecond }) => sum + (maxPerSecond ?? 0), 0)
    return Math.max(SECONDS_AHEAD.least, Math.min(SECONDS_AHEAD.most, slots / 2 / perSecond))
  }

  /** Places for these deliveries. */
  function grant(candidates: Candidate[], { most, ahead }: { most: number; ahead: number }): Granted[] {
    const inTime = (lane: Candidate) =>
      lane.maxPerSecond === null ? Infinity : Math.ceil(lane.maxPerSecond * ahead) - lanes.early(lane)
    const part = Math.max(PART, Math.floor(most / candidates.length))
    let left = most
    return candidates.flatMap((lane) => {
      if (left <= 0) return []
      const busy = lanes.busy(lane.endpointId)
      const room = lanes.reserve(lane, {
        wanted: Math.min(lane.wanted, inTime(lane), part, left),
        comeAtOnce: lane.comesAtOnce || !deps.hasBacklog(),
      })
      left -= room
      return room > 0 ? [{ ...lane, busy, room }] : []
    })
  }

  /** Answers whether a probe came to nothing, as another worker had it before. */
  async function release(granted: Granted[], ahead: number): Promise<boolean> {
    const asked = granted.reduce((sum, { room }) => sum + room, 0)
    // A replay that becomes the next probe locks the delivery before the endpoint's counters, so the two can deadlock.
    const released = await portion.try(asked, () =>
      retried(
        () => pool<{ endpoint_id: string; released: number }[]>`
          select endpoint_id, released from waybill.release_held(
            ${granted.map((lane) => lane.tenantId)}::text[], ${granted.map((lane) => lane.endpointId)}::uuid[],
            ${granted.map((lane) => lane.busy)}::int[], ${granted.map((lane) => lane.busy + lane.room)}::int[], make_interval(secs => ${deps.leaseSeconds}),
            make_interval(secs => ${ahead}))`,
      ),
    )
    const counts = new Map(released.map((lane) => [lane.endpoint_id, lane.released]))
    for (const lane of granted) lanes.giveBack(lane, lane.room - (counts.get(lane.endpointId) ?? 0))
    return granted.some(({ endpointId, isProbe }) => isProbe && !counts.has(endpointId))
  }

  /**
   * In how many milliseconds to look again for what is paced: when half of this time is over, or of what any endpoint has for less. Null
   * without any. One that has nothing had no room, and whoever leaves it some wakes this.
   */
  function restFor(candidates: Candidate[], ahead: number): number | null {
    const aheads = candidates
      .flatMap((lane) => (lane.maxPerSecond === null ? [] : lanes.early(lane) / lane.maxPerSecond))
      .filter((seconds) => seconds > 0)
    if (aheads.length === 0) return null
    return (Math.max(SECONDS_AHEAD.least, Math.min(ahead, ...aheads)) / 2) * 1000
  }

  let rest: number | null = null
  const releasing = startLoop({
    name: 'release',
    idleMs: LOOK_MS,
    // What is paced has its moments, however long a look takes.
    pauseMs: () => Math.max(PAUSE_MS, Math.min(pauseAfter('others'), rest ?? Infinity)),
    log,
    async run() {
      const others = await look('others', MAX_LANES)
      const known = new Set(others.map(({ endpointId }) => endpointId))
      lanes.noteHeld(known, { all: others.length < MAX_LANES })
      // One that was found before may have been closed since.
      probes = probes.filter(({ endpointId }) => !known.has(endpointId))
      const ahead = secondsAhead(others)
      const granted = grant(inOrder(others), { most: portion.most(), ahead })
      for (const { endpointId } of granted) served.add(endpointId)
      probes = probes.filter(({ endpointId }) => !served.has(endpointId))
      const isStale = granted.length > 0 && (await release(granted, ahead))
      rest = restFor(others, ahead)
      if (isStale && probes.length > 0) return true
      return rest ?? (granted.length + probes.length > 0 ? LOOK_MS : idleAfter('others'))
    },
  })
  const probing = startLoop({
    name: 'release-probes',
    idleMs: MOST_IDLE_MS,
    pauseMs: () => Math.max(PROBES_PAUSE_MS, pauseAfter('probes')),
    log,
    async run() {
      served = new Set()
      const found = await look('probes', MAX_PROBES)
      probes = found.filter(({ endpointId }) => !served.has(endpointId))
      if (probes.length > 0) releasing.wake()
      return idleAfter('probes')
    },
  })
  return {
    wake() {
      releasing.wake()
      probing.wake()
    },
    stop: async () => void (await Promise.all([releasing.stop(), probing.stop()])),
  }
}

/**
 * Endpoints whose `probes` are due, or others whose held deliveries may go out, in the order in which they should. If there are more than
 * `most`, tenants take turns, as one may have thousands for which there is no room. Nothing is joined but by look-ups: the statistics that
 * its plan goes by may be from when nothing was held, and thousands of endpoints may be down by now.
 */
const findCandidates = (pool: Pool, { probes, most }: { probes: boolean; most: number }) => pool<Candidate[]>`
  with stats as (
    -- The latest: when its tenant last had a probe under way. When the tenant's next one is due says little: one with dozens of endpoints
    -- that hang always has one that has long been due, as what has been failing for long is probed the least often.
    select tenant_id, endpoint_id, pending, retrying, held, failure_streak, recent_status_codes[1] as last_code, last_success_at,
      breaker, ramp, next_probe_at,
      max(case when breaker = 'open' then case when probing is not null and next_probe_at > now() then now() else last_failure_at end end)
        over (partition by tenant_id) as latest
    from waybill.endpoint_stats where held > 0 and (breaker = 'open') = ${probes}
  ), held as (
    select s.tenant_id, s.endpoint_id, s.latest, waybill.standing(
        -- One that has answered counts as failing only if it goes on failing: those that hang may fill the slots of that standing.
        case when s.failure_streak < ${FAILS_ON} and s.last_code is not null then 0 else s.failure_streak end, s.last_success_at) as standing,
      least(s.held, case when e.ordered or s.breaker = 'open' then 1 when s.breaker = 'half_open' then 2 * s.ramp end)::float8 as wanted, s.retrying > ${FEW_RETRIES} as many_retries,
      s.breaker <> 'closed' or e.ordered or e.max_per_second is not null or s.retrying > 0 as comes_at_once, s.breaker = 'open' as is_probe, e.max_per_second,
      case when s.breaker = 'open' then s.next_probe_at end as due
    from stats s cross join lateral (
      select * from waybill.endpoints e where e.tenant_id = s.tenant_id and e.endpoint_id = s.endpoint_id and is_active offset 0
    ) e
    where (s.breaker <> 'open' or s.next_probe_at <= now())
      -- One delivery is under way, or waits for its retry.
      and not (e.ordered and s.pending + s.retrying > s.held)
  ), own as (
    -- A tenant's probes in the order in which they are due, the rest by chance.
    select *, row_number() over (partition by tenant_id order by due, random()) as nth from held
  ), placed as (
    -- In each round the probes of those that have had none for the longest come first; the rest, with which they take turns, by chance.
    select *, row_number() over (partition by nth order by latest, random()) as place from own
  )
  select tenant_id as "tenantId", endpoint_id as "endpointId", standing, wanted, many_retries as "hasManyRetries", comes_at_once as "comesAtOnce",
    max_per_second as "maxPerSecond", is_probe as "isProbe"
  from placed order by nth, place limit ${most}`
