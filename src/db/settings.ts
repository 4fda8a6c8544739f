/**
 * What our statements and pg-boss's rely on, whatever server, database or role are set to: what texts and lists in statements
 * mean (lists may have nulls), that batches that meet wait for each other instead of failing, and that only we end a wait, a
 * statement or an idle connection.
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
