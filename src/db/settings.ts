/**
 * What no server, database or role may set otherwise, for our statements and pg-boss's: what texts and lists in statements mean
 * (lists have nulls), that batches that meet wait for each other instead of failing, and that nothing ends a wait, a statement or an
 * idle connection but ourselves.
 */
const ALWAYS = {
  standard_conforming_strings: 'on',
  array_nulls: 'on',
  default_transaction_isolation: 'read committed',
  statement_timeout: 0,
  lock_timeout: 0,
  idle_session_timeout: 0,
}

/** What a server process is told at its start: `options` as in a URL, what always holds, and `own` settings, which prevail. */
export const startOptions = (options: string, own: Record<string, string | number> = {}) =>
  [
    options,
    ...Object.entries({ ...ALWAYS, ...own }).map(
      ([name, value]) => `-c ${name}=${String(value).replace(/[ \\]/g, '\\$&')}`,
    ),
  ]
    .filter(Boolean)
    .join(' ')
