import { outline } from '../../src/http/json-outline.ts'

/** The text of a member of a JSON object, as it is written there: the last, if there are several. It must be an object or a list. */
export function memberOf(text: string, name: string): string | undefined {
  let member: string | undefined
  outline(text, (key, value) => {
    if (JSON.parse(key) === name) member = value
  })
  return member
}
