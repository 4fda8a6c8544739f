import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import { parseRange } from '../../src/egress/address.ts'
import { checkUrl } from '../../src/egress/destination.ts'

interface Case {
  id: string
  url: string
  expect: 'reject_at_create' | 'reject_at_delivery' | 'allow'
  reason: string
  details?: string
  details_any?: string[]
}

const cases: Case[] = JSON.parse(readFileSync(new URL('../vectors/ssrf_cases.json', import.meta.url), 'utf8'))
const BLOCKED = 'url hostname is blocked for SSRF protection'
const allowing = (...texts: string[]) => texts.map((text) => parseRange(text)!)

test('every hostile URL of the case file is refused, with the expected words', () => {
  const hostile = cases.filter((one) => one.expect === 'reject_at_create')
  assert.ok(hostile.length > 150)
  for (const { id, url, reason, details, details_any: oneOf } of hostile) {
    const problem = checkUrl(url, [])
    assert.notEqual(problem, null, `${id} ${url}: ${reason}`)
    if (details) assert.equal(problem, details, `${id} ${url}`)
    if (oneOf) assert.ok(oneOf.includes(problem ?? ''), `${id} ${url}: ${problem}`)
  }
})

test('every harmless URL of the case file is accepted, and names that only DNS can judge too', () => {
  const others = cases.filter((one) => one.expect !== 'reject_at_create')
  assert.ok(others.length > 50)
  for (const { id, url } of others) assert.equal(checkUrl(url, []), null, `${id} ${url}`)
})

test('no exemption lifts a rule that is not about addresses', () => {
  const allow = allowing('0.0.0.0/0', '::/0')
  for (const { id, url, details } of cases) {
    if (details && details !== BLOCKED) assert.equal(checkUrl(url, allow), details, `${id} ${url}`)
  }
})

test('metadata names stay blocked whatever is exempt', () => {
  const allow = allowing('0.0.0.0/0', '::/0')
  for (const name of [
    'metadata',
    'metadata.google.internal',
    'instance-data',
    'METADATA.goog.',
    'rancher-metadata..',
    'metadata.azure.internal',
    'metadata.azure.com',
    'metadata.packet.net',
    'metadata.platformequinix.com',
    'instance-data.ec2.internal',
  ]) {
    assert.equal(checkUrl(`http://${name}/`, allow), BLOCKED, name)
  }
})

test('localhost is accepted when a loopback address is exempt', () => {
  for (const name of [
    'localhost',
    'localhost.',
    'app.localhost',
    'ip6-localhost',
    'ip6-loopback',
    'localhost.localdomain',
    'localhost4',
    'localhost4.localdomain4',
    'localhost6',
    'localhost6.localdomain6',
  ]) {
    assert.equal(checkUrl(`http://${name}:3000/hook`, []), BLOCKED, name)
    assert.equal(checkUrl(`http://${name}:3000/hook`, allowing('10.0.0.0/8')), BLOCKED, name)
    assert.equal(checkUrl(`http://${name}:3000/hook`, allowing('127.0.0.0/8')), null, name)
    assert.equal(checkUrl(`http://${name}:3000/hook`, allowing('::1/128')), null, name)
  }
})

test('internal names are accepted when anything is exempt: their addresses decide at the connect', () => {
  for (const name of [
    'receiver',
    'receiver.internal',
    'hooks.default.svc',
    'a.cluster.local',
    'host.docker.internal',
    ...['localdomain', 'corp', 'home', 'home.arpa', 'intranet', 'private', 'flycast', 'onion'].map(
      (last) => `a.${last}`,
    ),
  ]) {
    assert.equal(checkUrl(`http://${name}/`, []), BLOCKED, name)
    assert.equal(checkUrl(`http://${name}/`, allowing('172.16.0.0/12')), null, name)
  }
})

test('an exempt address is accepted and others stay blocked', () => {
  const allow = allowing('127.0.0.0/8')
  assert.equal(checkUrl('http://127.0.0.1:9000/', allow), null)
  assert.equal(checkUrl('http://[::ffff:127.0.0.1]/', allow), null)
  assert.equal(checkUrl('http://2130706433/', allow), null)
  assert.equal(checkUrl('http://10.0.0.1/', allow), BLOCKED)
  assert.equal(checkUrl('http://[::1]/', allow), BLOCKED)
})

test('names that merely contain a blocked one are accepted', () => {
  for (const host of [
    'localhost.example.com',
    '127.0.0.1.example.com',
    'notlocalhost.com',
    'localhost-1.com',
    'metadata.google.internal.example.com',
    'internal.example.com',
  ]) {
    assert.equal(checkUrl(`https://${host}/`, []), null, host)
  }
})

test('a URL may have 2048 characters', () => {
  const base = 'https://example.com/'
  assert.equal(checkUrl(base.padEnd(2048, 'a'), []), null)
  assert.equal(checkUrl(base.padEnd(2049, 'a'), []), 'url must be at most 2048 characters')
  const emoji = (count: number) => base + '😀'.repeat(count - base.length)
  assert.equal(checkUrl(emoji(2048), []), null)
  assert.equal(checkUrl(emoji(2049), []), 'url must be at most 2048 characters')
})

test('a URL that a parser would repair is refused with what to change', () => {
  for (const url of [
    'https://example.com/a b',
    'https://example.com/\n',
    'https://exam\tple.com/',
    'https://example.com\\a',
  ]) {
    assert.equal(checkUrl(url, []), 'url must not contain control characters, spaces or backslashes', url)
  }
  assert.equal(checkUrl('https://exa mple.com/', []), 'url is not a valid URL')
  assert.equal(checkUrl('https://example..com/', []), 'url hostname is not a valid host name')
})

test('the scheme may be in any case', () => {
  assert.equal(checkUrl('HTTPS://example.com/', []), null)
})
