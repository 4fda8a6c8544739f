import { readFileSync } from 'node:fs'

/** As in package.json, which stands one folder above both src and dist. */
export const VERSION: string = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')).version
