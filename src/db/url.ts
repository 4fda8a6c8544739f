import { readFileSync } from 'node:fs'
import { userInfo } from 'node:os'
import { type ConnectionOptions, createSecureContext } from 'node:tls'
import { parse } from 'pg-connection-string'

/** Those modes of libpq that say for certain whether and how the connection is encrypted. */
const SSL_MODES = ['disable', 'require', 'verify-ca', 'verify-full']
/** What libpq takes from the environment where the URL does not say it, besides what the driver takes from there itself. */
const SSL_VARIABLES = { sslmode: 'PGSSLMODE', sslrootcert: 'PGSSLROOTCERT', sslcert: 'PGSSLCERT', sslkey: 'PGSSLKEY' }

/** A DATABASE_URL whose parameters can be read and set: in its query Node takes a plus for a blank, unlike libpq. */
export const parseUrl = (text: string) => new URL(text.replace(/\?.*/, (query) => query.replaceAll('+', '%2B')))

/**
 * What a DATABASE_URL says, as libpq reads it, for a driver that would read it otherwise: the host, which may be the directory of a
 * Unix socket, and how the connection is encrypted (`sslmode`, `sslrootcert`, `sslcert`, `sslkey`; the files are read here, and
 * anew by each connection). Of its other parameters only `dbname` and `options` are used. Throws an Error with a sentence that
 * carries no secret.
 */
export function readDatabaseUrl(text: string, env: Record<string, string | undefined> = process.env) {
  const url = parseUrl(text)
  const asked = url.searchParams
  for (const [name, variable] of Object.entries(SSL_VARIABLES))
    if (env[variable] && !asked.has(name) && !asked.has('ssl')) asked.set(name, env[variable])
  // The authorities that Node knows.
  if (asked.get('sslrootcert') === 'system') {
    asked.delete('sslrootcert')
    if (asked.get('sslmode') !== 'disable') asked.set('sslmode', 'verify-full')
  }
  // It would be ignored, and the connection not encrypted.
  const misspelt = [...asked.keys()].find((name) => name !== name.toLowerCase() && name.toLowerCase() in SSL_VARIABLES)
  if (misspelt) throw new Error(`${misspelt} must be written ${misspelt.toLowerCase()}`)
  const mode = asked.get('sslmode')
  if (mode !== null && !SSL_MODES.includes(mode))
    throw new Error(`sslmode (or PGSSLMODE) must be one of ${SSL_MODES.join(', ')}`)
  if (mode === 'verify-ca' && !asked.has('sslrootcert')) throw new Error('sslmode=verify-ca needs sslrootcert')
  if (asked.get('ssl') === 'false') asked.set('ssl', '0')
  asked.delete('uselibpqcompat')
  const { host, port, user, password, ssl, options } = parse(url.href, { useLibpqCompat: true })
  if (typeof ssl === 'string') throw new Error('ssl must be true or false: for more, use sslmode')
  if (typeof ssl === 'object') {
    requireReadable(ssl)
    readAnew(ssl, { ca: asked.get('sslrootcert'), cert: asked.get('sslcert'), key: asked.get('sslkey') })
  }
  const where = host || env.PGHOST || 'localhost'
  if (where.includes(',')) throw new Error('it (or PGHOST) must name one host, not several')
  const database = asked.get('dbname') || decodeURIComponent(url.pathname.slice(1))
  return {
    host: where,
    port: Number(port || env.PGPORT || 5432),
    ...(database && { database }),
    user: user || env.PGUSER || systemUser(),
    ...(password && { password }),
    // Nobody reads along on a Unix socket, and servers do not encrypt there.
    ssl: (!where.startsWith('/') && (ssl ?? false)) as ConnectionOptions | boolean,
    options: options || env.PGOPTIONS || '',
  }
}

/** The driver looks for the user's name in the environment, where a container has none. */
function systemUser(): string {
  try {
    return userInfo().username
  } catch {
    throw new Error('a user must be named: the system has no name for the one it runs this program as')
  }
}

function requireReadable(ssl: object): void {
  try {
    createSecureContext(ssl)
  } catch (error) {
    throw new Error(`sslrootcert, sslcert or sslkey cannot be read: ${(error as Error).message}`)
  }
}

/** Certificates are replaced before they expire: each connection has these files as they are then, or as they were last if they are gone. */
function readAnew(ssl: object, files: Record<string, string | null>): void {
  for (const [name, file] of Object.entries(files)) {
    if (!file) continue
    let text: unknown = Reflect.get(ssl, name)
    const get = () => {
      try {
        text = readFileSync(file, 'utf8')
      } catch {}
      return text
    }
    Object.defineProperty(ssl, name, { get })
  }
}
