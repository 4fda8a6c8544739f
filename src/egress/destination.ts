import { isIP } from 'node:net'
import { type AddressRange, isBlockedAddress } from './address.ts'

const BLOCKED_HOSTNAME = 'url hostname is blocked for SSRF protection'
const MAX_URL_LENGTH = 2048
/**
 * A host name has 254 characters at most, each written as %61 at worst; here with a port, and a user and password, which are refused
 * anyway. To read two thousand characters of other scripts as a name takes 20 ms.
 */
const MAX_HOST_LENGTH = 800

/** Names of this very machine: RFC 6761 and the usual lines of /etc/hosts. */
const LOCALHOST_NAMES = new Set([
  'localhost',
  'localhost.localdomain',
  'localhost4',
  'localhost4.localdomain4',
  'localhost6',
  'localhost6.localdomain6',
  'ip6-localhost',
  'ip6-loopback',
])

/** Names that cloud providers give to their metadata services. Blocked whatever is exempt: no receiver lives there. */
const METADATA_NAMES = new Set([
  'metadata',
  'metadata.google.internal',
  'metadata.goog',
  'metadata.azure.internal',
  'metadata.azure.com',
  'metadata.tencentyun.com',
  'metadata.packet.net',
  'metadata.platformequinix.com',
  'api.metadata.cloud.ibm.com',
  'instance-data',
  'instance-data.ec2.internal',
  'rancher-metadata',
])

/**
 * Suffixes that only mean something inside a network: reserved by RFC 6762, 7686 and 8375 and by ICANN (.internal),
 * in customary private use, or handed out by container platforms and service registries.
 */
const INTERNAL_SUFFIXES =
  /\.(internal|local|localdomain|lan|corp|home|home\.arpa|intranet|private|svc|consul|flycast|onion)$/

/**
 * Judges a receiver's URL before anything is sent: null when it is acceptable, else the text that tells its owner what
 * to change. Asks no DNS: names are judged by their spelling here, and by their addresses at every connect. `allow`
 * (the operator's exemptions) also lifts the rules for names that cannot be public, since a local receiver has such a name.
 */
export function checkUrl(url: string, allow: readonly AddressRange[]): string | null {
  // Counted in characters, not in UTF-16 units.
  if (url.length > MAX_URL_LENGTH && [...url].length > MAX_URL_LENGTH)
    return `url must be at most ${MAX_URL_LENGTH} characters`
  // On the raw text: `new URL` repairs `http:/host`, `http:\\host`, `ht\ntp://host` and leading spaces.
  if (!/^https?:\/\//i.test(url)) return 'url must start with http:// or https://'
  // Tabs and the ends of lines are left out by `new URL`, wherever they are.
  const [, written = ''] = /^https?:[/\\]+([^/?#\\]*)/i.exec(url.replaceAll(/[\t\r\n]/g, '')) ?? []
  if (written.length > MAX_HOST_LENGTH) return 'url hostname is not a valid host name'
  if (!URL.canParse(url)) return 'url is not a valid URL'
  const { username, password, hostname } = new URL(url)
  if (username !== '' || password !== '') return 'url must not include username or password credentials'
  const host = hostname.replace(/^\[|\]$/g, '').replace(/\.+$/, '')
  if (isIP(host) !== 0 ? isBlockedAddress(host, allow) : isBlockedName(host, allow)) return BLOCKED_HOSTNAME
  // After the host: a repaired URL that leads to a blocked host is reported as blocked.
  if (/[\p{Cc} \\]/u.test(url)) return 'url must not contain control characters, spaces or backslashes'
  if (!isWellFormedHost(hostname)) return 'url hostname is not a valid host name'
  return null
}

/** Whether a name means this machine; it is answered with the loopback addresses and never asked of DNS. */
export function isLocalhostName(name: string): boolean {
  return LOCALHOST_NAMES.has(name) || name.endsWith('.localhost')
}

function isBlockedName(name: string, allow: readonly AddressRange[]): boolean {
  if (METADATA_NAMES.has(name)) return true
  if (isLocalhostName(name)) return isBlockedAddress('127.0.0.1', allow) && isBlockedAddress('::1', allow)
  return allow.length === 0 && (!name.includes('.') || INTERNAL_SUFFIXES.test(name))
}

/** `new URL` has turned every name to lower case and Punycode but lets `*`, `,`, `..` and long labels through. */
function isWellFormedHost(hostname: string): boolean {
  if (hostname.startsWith('[')) return true
  return hostname.length <= 254 && /^[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?$/.test(hostname)
}
