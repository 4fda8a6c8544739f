import { isTooSlow } from '../db/errors.ts'
import type { Db } from '../db/open.ts'
import { type Fragment, fragment, join } from '../db/statement.ts'
import { firstId, madeAt } from '../ids.ts'
import { readDays } from '../upkeep/partitions.ts'
import { type DeliveryRow, deliveryColumns } from './delivery-record.ts'

/**
 * How many days the first statement of a list reads, and each that follows. Postgres makes a plan for every day that a statement may come
 * to, and locks its table and all its indexes; the latest days often have all that is asked for, and a week of them is still to come.
 */
const DAYS = { first: 15, next: 60 }
const DAY_MS = 86_400_000

/** Reading what was asked for takes too long. */
export class TooMuch extends Error {}

/** Ids: `from` on, and below `below`. */
type Bounds = { from?: string | undefined; below?: string | undefined }

/**
 * The newest of the deliveries that `where` allows, newest first, without the first `offset` of them and at most `limit`. The bounds are
 * those of their ids. Throws TooMuch if a statement is cancelled, or when a further one would be needed after `patienceMs`.
 */
export async function readNewest(
  sql: Db,
  asked: Bounds & { where: Fragment[]; offset: number; limit: number; patienceMs: number },
): Promise<DeliveryRow[]> {
  const { from, below, limit } = asked
  const days = await readDays(sql)
  const begun = performance.now()
  const goOn = () => {
    if (performance.now() - begun > asked.patienceMs) throw new TooMuch('reading older deliveries would take too long')
  }
  const where = [
    ...asked.where,
    ...(from ? [fragment`delivery_id >= ${from}`] : []),
    ...(below ? [fragment`delivery_id < ${below}`] : []),
  ]
  const rows: DeliveryRow[] = []
  let skip = asked.offset
  try {
    for (const stretch of stretches(days, asked)) {
      const newest = (columns: Fragment, most: number) => fragment`
        select ${columns} from (${join(
          stretch.map(
            (ids) => fragment`(
              select ${columns} from waybill.deliveries where ${join([...where, ids], ' and ')}
              order by delivery_id desc limit ${most})`,
          ),
          ' union all ',
        )}) found order by delivery_id desc limit ${most}`
      goOn()
      if (skip > 0) {
        const [skipped] = await sql<[{ count: number; last: string }]>`
          select count(*)::int as count, min(delivery_id::text) as last from (${newest(fragment`delivery_id`, skip)}) skipped`
        skip -= skipped.count
        if (skip > 0) continue
        where.push(fragment`delivery_id < ${skipped.last}`)
        goOn()
      }
      rows.push(...(await sql<DeliveryRow[]>`${newest(deliveryColumns, limit - rows.length)}`))
      if (rows.length === limit) break
    }
  } catch (error) {
    throw isTooSlow(error) ? new TooMuch('reading deliveries took too long', { cause: error }) : error
  }
  return rows
}

/**
 * Some days after others, back to the oldest: what one statement reads of each. The default partition, where the first and the last may come
 * to it, apart: together with it, the days would be read side by side, each until something is found in it.
 */
function* stretches({ first, end }: { first: string; end: string }, { from = first, below = end }: Bounds) {
  const oldest = from > first ? from : first
  let top = below < end ? below : end
  for (let days = DAYS.first; ; days = DAYS.next) {
    const isFirst = days === DAYS.first
    const midnight = Math.floor(madeAt(top).getTime() / DAY_MS) * DAY_MS
    const start = firstId(new Date(midnight - days * DAY_MS))
    const isLast = start <= oldest
    yield [
      fragment`delivery_id >= ${isLast ? oldest : start} and delivery_id < ${top}`,
      ...(isFirst ? [fragment`delivery_id >= ${end}`] : []),
      ...(isLast ? [fragment`delivery_id < ${first}`] : []),
    ]
    if (isLast) return
    top = start
  }
}
