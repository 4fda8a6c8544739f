import type { ResolverOptions } from 'node:dns'
import { Resolver } from 'node:dns/promises'
import { readFileSync, statSync } from 'node:fs'
import { isIP } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import { LRUCache } from 'lru-cache'
import { ConnectError, type Failure, failure, isLocal, LocalFault } from './failure.ts'

const HOSTS_FILE = '/etc/hosts'
const RESOLVER_FILE = '/etc/resolv.conf'
const FILE_CHECK_INTERVAL_MS = 1000
/** How long one address family's answer waits for the other's: a broken AAAA must not cost the whole attempt. */
const OTHER_FAMILY_GRACE_MS = 1000
/**
 * A receiver that closes its connections is asked for at each attempt, and reading and judging a thousand addresses takes 6 to 10 ms. So a
 * name with more than this is refused, and not asked for again for a while.
 */
const MAX_ADDRESSES = 32
const REFUSED_MS = 60_000
/** After how long without any answer it is asked whether there is a name server at all; at most a fifth of an attempt's time. */
const QUIET_MS = 2000
/** How long that may take; at most half of an attempt's time. */
const PROBE_MS = 3000
const TOO_MANY = { error: 'dns_error', errorMessage: `the host name has more than ${MAX_ADDRESSES} addresses` } as const

export type NameResolver = {
  /** Every A and AAAA address of a name, at least one. Rejects when there is none; with a `LocalFault` when nobody could be asked. */
  resolve(name: string): Promise<string[]>
  /** Ends what is being asked. */
  close(): void
}

/**
 * Asks DNS through c-ares sockets. `dns.lookup` would run getaddrinfo on libuv's four threads, where four hosts with a
 * slow name server stall every other host's attempts. As with getaddrinfo, /etc/hosts is honoured, and a change of name servers
 * in /etc/resolv.conf takes effect. Questions for the same name share one answer while it is under way; no address is cached
 * beyond that. `servers`: name servers to ask instead of the system's. `timeoutMs`: how long a whole attempt may take.
 */
export function createResolver({
  timeoutMs,
  servers,
  hostsFile = HOSTS_FILE,
}: {
  timeoutMs: number
  servers?: readonly string[] | undefined
  hostsFile?: string
}): NameResolver {
  const serversChanged = createChangeWatch(RESOLVER_FILE)
  let dns: Resolver | undefined
  const readHosts = createHostsReader(hostsFile)
  const pending = new Map<string, Promise<string[]>>()
  /** When a name server last said anything, by performance.now(). */
  let heardAt = -Infinity
  const heard = () => {
    heardAt = performance.now()
  }
  let probe: Promise<unknown> | undefined
  const refused = new LRUCache<string, true>({ max: 10_000, ttl: REFUSED_MS })

  function create(options: ResolverOptions): Resolver {
    const created = new Resolver(options)
    // If nothing has been set and the only server is 127.0.0.1, Node begins anew after each refusal, and ends all that is being asked.
    const found = servers ?? created.getServers()
    if (servers || found.join() === '127.0.0.1') created.setServers(found)
    return created
  }

  function current(): Resolver {
    const isChanged = servers === undefined && serversChanged()
    if (dns !== undefined && !isChanged) return dns
    // A silent server is given up on after 14 seconds. After quick answers c-ares begins with a fraction of `timeout`, and takes
    // no answer to an earlier try: then it is after some 6 to 9. What was asked of the old resolver is still answered.
    dns = create({ timeout: 2000, maxTimeout: 3000, tries: 5 })
    return dns
  }

  async function ask(name: string): Promise<string[]> {
    if (refused.has(name)) throw new ConnectError(TOO_MANY)
    const addresses = await unlessSilent(bothFamilies(current(), name, heard))
    if (addresses.length <= MAX_ADDRESSES) return addresses
    refused.set(name, true)
    throw new ConnectError(TOO_MANY)
  }

  /** The answer, or a `LocalFault` if no name server says anything for long, whoever asks: receivers would be blamed for it. */
  async function unlessSilent(answer: Promise<string[]>): Promise<string[]> {
    const over = new AbortController()
    return await Promise.race([answer, failWhenSilent(over.signal)]).finally(() => over.abort())
  }

  async function failWhenSilent(signal: AbortSignal): Promise<never> {
    const quietMs = Math.min(QUIET_MS, timeoutMs / 5)
    const isQuiet = () => heardAt < performance.now() - quietMs
    do {
      await sleep(quietMs, undefined, { signal })
      if (isQuiet()) {
        probe ??= isAnyoneThere()
          .then((there) => there && heard())
          .finally(() => {
            probe = undefined
          })
        await probe
      }
    } while (!isQuiet())
    throw new LocalFault('no name server answers')
  }

  /** Asked apart from the names: after quick answers c-ares has less patience with slow ones. */
  async function isAnyoneThere(): Promise<boolean> {
    const patience = Math.ceil(Math.min(PROBE_MS, timeoutMs / 2))
    const asking = create({ timeout: Math.ceil(patience / 3), tries: 3 })
    const late = sleep(patience, false, { ref: false })
    return await Promise.race([isThere(asking), late]).finally(() => asking.cancel())
  }

  function resolve(name: string): Promise<string[]> {
    const listed = readHosts().get(name)
    if (listed) return Promise.resolve(listed)
    const answer = pending.get(name) ?? ask(name).finally(() => pending.delete(name))
    pending.set(name, answer)
    return answer
  }
  return { resolve, close: () => dns?.cancel() }
}

/** `heard` is called when a name server has said anything. */
async function bothFamilies(dns: Resolver, name: string, heard: () => void): Promise<string[]> {
  const addresses: string[] = []
  const codes = new Set<string | undefined>()
  // The alias of a name that has no address is no error, but empty.
  const found = (some: string[]) => {
    heard()
    if (some.length > 0) addresses.push(...some)
    else codes.add('ENODATA')
  }
  const failed = ({ code }: NodeJS.ErrnoException) => {
    if (isAnswer(code)) heard()
    codes.add(code)
  }
  const answers = [dns.resolve4(name), dns.resolve6(name)].map((answer) => answer.then(found, failed))
  const both = Promise.all(answers)
  await Promise.race(answers)
  if (addresses.length === 0) await both
  const grace = new AbortController()
  await Promise.race([both, sleep(OTHER_FAMILY_GRACE_MS, undefined, { signal: grace.signal })])
  grace.abort()
  if (addresses.length > 0) return addresses
  // c-ares also says this when it cannot open a socket, and when an answer is too long for UDP and cannot be had by TCP. A
  // server that refuses to resolve a name is EREFUSED.
  if (codes.has('ECONNREFUSED') && !(await isThere(dns))) throw new LocalFault('no name server can be reached')
  throw new ConnectError(noAddress(codes))
}

/** A name that is mistyped or has expired is its owner's to mend; what its name servers fail to answer may pass. */
function noAddress(codes: Set<string | undefined>): Failure {
  const isAnswered = [...codes].every((code) => code === 'ENOTFOUND' || code === 'ENODATA')
  if (!isAnswered) return failure('dns_error')
  const errorMessage = codes.has('ENODATA') ? 'the host name has no address' : 'the host name does not exist'
  return { error: 'dns_error', errorMessage }
}

/** Whether a name server answers anything at all: asked for the root's own address, which it does not have, in a few bytes. */
const isThere = (dns: Resolver): Promise<boolean> =>
  dns.resolve4('.').then(
    () => true,
    ({ code }: NodeJS.ErrnoException) => isAnswer(code),
  )

const UNANSWERED = ['ECONNREFUSED', 'ETIMEOUT', 'ECANCELLED', 'EBADNAME']
/** Whether a question that failed was answered by somebody. */
const isAnswer = (code = '') => !UNANSWERED.includes(code)

/**
 * Reads the file again when it has changed. A file that may not be read counts as empty. Throws if this process lacks files or
 * memory for it.
 */
function createHostsReader(path: string): () => Map<string, string[]> {
  const isChanged = createChangeWatch(path)
  let isStale = false
  let hosts = new Map<string, string[]>()
  return () => {
    isStale ||= isChanged()
    if (!isStale) return hosts
    try {
      hosts = parseHosts(readFileSync(path, 'utf8'))
    } catch (error) {
      if (isLocal(error)) throw error
      hosts = new Map()
    }
    isStale = false
    return hosts
  }
}

/** The returned function tells whether a file was modified since its last call, looking at most once a second; at first, yes. */
function createChangeWatch(path: string): () => boolean {
  let modifiedAt: number | undefined
  let checkedAt = 0
  return () => {
    const now = Date.now()
    // The clock may have been set back.
    if (Math.abs(now - checkedAt) < FILE_CHECK_INTERVAL_MS) return false
    checkedAt = now
    const before = modifiedAt
    modifiedAt = statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? 0
    return modifiedAt !== before
  }
}

function parseHosts(text: string): Map<string, string[]> {
  const hosts = new Map<string, string[]>()
  for (const line of text.split('\n')) {
    const [address = '', ...names] = line.replace(/#.*/, '').trim().split(/\s+/)
    if (isIP(address) === 0) continue
    for (const name of names) hosts.set(name.toLowerCase(), [...(hosts.get(name.toLowerCase()) ?? []), address])
  }
  return hosts
}
