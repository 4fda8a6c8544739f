import type { Db } from '../db/open.ts'

/** The first moment of the UTC calendar month after the one of `date`: when monthly limits start anew. */
export const firstOfNextMonth = (date: Date) => new Date(Date.UTC(date.getUTCFullYear(), date.getUTCMonth() + 1, 1))

/** What a tenant has used of its monthly limits in this calendar month (UTC), which lasts from `start` until `end`. */
export async function readUsage(sql: Db, tenantId: string) {
  const [used] = await sql<[{ start: Date; events: number; attempts: number }]>`
    select m.start, coalesce(sum(count) filter (where metric = 'events'), 0)::float8 as events,
      coalesce(sum(count) filter (where metric = 'attempts'), 0)::float8 as attempts
    from (select date_trunc('month', now(), 'utc') as start) m
    left join waybill.usage u on u.tenant_id = ${tenantId} and u.month = (m.start at time zone 'utc')::date
    group by m.start`
  return { ...used, end: firstOfNextMonth(used.start) }
}
