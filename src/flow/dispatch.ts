import type { Log } from '../log.ts'
import { setLate } from '../pacing.ts'
import type { Kind } from './claim.ts'
import { type Loop, startLoop } from './loop.ts'
import { createPortion } from './portion.ts'
import { createThoroughness } from './thorough.ts'

/** How `fetch` is to claim (see startDispatcher). */
export type Fetch = {
  max: number
  thorough: boolean
  mayWait: boolean
  occupy: (tenantId: string) => () => void
  crowding: string[]
  isCrowding: (tenantId: string, preferred: boolean) => boolean
}

/** Nobody is notified when a retry becomes due, so an idle dispatcher looks this often. */
const POLL_MS = 500
/** How long a fetch waits at most for more free slots when few are: a fetch for several costs no more than one for a single slot. */
const PAUSE_MS = 5
/**
 * If for so long more wait than may (`tooMany`), endpoints that were quick have begun to hang. Then the free slots are used after all, to
 * look behind what waits for these endpoints: what is claimed for others starts, and what is claimed for these is held.
 */
const STANDSTILL_MS = 30
/** Six bundles (sql/functions/bundles.sql). More at once would often be more than an endpoint may have waiting here, and be held. */
const MAX_BATCH = 96
/**
 * The part that one tenant's retries may take of what other tenants' leave of the slots for retries; and the part of that which those
 * may take that are not preferred.
 */
const PART = 7 / 8

/**
 * Keeps `slots` filled: fetches as many items as there are free slots, never more, so that a slow receiver blocks one slot and
 * not a batch. Retries get at most half of the slots, so that a first attempt finds one; while both kinds have a backlog, at
 * most a quarter and, of eight and more, at least an eighth.
 *
 * `fetch` claims at most `max` items and returns whether there are more. Usually it goes on from where claiming has got to; now and
 * then it searches the whole queue (`thorough`). For each item under way it occupies a slot with `occupy`, and calls the returned
 * function when the item ends; calling it again does nothing. `isCrowding` tells whether a tenant's retries have taken so many slots
 * that no more of them may start: the last ones are for those that are `preferred`. `crowding` are the tenants of which no others may.
 * `worthClaiming`: how many first attempts to ask for at most, however many slots are free. `tooMany`: how many slots to leave free, as
 * that many more wait than may. While nothing moves they are used all the same, but for nothing that would have to wait (`mayWait`).
 * `wake` announces first attempts, and if `retries` those too. `hasBacklog`: whether the last fetch left first attempts in the queue.
 */
export function startDispatcher(options: {
  slots: number
  log: Log
  worthClaiming: () => number
  tooMany: () => number
  fetch: (kind: Kind, how: Fetch) => Promise<boolean>
}): Omit<Loop, 'wake'> & { wake(retries?: boolean): void; hasBacklog: () => boolean } {
  const { slots } = options
  const kinds = { first: newState(), retry: newState() }
  const { first, retry } = kinds
  /** How many slots each tenant's retries have. */
  const retriesOf = new Map<string, number>()
  /** Ends the wait for more free slots, if they are enough. */
  let goOn = () => {}
  let isEnough = () => true
  let lastLook = -POLL_MS
  let looks = 0

  function count(kind: Kind, tenantId: string, more: 1 | -1): void {
    kinds[kind].occupied += more
    if (kind === 'first') return
    const own = (retriesOf.get(tenantId) ?? 0) + more
    if (own === 0) retriesOf.delete(tenantId)
    else retriesOf.set(tenantId, own)
  }

  function occupy(kind: Kind, tenantId: string): () => void {
    let isOccupied = true
    count(kind, tenantId, 1)
    return () => {
      if (!isOccupied) return
      isOccupied = false
      count(kind, tenantId, -1)
      if (isEnough()) goOn()
      if (isExpected(first) || isExpected(retry)) loop.wake()
    }
  }

  async function fetch(kind: Kind, room: number, { mayWait = true } = {}): Promise<void> {
    const own = kinds[kind]
    const max = Math.min(Math.floor(room), own.portion.most())
    if (max <= 0) return
    own.isAnnounced = false
    const crowding = kind === 'retry' ? [...retriesOf.keys()].filter((tenantId) => isCrowding(tenantId, false)) : []
    own.hasBacklog = await own.portion.try(max, () =>
      own.look((thorough) =>
        options.fetch(kind, {
          max,
          thorough,
          mayWait,
          occupy: (tenantId) => occupy(kind, tenantId),
          crowding,
          isCrowding: (tenantId, preferred) => kind === 'retry' && isCrowding(tenantId, preferred),
        }),
      ),
    )
  }

  /** Whether so many slots are free, and of use, that waiting for more would gain little. */
  function isWorthwhile(): boolean {
    const many = Math.min(MAX_BATCH, slots / 2)
    return free() >= many && (!first.hasBacklog || options.worthClaiming() >= many)
  }

  /** Resolves with whether they became enough in time. */
  const forSlots = (ms: number, areEnough: () => boolean) =>
    new Promise<boolean>((resolve) => {
      goOn = () => resolve(true)
      isEnough = areEnough
      setLate(() => resolve(false), ms)
    })

  const empty = () => slots - first.occupied - retry.occupied
  const free = () => empty() - options.tooMany()
  const mostRetries = () => Math.floor(Math.max(1, slots / (first.hasBacklog ? 4 : 2)))
  const freeForRetries = () => Math.min(free(), mostRetries() - retry.occupied)

  const partOf = (some: number) => Math.max(1, Math.floor(PART * some))

  function isCrowding(tenantId: string, preferred: boolean): boolean {
    const own = retriesOf.get(tenantId) ?? 0
    const share = partOf(mostRetries() - (retry.occupied - own))
    return own >= (preferred ? share : partOf(share))
  }

  async function run(): Promise<boolean> {
    if (free() <= 0) {
      if (empty() <= 0 || !(isExpected(first) || isExpected(retry))) return false
      // Looked at again after that, as nobody tells when what waits is put away.
      const isMoving = await forSlots(STANDSTILL_MS, () => free() > 0)
      if (!isMoving && free() <= 0 && isExpected(first)) {
        await fetch('first', Math.min(empty(), options.worthClaiming()), { mayWait: false })
      }
      return true
    }
    if (!isWorthwhile() && (first.hasBacklog || retry.hasBacklog)) await forSlots(PAUSE_MS, isWorthwhile)
    const mustLook = performance.now() - lastLook >= POLL_MS
    if (mustLook) {
      lastLook = performance.now()
      looks++
    }
    if (isExpected(first) || mustLook) {
      const share = retry.hasBacklog ? Math.floor(slots / 8) - retry.occupied : 0
      // If a single slot is free, the two kinds take turns.
      const forLook = mustLook && (free() > 1 || looks % 2 === 0) ? 1 : 0
      await fetch('first', Math.min(free() - Math.max(share, forLook), options.worthClaiming()))
    }
    if (isExpected(retry) || mustLook) await fetch('retry', freeForRetries())
    return (isExpected(first) && empty() > 0) || (retry.hasBacklog && freeForRetries() > 0)
  }

  const loop = startLoop({ name: 'dispatch', run, idleMs: POLL_MS, log: options.log })
  return {
    ...loop,
    hasBacklog: () => first.hasBacklog,
    wake(retries = false) {
      first.isAnnounced = true
      retry.isAnnounced ||= retries
      loop.wake()
    },
  }
}

/** What is known of first attempts, or of retries. */
const newState = () => ({
  /** How many slots they have. */
  occupied: 0,
  /** Whether the last fetch left some. */
  hasBacklog: false,
  /** Whether some may have come since the last fetch. */
  isAnnounced: true,
  /** How many a fetch may ask for. Any failure counts: the answer may have been too much to arrive in time. */
  portion: createPortion(MAX_BATCH, () => true),
  look: createThoroughness(),
})

const isExpected = ({ hasBacklog, isAnnounced }: ReturnType<typeof newState>) => hasBacklog || isAnnounced
