/**
 * The blocked classes once more, written as numbers: an independent copy that the table in src/egress/address.ts is
 * compared with, and the many ways in which an address can be spelled in a URL.
 */
const IPV4_BLOCKS: [string, bigint, number][] = [
  ['0.0.0.0/8', 0x00000000n, 8],
  ['10.0.0.0/8', 0x0a000000n, 8],
  ['100.64.0.0/10', 0x64400000n, 10],
  ['127.0.0.0/8', 0x7f000000n, 8],
  ['168.63.129.16/32', 0xa83f8110n, 32],
  ['169.254.0.0/16', 0xa9fe0000n, 16],
  ['172.16.0.0/12', 0xac100000n, 12],
  ['192.0.0.0/24', 0xc0000000n, 24],
  ['192.0.2.0/24', 0xc0000200n, 24],
  ['192.88.99.0/24', 0xc0586300n, 24],
  ['192.168.0.0/16', 0xc0a80000n, 16],
  ['198.18.0.0/15', 0xc6120000n, 15],
  ['198.51.100.0/24', 0xc6336400n, 24],
  ['203.0.113.0/24', 0xcb007100n, 24],
  ['224.0.0.0/4', 0xe0000000n, 4],
  ['240.0.0.0/4', 0xf0000000n, 4],
]

const IPV6_BLOCKS: [string, bigint, number][] = [
  ['::/96 (unspecified, loopback, IPv4-compatible)', 0n, 96],
  ['::ffff:0:0:0/96 (IPv4-translated)', 0xffff_0000_0000_0000n, 96],
  ['64:ff9b::/96', 0x0064_ff9b_0000_0000_0000_0000_0000_0000n, 96],
  ['64:ff9b:1::/48', 0x0064_ff9b_0001_0000_0000_0000_0000_0000n, 48],
  ['100::/64', 0x0100_0000_0000_0000_0000_0000_0000_0000n, 64],
  ['100:0:0:1::/64', 0x0100_0000_0000_0001_0000_0000_0000_0000n, 64],
  ['2001::/23', 0x2001_0000_0000_0000_0000_0000_0000_0000n, 23],
  ['2001:db8::/32', 0x2001_0db8_0000_0000_0000_0000_0000_0000n, 32],
  ['2002::/16', 0x2002_0000_0000_0000_0000_0000_0000_0000n, 16],
  ['3fff::/20', 0x3fff_0000_0000_0000_0000_0000_0000_0000n, 20],
  ['4000::/2', 0x4000_0000_0000_0000_0000_0000_0000_0000n, 2],
  ['5f00::/16', 0x5f00_0000_0000_0000_0000_0000_0000_0000n, 16],
  ['8000::/1', 0x8000_0000_0000_0000_0000_0000_0000_0000n, 1],
  ['fc00::/7', 0xfc00_0000_0000_0000_0000_0000_0000_0000n, 7],
  ['fe80::/10', 0xfe80_0000_0000_0000_0000_0000_0000_0000n, 10],
  ['fec0::/10', 0xfec0_0000_0000_0000_0000_0000_0000_0000n, 10],
  ['ff00::/8', 0xff00_0000_0000_0000_0000_0000_0000_0000n, 8],
]

const withBounds = (version: 4 | 6, [text, first, prefixLength]: [string, bigint, number]) => {
  const size = 1n << BigInt((version === 4 ? 32 : 128) - prefixLength)
  return { text, version, first, last: first + size - 1n }
}

export const BLOCKED_BLOCKS = [
  ...IPV4_BLOCKS.map((block) => withBounds(4, block)),
  ...IPV6_BLOCKS.map((block) => withBounds(6, block)),
]

const isOutside = (version: 4 | 6, address: bigint) =>
  BLOCKED_BLOCKS.every((block) => block.version !== version || address < block.first || address > block.last)

export const isPublicIpv4 = (address: bigint) => address < 1n << 32n && isOutside(4, address)

export const isPublicIpv6 = (address: bigint) => address >> 125n === 1n && isOutside(6, address)

export const dotted = (address: bigint) => [24n, 16n, 8n, 0n].map((shift) => (address >> shift) & 0xffn).join('.')

const groupsOf = (address: bigint) =>
  [112n, 96n, 80n, 64n, 48n, 32n, 16n, 0n].map((shift) => ((address >> shift) & 0xffffn).toString(16))

/** Eight groups, nothing left out. */
export const grouped = (address: bigint) => groupsOf(address).join(':')

/** A small generator of choices: the same seed makes the same spelling. */
const chooser = (seed: number) => {
  let state = (seed ^ 0x9e3779b9) >>> 0
  return (count: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return Math.floor((state / 2 ** 32) * count)
  }
}
type Choose = ReturnType<typeof chooser>

const randomCase = (text: string, choose: Choose) =>
  text.replace(/[a-z]/g, (letter) => (choose(2) ? letter.toUpperCase() : letter))

/** A host that every URL parser reads as this IPv4 address: any base, any number of parts, any disguise. */
export function spellIpv4(address: bigint, seed: number): string {
  const choose = chooser(seed)
  if (choose(4) === 0) return spellInsideIpv6(address, choose)
  const parts = choose(4) + 1
  const values = [24n, 16n, 8n].slice(0, parts - 1).map((shift) => (address >> shift) & 0xffn)
  values.push(address & ((1n << BigInt(8 * (5 - parts))) - 1n))
  const written = values.map((value) => {
    const base = choose(3)
    if (base === 0) return value.toString()
    const zeros = '0'.repeat(choose(4))
    return base === 1 ? `0${zeros}${value.toString(8)}` : randomCase(`0x${zeros}${value.toString(16)}`, choose)
  })
  const dot = ['.', '。', '．', '｡', '%2e', '%2E'][choose(6)] ?? '.'
  const disguise = choose(4)
  const host = written.join('.').replace(/[0-9a-fA-F]/g, (letter) => {
    if (disguise === 1 && choose(2)) return `%${letter.charCodeAt(0).toString(16)}`
    if (disguise === 2 && choose(2)) return String.fromCharCode(letter.charCodeAt(0) + 0xfee0)
    return letter
  })
  return host.replaceAll('.', dot) + (choose(4) === 0 ? '.' : '')
}

function spellInsideIpv6(address: bigint, choose: Choose): string {
  const hex = grouped(address).split(':').slice(6).join(':')
  const tail = choose(2) ? dotted(address) : hex
  const forms = [
    `::ffff:${tail}`,
    `0:0:0:0:0:ffff:${tail}`,
    `0000::ffff:${tail}`,
    `::${tail}`,
    `::ffff:0:${tail}`,
    `64:ff9b::${tail}`,
    `64:ff9b:1::${tail}`,
    `2002:${hex}::1`,
    `2001:0:${hex}::`,
  ]
  return `[${randomCase(forms[choose(forms.length)] ?? '', choose)}]`
}

/** A bracketed host that every URL parser reads as this IPv6 address. */
export function spellIpv6(address: bigint, seed: number): string {
  const choose = chooser(seed)
  const padded = groupsOf(address).map((group) => group.padStart(group.length + choose(5 - group.length), '0'))
  let text = padded.join(':')
  if (choose(3) === 0) text = `${padded.slice(0, 6).join(':')}:${dotted(address & 0xffffffffn)}`
  else if (choose(2)) text = new URL(`http://[${grouped(address)}]/`).hostname.slice(1, -1)
  return `[${randomCase(text, choose)}]`
}
