import assert from 'node:assert/strict'
import { execFile, spawnSync } from 'node:child_process'
import { before, describe, it, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const SCRIPT = fileURLToPath(new URL('../support/egress-namespace.ts', import.meta.url))

interface Report {
  caseOutcomes: Record<string, { error: string | null; statusCode: number | null }[]>
  rebinding: Record<string, number>
  publicConnections: number
  blockedConnections: number
}

/** The way into a network namespace of our own that this machine permits, if any. */
const unshare = [['-n'], ['-r', '-n']].find(
  (flags) => spawnSync('unshare', [...flags, 'ip', 'link', 'set', 'lo', 'up']).status === 0,
)
const skip = unshare ? false : 'needs Linux, iproute2 and the permission to make a network namespace (unshare -rn)'

describe('on a network where every blocked address answers', { skip }, () => {
  let report: Report
  before(async () => {
    const run = promisify(execFile)
    const { stdout } = await run('unshare', [...(unshare ?? []), process.execPath, SCRIPT], { timeout: 180_000 })
    report = JSON.parse(stdout)
  })

  it('no delivery-time case of the case file gets a connection to a blocked address', () => {
    const outcomes = Object.entries(report.caseOutcomes)
    assert.ok(outcomes.length >= 20)
    for (const [id, attempts] of outcomes) assert.notEqual(attempts.at(-1)?.error, null, id)
    const last = (id: string) => report.caseOutcomes[id]?.at(-1)
    assert.deepEqual(last('S338'), { error: 'blocked_destination', statusCode: null })
    assert.deepEqual(last('S357'), { error: 'dns_error', statusCode: null })
    assert.deepEqual(last('S348'), { error: 'redirect', statusCode: 302 })
    assert.deepEqual(last('S355'), { error: 'redirect', statusCode: 300 })
  })

  it('a name that was public at the first attempt and blocked at the next is judged at each', () => {
    const errors = (id: string) => report.caseOutcomes[id]?.map(({ error }) => error)
    assert.deepEqual(errors('S345'), [null, null, 'blocked_destination'])
    assert.deepEqual(errors('S347'), [null, 'blocked_destination'])
  })

  it('a thousand rebinding attempts reach public addresses only', (t) => {
    const { blocked_destination: blocked = 0, delivered = 0, dns_error: unresolved = 0 } = report.rebinding
    t.diagnostic(JSON.stringify(report.rebinding))
    assert.equal(blocked + delivered + unresolved, 1000)
    assert.ok(blocked > 100 && delivered > 100)
    assert.ok(report.publicConnections >= delivered)
    assert.equal(report.blockedConnections, 0)
  })
})

test('whichever way the system says that an address cannot be reached, the attempt says so', { skip }, async () => {
  const kinds = ['unreachable', 'blackhole', 'prohibit', 'throw']
  const sending = `
    import { createSender } from '${new URL('../../src/egress/send.ts', import.meta.url)}'
    const { send } = createSender({ allow: [], timeoutMs: 5000 })
    const post = (_, n) => send({ url: 'http://8.8.' + n + '.1/', headers: {}, body: '{}' })
    console.log(JSON.stringify((await Promise.all(Array.from({ length: ${kinds.length} }, post))).map(({ error }) => error)))
    process.exit()`
  const routes = kinds.map((kind, n) => `ip route add ${kind} 8.8.${n}.0/24 && `).join('')
  const run = [
    'sh',
    '-c',
    `ip link set lo up && ${routes} exec "$@"`,
    'sh',
    process.execPath,
    '--input-type=module',
    '-e',
    sending,
  ]
  const { stdout } = await promisify(execFile)('unshare', [...(unshare ?? []), ...run])
  assert.deepEqual(
    JSON.parse(stdout),
    kinds.map(() => 'network_unreachable'),
  )
})
