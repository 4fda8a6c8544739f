import { AppError, type ErrorCode } from '../errors.ts'
import { UUID } from '../ids.ts'

/** An id from a path as it is stored: in lower case. No record's id is anything but a UUID, so anything else throws `missing`. */
export function recordId(text: string, missing: ErrorCode): string {
  const id = text.toLowerCase()
  if (!UUID.test(id)) throw new AppError(missing)
  return id
}
