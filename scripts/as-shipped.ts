import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

export const THIS_CHECKOUT = fileURLToPath(new URL('../', import.meta.url))

/** What `npm start` starts in a checkout of the program, and how: who measures the program measures it as it is run. */
export function asShipped(checkout: string) {
  const { scripts } = JSON.parse(readFileSync(join(checkout, 'package.json'), 'utf8'))
  const [environment, flags, main] = /^(.*) exec node (.*) (.*)$/.exec(scripts.start)!.slice(1) as [
    string,
    string,
    string,
  ]
  return {
    env: Object.fromEntries(environment.split(' ').map((setting) => setting.split('=') as [string, string])),
    flags: flags.split(' '),
    main,
  }
}
