/** A UUID in its canonical spelling: what our ids look like in paths, filters and bodies. */
export const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/

/** When an id of ours was made, to the millisecond: UUIDv7 carries it in its first 48 bits (RFC 9562, 5.7). */
export const madeAt = (id: string): Date => new Date(Number.parseInt(id.slice(0, 8) + id.slice(9, 13), 16))

/** The smallest id of a moment; any before 1970 counts as 1970. Ids made from then on are greater, ids made before are smaller. */
export function firstId(moment: Date): string {
  const hex = Math.max(0, moment.getTime()).toString(16).padStart(12, '0')
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-0000-0000-000000000000`
}
