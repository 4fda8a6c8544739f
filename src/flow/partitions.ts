import type { Db } from '../db.ts'

const DAYS_AHEAD = 7

/** Makes the daily partitions of the coming week that are missing. Safe when several processes do it at once. */
export const makePartitions = (sql: Db) => sql`select waybill.make_partitions(${DAYS_AHEAD})`
