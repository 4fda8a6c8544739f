import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Claim } from '../../src/flow/claim.ts'
import { createLanes } from '../../src/flow/lanes/lanes.ts'

const SLOTS = 200
const EVENTS = 4
const ANSWER_MS = 50
const RELEASE_MS = 10
const PAUSE_MS = 5

const claimOf = (endpointId: string) =>
  ({
    tenantId: tenantOf(endpointId),
    endpointId,
    atOnce: null,
    isProbed: false,
    standing: 'good',
    startAt: null,
    status: 'pending',
    underWay: null,
  }) as Claim

const tenantOf = (endpointId: string) => endpointId.split(' ')[0]!

/** Delivers a backlog in a time of its own, with as many claims at once as there are slots. Returns how many deliveries were held. */
function deliver(backlog: string[]): number {
  const queue = [...backlog]
  let now = 0
  const lanes = createLanes({ cap: 50, slots: SLOTS, clock: () => now })
  const underWay: { claim: Claim; until: number }[] = []
  const held = new Map<string, number>()
  const seen = { inHand: 0, holds: 0, finished: 0 }

  const begin = (claim: Claim) => underWay.push({ claim, until: now + ANSWER_MS })

  function hold(endpointId: string): void {
    seen.holds++
    held.set(endpointId, (held.get(endpointId) ?? 0) + 1)
  }

  function finish(): void {
    while (underWay[0] && underWay[0].until <= now) {
      const next = lanes.next(underWay.shift()!.claim)
      if (next) begin(next)
      seen.inHand--
      seen.finished++
    }
    lanes.takeFree().forEach(begin)
    for (const { endpointId } of lanes.takeStale()) {
      hold(endpointId)
      seen.inHand--
    }
  }

  /** What the dispatcher (src/flow/dispatch.ts) does. */
  function claim(): void {
    const most = Math.min(SLOTS - seen.inHand, lanes.worthClaiming())
    if (most < SLOTS / 2 && now % PAUSE_MS !== 0) return
    for (const endpointId of queue.splice(0, most)) {
      const claim = claimOf(endpointId)
      const verdict = lanes.admit(claim)
      if (verdict === 'start') begin(claim)
      if (verdict === 'full') hold(endpointId)
      else seen.inHand++
    }
  }

  /** What the releaser (src/flow/release.ts) does, with no limits of its own. */
  function release(): void {
    lanes.noteHeld(new Set(held.keys()), { all: true })
    const comeAtOnce = queue.length === 0
    for (const [endpointId, wanted] of held) {
      const endpoint = {
        tenantId: tenantOf(endpointId),
        endpointId,
        standing: 'good',
        hasManyRetries: false,
        maxPerSecond: null,
      } as const
      const released = lanes.reserve(endpoint, { wanted, comeAtOnce })
      queue.push(...Array<string>(released).fill(endpointId))
      if (released < wanted) held.set(endpointId, wanted - released)
      else held.delete(endpointId)
    }
  }

  for (; seen.finished < backlog.length; now++) {
    assert.ok(now < 10_000, `only ${seen.finished} of ${backlog.length} are finished after ten seconds`)
    finish()
    claim()
    if (now % RELEASE_MS === 0) release()
  }
  return seen.holds
}

for (const [tenants, endpoints, part] of [
  // Where slots are kept for what is released to stand in the queue, what comes before it is held as well: more than half.
  [50, 1000, 1 / 4],
  // Where as much is claimed as there are slots, however few of them the tenant may have, half or more is held.
  [10, 2000, 1 / 4],
  [1, 2000, 1 / 3],
] as const)
  test(`of a backlog for ${endpoints} quick endpoints of ${tenants} tenants, most is never held`, () => {
    const ofEach = Array.from({ length: tenants }, (_, tenant) =>
      Array.from({ length: endpoints / tenants }, (_, nth) => `tenant-${tenant} ${nth}`),
    )
    const all = ofEach.flatMap((ofOne) => Array<string[]>(EVENTS).fill(ofOne).flat())
    const holds = deliver(all)
    assert.ok(holds < all.length * part, `${holds} of ${all.length} were held`)
  })
