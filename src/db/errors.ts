import { DatabaseError } from 'pg'

// What the database says when it refuses, by SQLSTATE.

const RETRYABLE = new Set(['40P01', '40001', '55P03'])

/** Whether Postgres gave up a transaction because of others, so that running it again is right (deadlock, serialization, lock_timeout). */
export const isRetryable = (error: unknown) => error instanceof DatabaseError && RETRYABLE.has(error.code ?? '')

/** Whether a statement was cancelled because it took longer than its pool's patience. */
export const isTooSlow = (error: unknown) => error instanceof DatabaseError && error.code === '57014'

/** Whether the server has no connection left, for this role or for anybody. */
export const isFull = (error: unknown) => error instanceof DatabaseError && error.code === '53300'

/** Whether a table is not there any more. */
export const isGone = (error: unknown) => error instanceof DatabaseError && error.code === '42P01'

/** Whether a table may not be changed or dropped: it belongs to another role, or something of somebody else's depends on it. */
export const isKept = (error: unknown) =>
  error instanceof DatabaseError && ['42501', '2BP01'].includes(error.code ?? '')

/** Classes of SQLSTATE: cardinality, data, integrity, program limit and plpgsql errors. */
const FAULTS_OF_VALUES = ['21', '22', '23', '54', 'P0']

/** Whether the database is there and well, and the statement or its values are at fault. */
export const isRefusal = (error: unknown) =>
  error instanceof DatabaseError && FAULTS_OF_VALUES.includes(error.code?.slice(0, 2) ?? '')

/** Whether `error` is a violation of the unique constraint or index `constraint`. */
export const isDuplicate = (error: unknown, constraint: string) =>
  error instanceof DatabaseError && error.code === '23505' && error.constraint === constraint
