/**
 * Writes moments, in milliseconds since 1970, as `Date.toISOString` does and throwing as it does. That takes a microsecond, and
 * those who come one after another are often of the same millisecond.
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
