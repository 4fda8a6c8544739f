import { DatabaseError } from 'pg'

// What the database says when it refuses, by SQLSTATE.

/** An error's SQLSTATE; empty if it is not one of the database's own. */
const codeOf = (error: unknown) => (error instanceof DatabaseError ? (error.code ?? '') : '')

/** Whether Postgres gave up a transaction because of others, so that running it again is right (deadlock, serialization, lock_timeout). */
export const isRetryable = (error: unknown) => ['40P01', '40001', '55P03'].includes(codeOf(error))

/** Whether a statement was cancelled because it took longer than its pool's patience. */
export const isTooSlow = (error: unknown) => codeOf(error) === '57014'

/** Whether the server has no connection left, for this role or for anybody. */
export const isFull = (error: unknown) => codeOf(error) === '53300'

/** Whether a table is not there any more. */
export const isGone = (error: unknown) => codeOf(error) === '42P01'

/** Whether a table may not be changed or dropped: it belongs to another role, or something of somebody else's depends on it. */
export const isKept = (error: unknown) => ['42501', '2BP01'].includes(codeOf(error))

/** Classes of SQLSTATE: cardinality, data, integrity, program limit and plpgsql errors. */
const FAULTS_OF_VALUES = ['21', '22', '23', '54', 'P0']

/** Whether the database is there and well, and the statement or its values are at fault. */
export const isRefusal = (error: unknown) => FAULTS_OF_VALUES.includes(codeOf(error).slice(0, 2))

/** Whether `error` is a violation of the unique constraint or index `constraint`. */
export const isDuplicate = (error: unknown, constraint: string) =>
  error instanceof DatabaseError && error.code === '23505' && error.constraint === constraint
