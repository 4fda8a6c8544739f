import assert from 'node:assert/strict'
import { test } from 'node:test'
import fc from 'fast-check'
import { isBlockedAddress, parseRange } from '../../src/egress/address.ts'
import { checkUrl } from '../../src/egress/destination.ts'
import {
  BLOCKED_BLOCKS,
  dotted,
  grouped,
  isPublicIpv4,
  isPublicIpv6,
  spellIpv4,
  spellIpv6,
} from '../support/addresses.ts'

const ranges = (...texts: string[]) => texts.map((text) => parseRange(text)!)

test('every block is refused from its first address to its last, and its public neighbours are not', () => {
  for (const { text, first, last, version } of BLOCKED_BLOCKS) {
    const write = version === 4 ? dotted : grouped
    assert.equal(isBlockedAddress(write(first), []), true, `first of ${text}`)
    assert.equal(isBlockedAddress(write(last), []), true, `last of ${text}`)
    const isPublic = version === 4 ? isPublicIpv4 : isPublicIpv6
    for (const neighbour of [first - 1n, last + 1n]) {
      if (neighbour >= 0n && isPublic(neighbour)) {
        assert.equal(isBlockedAddress(write(neighbour), []), false, `${write(neighbour)} beside ${text}`)
      }
    }
  }
})

test('addresses inside addresses are refused', () => {
  for (const address of [
    '::ffff:127.0.0.1',
    '::ffff:7f00:1',
    '0:0:0:0:0:ffff:10.0.0.1',
    '::127.0.0.1',
    '::8.8.8.8',
    '::ffff:0:127.0.0.1',
    '64:ff9b::8.8.8.8',
    '64:ff9b:1::7f00:1',
    '2002:7f00:1::',
    '2001:0:4136:e378:8000:63bf:80ff:fffe',
  ]) {
    assert.equal(isBlockedAddress(address, []), true, address)
  }
})

test('an IPv4-mapped address is judged as the IPv4 address in it', () => {
  assert.equal(isBlockedAddress('::ffff:8.8.8.8', []), false)
  assert.equal(isBlockedAddress('::ffff:808:808', []), false)
})

test('a zone id does not hide an address', () => {
  assert.equal(isBlockedAddress('fe80::1%eth0', []), true)
  assert.equal(isBlockedAddress('::1%lo', []), true)
  assert.equal(isBlockedAddress('::ffff:127.0.0.1%1', []), true)
  assert.equal(isBlockedAddress('2606:4700:4700::1111%eth0', []), false)
})

test('what is not an address is refused', () => {
  for (const text of [
    '',
    'localhost',
    'example.com',
    '256.1.1.1',
    '1.2.3.4.5',
    '::1::',
    '%',
    '%eth0',
    '[::1]',
    ' 8.8.8.8',
  ]) {
    assert.equal(isBlockedAddress(text, []), true, JSON.stringify(text))
  }
})

test('an allowed range exempts its addresses, also as IPv4-mapped IPv6, and nothing beside it', () => {
  const allow = ranges('127.0.0.0/8', 'fd00::/64')
  for (const address of ['127.0.0.1', '127.255.255.255', '::ffff:127.0.0.1', 'fd00::1', 'fd00::1%eth0']) {
    assert.equal(isBlockedAddress(address, allow), false, address)
  }
  for (const address of ['126.255.255.255', '8.8.8.8']) assert.equal(isBlockedAddress(address, allow), false, address)
  for (const address of ['10.0.0.1', '::1', 'fd00:0:0:1::1', '::127.0.0.1', '0.0.0.0']) {
    assert.equal(isBlockedAddress(address, allow), true, address)
  }
})

test('an allowed range written as IPv4-mapped IPv6 stands for the IPv4 range', () => {
  const allow = ranges('::ffff:10.0.0.0/104')
  assert.equal(isBlockedAddress('10.1.2.3', allow), false)
  assert.equal(isBlockedAddress('11.0.0.0', allow), false)
  assert.equal(isBlockedAddress('192.168.0.1', allow), true)
  // The deprecated IPv4-compatible form is another address altogether.
  assert.equal(isBlockedAddress('10.1.2.3', ranges('::10.0.0.0/104')), true)
})

test('an allowed range may have any prefix length', () => {
  assert.equal(isBlockedAddress('192.168.5.127', ranges('192.168.5.0/25')), false)
  assert.equal(isBlockedAddress('192.168.5.128', ranges('192.168.5.0/25')), true)
  assert.equal(isBlockedAddress('10.9.8.7', ranges('10.9.8.7/32')), false)
  assert.equal(isBlockedAddress('10.9.8.6', ranges('10.9.8.7/32')), true)
  assert.equal(isBlockedAddress('10.9.8.7', ranges('0.0.0.0/0')), false)
  assert.equal(isBlockedAddress('::1', ranges('::1/128')), false)
  assert.equal(isBlockedAddress('::2', ranges('::1/128')), true)
})

test('a range is read from a CIDR only', () => {
  for (const text of ['10.0.0.0/8', '127.0.0.1/32', '0.0.0.0/0', '::1/128', 'fd00::/8', '::ffff:10.0.0.0/104']) {
    assert.equal(parseRange(text)?.text, text)
  }
  for (const text of [
    '',
    '10.0.0.0',
    '::1',
    '10.0.0.0/33',
    '10.0.0.0/-1',
    '10.0.0.0/',
    '10.0.0.0/8/8',
    '10.0.0.0/a',
    '10/8',
    '0x0a.0.0.0/8',
    '::/129',
    'fe80::1%eth0/64',
    '::ffff:0:0/95',
    '010.0.0.0/8',
    'localhost/8',
    ' 10.0.0.0/8',
  ]) {
    assert.equal(parseRange(text), null, JSON.stringify(text))
  }
})

test('a hundred thousand spellings of blocked addresses are never accepted', () => {
  const blocked = fc
    .constantFrom(...BLOCKED_BLOCKS)
    .chain(({ first, last, version }) => fc.tuple(fc.bigInt({ min: first, max: last }), fc.constant(version)))
  fc.assert(
    fc.property(blocked, fc.nat(), ([address, version], seed) => {
      const host = version === 4 ? spellIpv4(address, seed) : spellIpv6(address, seed)
      assert.equal(checkUrl(`http://${host}/`, []), 'url hostname is blocked for SSRF protection', host)
    }),
    { numRuns: 100_000 },
  )
})

test('random public addresses are all accepted', () => {
  fc.assert(
    fc.property(fc.bigInt({ min: 0n, max: 2n ** 32n - 1n }).filter(isPublicIpv4), (address) => {
      return checkUrl(`http://${dotted(address)}/`, []) === null
    }),
    { numRuns: 20_000 },
  )
  fc.assert(
    fc.property(fc.bigInt({ min: 2n ** 125n, max: 2n ** 126n - 1n }).filter(isPublicIpv6), (address) => {
      return checkUrl(`http://[${grouped(address)}]/`, []) === null
    }),
    { numRuns: 20_000 },
  )
})
