/**
 * What our statements and pg-boss's rely on, whatever server, database or role are set to: what texts, lists and names in
 * statements mean (lists may have nulls; all names but Postgres's own have their schema), that numbers arrive as they are, that
 * batches that meet wait for each other instead of failing, and that only we end a wait, a statement or an idle connection.
 */
const ALWAYS = {
  standard_conforming_strings: 'on',
  array_nulls: 'on',
  search_path: 'public',
  extra_float_digits: 1,
  'plpgsql.extra_errors': 'none',
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
