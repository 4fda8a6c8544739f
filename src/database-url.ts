import { parse } from 'pg-connection-string'

/** Those of libpq that say for certain whether and how the connection is encrypted. */
const SSL_MODES = ['disable', 'require', 'verify-ca', 'verify-full']

/**
 * What a DATABASE_URL says, as libpq reads it, for drivers that would read it differently: the host, which may be the directory of a
 * Unix socket, and how the connection is encrypted (`sslmode`, `sslrootcert`, `sslcert`, `sslkey`; the files are read here). Of its
 * other parameters only `options` is used. Throws an Error with a sentence that carries no secret.
 */
export function readDatabaseUrl(url: string) {
  const given = new URL(url).searchParams
  const mode = given.get('sslmode')
  if (mode !== null && !SSL_MODES.includes(mode)) throw new Error(`sslmode must be one of ${SSL_MODES.join(', ')}`)
  if (mode === 'verify-ca' && !given.has('sslrootcert')) throw new Error('sslmode=verify-ca needs sslrootcert')
  const { host, port, database, user, password, ssl, options } = parse(url, { useLibpqCompat: true })
  if (typeof ssl === 'string') throw new Error('ssl must be true or false: for more, use sslmode')
  return {
    host: host || 'localhost',
    port: Number(port || 5432),
    ...(database && { database }),
    ...(user && { user }),
    ...(password && { password }),
    ssl: ssl ?? false,
    ...(options && { options }),
  }
}
