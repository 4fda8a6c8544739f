/**
 * Writes moments, in milliseconds since 1970, as `Date.toISOString` does, and throws when it would. It remembers the last
 * one: writing takes a microsecond, and many in a row are of the same millisecond.
 */
export function createIsoTime(): (ms: number) => string {
  let last = Number.NaN
  let text = ''
  return (ms) => {
    if (ms !== last) {
      text = new Date(ms).toISOString()
      last = ms
    }
    return text
  }
}
