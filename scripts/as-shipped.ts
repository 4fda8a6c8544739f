import { readFileSync } from 'node:fs'

const { scripts } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8'))
const [environment, flags, main] = /^(.*) exec node (.*) (.*)$/.exec(scripts.start)!.slice(1) as [
  string,
  string,
  string,
]

/** What `npm start` starts, and how: who measures the program measures it as it is run. */
export const SHIPPED = {
  env: Object.fromEntries(environment.split(' ').map((setting) => setting.split('=') as [string, string])),
  flags: flags.split(' '),
  main,
}
