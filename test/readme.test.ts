import assert from 'node:assert/strict'
import { existsSync, globSync, readFileSync } from 'node:fs'
import { test } from 'node:test'

const ROOT = new URL('../', import.meta.url)
const NAMED = /(?<![\w./-])(?:src\/|sql\/|test\/|scripts\/)?(?:[\w-]+\/)+[\w-]+\.(?:ts|sql)\b/g

test('every file that the README, a source or a comment names is there', () => {
  const sources = ['README.md', ...globSync('{src,sql,scripts}/**/*.{ts,sql}', { cwd: ROOT.pathname })]
  const named = sources.flatMap((source) =>
    Array.from(readFileSync(new URL(source, ROOT), 'utf8').matchAll(NAMED), ([name]) => ({ source, name })),
  )
  assert.ok(named.length > 50)
  const isThere = (name: string) => ['', 'src/'].some((folder) => existsSync(new URL(folder + name, ROOT)))
  assert.deepEqual(
    named.filter(({ name }) => !isThere(name)),
    [],
  )
})
