import { readFile } from 'node:fs/promises'

/** The version in package.json, which stands one folder above both src and dist. */
export async function readVersion(): Promise<string> {
  return JSON.parse(await readFile(new URL('../package.json', import.meta.url), 'utf8')).version
}
