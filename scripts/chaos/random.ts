export type Random = {
  /** From 0 to below 1. */
  next: () => number
  /** A whole number from `min` to `max`, both included. */
  integer: (min: number, max: number) => number
  pick: <T>(items: readonly T[]) => T
}

/** Numbers that are the same for the same seed (mulberry32), so that a run can be repeated. */
export function createRandom(seed: number): Random {
  let state = Math.imul(seed, 0x9e3779b1) >>> 0
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0
    let mixed = Math.imul(state ^ (state >>> 15), state | 1)
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32
  }
  const integer = (min: number, max: number) => min + Math.floor(next() * (max - min + 1))
  return { next, integer, pick: (items) => items[integer(0, items.length - 1)] as never }
}
