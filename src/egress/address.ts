import { isIP, isIPv6 } from 'node:net'
import ipaddr, { type IPv4, type IPv6 } from 'ipaddr.js'

/** A block of addresses; an IPv4-mapped IPv6 block is kept as the IPv4 block it stands for. */
export type AddressRange = {
  /** The CIDR as it was written. */
  readonly text: string
  readonly base: IPv4 | IPv6
  readonly prefixLength: number
}

/**
 * IPv4 addresses that are never a public receiver. Sources: the IANA IPv4 Special-Purpose Address Registry and the
 * documents named. Cloud metadata services live in several of them (169.254.169.254, 100.100.100.200, 192.0.0.192).
 */
const BLOCKED_IPV4 = ranges([
  '0.0.0.0/8', // "this network", RFC 791; Linux connects 0.0.0.0 to loopback
  '10.0.0.0/8', // private use, RFC 1918
  '100.64.0.0/10', // shared address space (carrier-grade NAT), RFC 6598; Alibaba Cloud metadata
  '127.0.0.0/8', // loopback, RFC 1122
  '168.63.129.16/32', // Azure WireServer: looks public, answers inside Azure only (Microsoft's documentation)
  '169.254.0.0/16', // link-local, RFC 3927; metadata of AWS, Google, Azure, Tencent, Scaleway
  '172.16.0.0/12', // private use, RFC 1918
  '192.0.0.0/24', // protocol assignments, RFC 6890; Oracle Cloud metadata, NAT64 discovery
  '192.0.2.0/24', // documentation TEST-NET-1, RFC 5737
  '192.88.99.0/24', // 6to4 relay anycast, deprecated by RFC 7526
  '192.168.0.0/16', // private use, RFC 1918
  '198.18.0.0/15', // benchmarking, RFC 2544
  '198.51.100.0/24', // documentation TEST-NET-2, RFC 5737
  '203.0.113.0/24', // documentation TEST-NET-3, RFC 5737
  '224.0.0.0/4', // multicast, RFC 5771
  '240.0.0.0/4', // reserved, RFC 1112, with the limited broadcast address, RFC 919
])

/**
 * IPv6 is denied by default: IANA allocates global unicast addresses from 2000::/3 alone. That one line refuses
 * ::/128 and ::1/128 (unspecified, loopback), ::/96 (IPv4-compatible, RFC 4291), ::ffff:0:0:0/96 (IPv4-translated,
 * RFC 2765), 64:ff9b::/96 and 64:ff9b:1::/48 (NAT64, RFC 6052 and 8215), 100::/64 (discard, RFC 6666), 5f00::/16
 * (SRv6, RFC 9602), fc00::/7 (unique local, RFC 4193), fe80::/10 and fec0::/10 (link-local, site-local) and ff00::/8
 * (multicast). IPv4-mapped addresses (::ffff:0:0/96) are unwrapped and judged by the IPv4 table.
 */
const GLOBAL_IPV6 = ranges(['2000::/3'])

/** What is special inside 2000::/3: the IANA IPv6 Special-Purpose Address Registry. */
const BLOCKED_IPV6 = ranges([
  '2001::/23', // protocol assignments, RFC 2928: Teredo, benchmarking, ORCHID and ORCHIDv2, DRIP
  '2001:db8::/32', // documentation, RFC 3849
  '2002::/16', // 6to4, RFC 3056: carries any IPv4 address, a private one too
  '3fff::/20', // documentation, RFC 9637
])

/** Reads a CIDR such as 10.0.0.0/8 or ::1/128; null for anything else, a bare address included. */
export function parseRange(text: string): AddressRange | null {
  const [, address = '', length = ''] = /^([^/%]+)\/(\d{1,3})$/.exec(text) ?? []
  const version = isIP(address)
  const base = version === 0 ? null : readAddress(address)
  if (base === null || Number(length) > (version === 6 ? 128 : 32)) return null
  const prefixLength = version === 6 && base.kind() === 'ipv4' ? Number(length) - 96 : Number(length)
  return prefixLength < 0 ? null : { text, base, prefixLength }
}

/**
 * Whether a request may not go to this address. Takes every textual form, with or without a zone id (`fe80::1%eth0`);
 * what cannot be read is blocked. An address inside one of the `allow` ranges is exempt.
 */
export function isBlockedAddress(text: string, allow: readonly AddressRange[]): boolean {
  const address = readAddress(text)
  if (address === null) return true
  if (isInside(address, allow)) return false
  if (address.kind() === 'ipv4') return isInside(address, BLOCKED_IPV4)
  return !isInside(address, GLOBAL_IPV6) || isInside(address, BLOCKED_IPV6)
}

function readAddress(text: string): IPv4 | IPv6 | null {
  const zone = text.indexOf('%')
  const address = zone === -1 ? text : text.slice(0, zone)
  if (isIPv6(address)) {
    // By way of a URL, which writes hexadecimal groups only: ipaddr.js takes ::1.2.3.4 for ::ffff:1.2.3.4.
    return ipaddr.process(new URL(`http://[${address}]`).hostname.slice(1, -1))
  }
  return ipaddr.IPv4.isValid(address) ? ipaddr.IPv4.parse(address) : null
}

function isInside(address: IPv4 | IPv6, candidates: readonly AddressRange[]): boolean {
  return candidates.some(
    ({ base, prefixLength }) => base.kind() === address.kind() && address.match(base, prefixLength),
  )
}

function ranges(texts: string[]): AddressRange[] {
  return texts.map((text) => {
    const range = parseRange(text)
    if (range === null) throw new Error(`${text} is not a CIDR`)
    return range
  })
}
