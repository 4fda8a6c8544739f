import { execFileSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import { readFileSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { type AppDeps, createApp } from '../src/http/app.ts'
import { createLog } from '../src/log.ts'

// Writes the committed copies of the API's description: `node scripts/openapi.ts`. They are test/http/openapi.json, and
// the types of the tests' client, which carry the document's hash so that a test can tell whether they are of today.

const DOCUMENT = fileURLToPath(new URL('../test/http/openapi.json', import.meta.url))
const TYPES = fileURLToPath(new URL('../test/support/api-types.ts', import.meta.url))

// Describing routes asks nothing of what serves them.
const deps: Partial<AppDeps> = {
  mode: 'all',
  log: createLog('silent'),
  allow: [],
  baseUrl: () => 'http://localhost:8080',
  headerPrefix: 'service',
}
const app = createApp({ ...deps, rateLimits: {} } as AppDeps)
const served = await app.request('/openapi.json')
const document = `${JSON.stringify(await served.json(), null, 2)}\n`
writeFileSync(DOCUMENT, document)

// Fetched when it is needed: it works with the TypeScript before ours only, and would bring that along.
const generator = ['-y', '-p', 'openapi-typescript@7.13.0', '-p', 'typescript@5.9.3', 'openapi-typescript']
execFileSync('npx', [...generator, DOCUMENT, '-o', TYPES], { stdio: 'inherit' })
const hash = createHash('sha256').update(document).digest('hex')
writeFileSync(TYPES, `// openapi.json ${hash}\n${readFileSync(TYPES, 'utf8')}`)
