/** Each owner's first item, in order, then each owner's second, and so on. */
export function inTurn<Item>(items: Item[], ownerOf: (item: Item) => string | number): Item[] {
  const seen = new Map<string | number, number>()
  const line = items.map((item) => {
    const owner = ownerOf(item)
    const turn = seen.get(owner) ?? 0
    seen.set(owner, turn + 1)
    return { item, turn }
  })
  return line.sort((one, other) => one.turn - other.turn).map(({ item }) => item)
}
