import assert from 'node:assert/strict'
import { test } from 'node:test'
import type { Claim } from '../../src/flow/claim.ts'
import { createLanes } from '../../src/flow/lanes.ts'

const SLOTS = 200
const ENDPOINTS = 1000
const EVENTS = 4
const ANSWER_MS = 50
const RELEASE_MS = 10

const claimOf = (endpointId: string) =>
  ({
    tenantId: tenantOf(endpointId),
    endpointId,
    atOnce: null,
    isProbed: false,
    standing: 'good',
    startAt: null,
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

  function claim(): void {
    for (const endpointId of queue.splice(0, SLOTS - seen.inHand)) {
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
      const endpoint = { tenantId: tenantOf(endpointId), endpointId, standing: 'good', hasManyRetries: false } as const
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

test('of a backlog for a thousand quick endpoints of fifty tenants, most is never held', () => {
  const tenants = Array.from({ length: 50 }, (_, nth) => `tenant-${nth}`)
  const endpoints = tenants.map((one) =>
    Array.from({ length: ENDPOINTS / tenants.length }, (_, nth) => `${one} ${nth}`),
  )
  const all = endpoints.flatMap((ofOne) => Array<string[]>(EVENTS).fill(ofOne).flat())
  const holds = deliver(all)
  // A quarter. Where slots are kept for what is released to stand in the queue, what comes before it is held as well: nearly three.
  assert.ok(holds < all.length / 2, `${holds} of ${all.length} were held`)
})
