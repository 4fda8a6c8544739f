import { AppError, type ErrorCode } from '../errors.ts'
import { UUID } from '../ids.ts'

/** An id from a path as it is stored: in lower case. No record has one that is not a UUID, so that throws `missing`. */
export function recordId(text: string, missing: ErrorCode): string {
  const id = text.toLowerCase()
  if (!UUID.test(id)) throw new AppError(missing)
  return id
}
