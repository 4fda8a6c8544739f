import { PgBoss } from 'pg-boss'
import type { Log } from './log.ts'
import { bossAddress, DELIVERIES, type QueueSettings, queues } from './queue.ts'
import { queueFunctions } from './queue-functions.ts'

/**
 * Installs pg-boss's schema, and makes and tunes the two queues where they are missing. Safe when several processes do it at once.
 * Returns the text that makes pg-boss's own statements callable from our functions. Throws a retryable error if others do not let go of
 * a table soon.
 */
export async function installQueue(url: string, log: Log, settings: QueueSettings): Promise<string> {
  // While this waits for a table, everybody else who wants it waits behind. Autovacuum gives way after a second.
  const address = bossAddress(url, { lock_timeout: '1500ms' })
  const boss = new PgBoss({ ...address, max: 1, supervise: false, schedule: false })
  boss.on('error', (error) => log.error({ err: error }, 'queue.error'))
  try {
    await boss.start()
    for (const { name, options } of queues(settings)) {
      if ((await boss.getQueue(name)) === null)
        await boss.createQueue(name, { ...options, partition: name === DELIVERIES })
    }
    const table = await tableOf(boss)
    for (const statement of [tuneVacuum(table), dropChecks(table), indexClaims(table), knowKeys(table)])
      await boss.getDb().executeSql(statement)
    return await queueFunctions(boss, table)
  } finally {
    await boss.stop({ graceful: false })
  }
}

/** The table that pg-boss made for the deliveries queue, quoted for use in a statement. */
async function tableOf(boss: PgBoss): Promise<string> {
  const { rows } = await boss
    .getDb()
    .executeSql("select format('pgboss.%I', table_name) as name from pgboss.queue where name = $1", [DELIVERIES])
  return rows[0].name
}

/**
 * Every job leaves two or more dead rows in the queue, which each fetch has to step over, so they are vacuumed after a thousand
 * of them, not after a fifth of the table. And each job makes two entries in the index by id, so the index's pages get room:
 * cleaning and splitting full ones at each claim was a twentieth of what a delivery with a job of its own cost.
 */
const tuneVacuum = (table: string) => `
  do $$
  declare
    key regclass := (select conindid from pg_constraint where contype = 'p' and conrelid = '${table}'::regclass);
  begin
    if (select reloptions is null from pg_class where oid = '${table}'::regclass) then
      alter table ${table} set (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.01,
        autovacuum_vacuum_cost_delay = 0, fillfactor = 70);
    end if;
    if (select reloptions is null from pg_class where oid = key) then
      execute format('alter index %s set (fillfactor = 50)', key);
    end if;
  end $$`

/**
 * Drops the foreign keys: each job would look up its queue and its dead letter queue at commit, which took as long as the rest of
 * publishing it. The two names are the same in every row, and their queues are never deleted.
 */
const dropChecks = (table: string) => `
  do $$
  declare
    check_name name;
  begin
    for check_name in select conname from pg_constraint where contype = 'f' and conrelid = '${table}'::regclass loop
      execute format('alter table ${table} drop constraint if exists %I', check_name);
    end loop;
  end $$`

/**
 * Tells the planner that the queue's name is the same in every row, and the id different. Until an analysis has found two
 * jobs in the table, Postgres 15 and 16 would take the name for selective, and look for a batch's jobs in all of the queue. So it
 * is analyzed here with two jobs that nobody else sees.
 */
const knowKeys = (table: string) => `
  do $$
  declare
    two constant uuid[] := array[gen_random_uuid(), gen_random_uuid()];
  begin
    -- A dump has the options, but not the statistics.
    if (select attoptions is null from pg_attribute where attrelid = '${table}'::regclass and attname = 'name')
      or not exists (select from pg_stats where format('%I.%I', schemaname, tablename) = '${table}' and attname = 'name') then
      alter table ${table} alter column name set (n_distinct = 1), alter column id set (n_distinct = -1);
      insert into ${table} (name, id) select '${DELIVERIES}', id from unnest(two) id;
      analyze ${table};
      delete from ${table} where name = '${DELIVERIES}' and id = any(two);
    end if;
  end $$`

/** Indexes claimed jobs, longest untouched first: those that have lost their worker are looked for every second. */
const indexClaims = (table: string) => `
  do $$ begin
    -- Asked first, because \`if not exists\` would wait for writers before it looks.
    if to_regclass('pgboss.deliveries_claimed') is null then
      create index if not exists deliveries_claimed on ${table} (heartbeat_on) where state = 'active' and heartbeat_on is not null;
    end if;
  end $$`
