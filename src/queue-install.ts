import { randomUUID } from 'node:crypto'
import { PgBoss, type Db as QueueDb } from 'pg-boss'
import { startOptions } from './db/settings.ts'
import type { Log } from './log.ts'
import { bossAddress, DELIVERIES, type QueueSettings, queues } from './queue.ts'

/**
 * Installs pg-boss's schema, makes the two queues where they are missing, and makes pg-boss's own statements callable from our
 * functions, so that publishing, claiming and recording are one round trip each and still queue exactly as pg-boss would.
 * Safe when several processes do it at once. Each start installs these as its own version of pg-boss has them, so that they always
 * fit the schema that pg-boss has been brought to. Throws a retryable error if others do not let go of a table soon.
 */
export async function installQueue(url: string, log: Log, settings: QueueSettings): Promise<void> {
  const address = bossAddress(url)
  // While this waits for a table, everybody else who wants it waits behind. Autovacuum gives way after a second.
  const options = startOptions(address.options, { lock_timeout: '1500ms' })
  const boss = new PgBoss({ ...address, options, max: 1, supervise: false, schedule: false })
  boss.on('error', (error) => log.error({ err: error }, 'queue.error'))
  try {
    await boss.start()
    for (const { name, options } of queues(settings)) {
      if ((await boss.getQueue(name)) === null)
        await boss.createQueue(name, { ...options, partition: name === DELIVERIES })
    }
    const table = await tableOf(boss)
    const functions = (await callables(boss)) + enqueueNew(table)
    for (const statement of [tuneVacuum(table), dropChecks(table), indexClaims(table), knowKeys(table), functions])
      await boss.getDb().executeSql(statement)
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

/**
 * `waybill.enqueue_new` queues deliveries that are due at once, except those that are `held`, straight into the table; those with a
 * bundle share its job (sql/functions/bundles.sql). `waybill.enqueue_one` queues one. Their rows are the same as those that
 * `waybill.enqueue` makes, at a third of the cost.
 */
function enqueueNew(table: string): string {
  const insert = (jobs: string) => `
    insert into ${table} (id, name, data, priority, start_after, created_on, keep_until, expire_seconds, deletion_seconds,
      retry_limit, retry_delay, retry_backoff, retry_delay_max, policy, dead_letter, heartbeat_seconds)
    select j.id, q.name, j.data, -floor(j.tag)::int, pgboss.job_now(), pgboss.job_now(),
      pgboss.job_now() + q.retention_seconds * interval '1s', q.expire_seconds, q.deletion_seconds,
      q.retry_limit, q.retry_delay, q.retry_backoff, q.retry_delay_max, q.policy, q.dead_letter, q.heartbeat_seconds
    from (${jobs}) j join pgboss.queue q on q.name = '${DELIVERIES}'`
  return `
  create or replace function waybill.enqueue_new(tenants text[], ids uuid[], tags float8[], held boolean[], bundles uuid[]) returns void
  language plpgsql set plan_cache_mode = force_generic_plan as $enqueue$
  #variable_conflict use_column
  begin
    ${insert(`
      select id, jsonb_build_object('tenant_id', tenant_id, 'tag', tag) as data, tag, i
      from unnest(tenants, ids, tags, held, bundles) with ordinality as d (tenant_id, id, tag, held, bundle, i)
      where not held and bundle is null
      union all
      select bundle, jsonb_build_object('tenant_id', min(tenant_id), 'tag', max(tag), 'ids', jsonb_agg(id)), max(tag), min(i)
      from unnest(tenants, ids, tags, bundles) with ordinality as d (tenant_id, id, tag, bundle, i)
      where bundle is not null group by bundle
      order by i`)};
  end $enqueue$;
  create or replace function waybill.enqueue_one(tenant text, delivery uuid, place float8) returns void language plpgsql as $enqueue$
  begin
    ${insert("select delivery as id, jsonb_build_object('tenant_id', tenant, 'tag', place) as data, place as tag")};
  end $enqueue$`
}

/**
 * pg-boss's own statements as functions, for our functions to call: `enqueue` takes jobs as JSON; `fetch_due` the bounds of their
 * priorities and how many; `finish_jobs` and `fail_jobs` the queue, the jobs' ids and their fences (`id:retry count`), the latter
 * with what went wrong before the fences.
 *
 * A queue grows faster than its statistics, and a plan made when it was empty would walk it from end to end. So the planner is
 * left only one way to fetch, and plans it once: in the order of an index (sorting 50,000 jobs took 49 ms, this takes 2), then
 * each job by its place in the table. For finishing it is left only the index by id. Up to Postgres 16 a plan from an empty queue
 * could use that index and still look for the jobs in all of it, so there finishing is planned each time; as is failing, which is
 * rare.
 */
async function callables(boss: PgBoss): Promise<string> {
  const enqueue = await capture((db) => boss.insert(DELIVERIES, [], { db }))
  const finish = await capture((db) => boss.deleteJob(DELIVERIES, [{ id: randomUUID(), retryCount: 0 }], { db }))
  const fail = await capture((db) => boss.fail(DELIVERIES, [{ id: randomUUID(), retryCount: 0 }], null, { db }))
  const { rows } = await boss.getDb().executeSql("select current_setting('server_version_num')::int >= 170000 as yes")
  const finishing = rows[0].yes ? 'force_generic_plan' : 'force_custom_plan'
  const batchSize = 987_654
  const fetch = await capture((db) =>
    boss.fetch(DELIVERIES, { batchSize, minPriority: 0, maxPriority: 1, includeMetadata: true, db }),
  )
  const fetchByPlace = [
    [`LIMIT ${batchSize}`, 'LIMIT $3'],
    ['SELECT j.id', 'SELECT j.ctid'],
    ['j.id = next.id', 'j.ctid = next.ctid'],
  ].reduce((text, [theirs = '', ours = '']) => {
    if (!text.includes(theirs)) throw new Error('this version of pg-boss fetches in another way')
    return text.replace(theirs, ours)
  }, fetch)
  return `
    create or replace function waybill.enqueue(jobs text) returns void language plpgsql as $callable$
    #variable_conflict use_column
    begin
      ${enqueue};
    end $callable$;
    create or replace function waybill.fetch_due(int, int, int) returns table (id uuid, data jsonb, retry_count int, priority int) language plpgsql
    set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set enable_hashjoin = off set enable_mergejoin = off set enable_material = off as $callable$
    #variable_conflict use_column
    begin
      return query with fetched as (${fetchByPlace}) select id, data, "retryCount", priority from fetched;
    end $callable$;
    create or replace function waybill.finish_jobs(text, uuid[], text[]) returns table (count bigint, ids uuid[]) language plpgsql
    set plan_cache_mode = ${finishing} set enable_seqscan = off set enable_bitmapscan = off as $callable$
    #variable_conflict use_column
    begin
      return query ${finish};
    end $callable$;
    create or replace function waybill.fail_jobs(text, uuid[], jsonb, text[]) returns table (count bigint, ids uuid[]) language plpgsql
    set plan_cache_mode = force_custom_plan set enable_seqscan = off as $callable$
    #variable_conflict use_column
    begin
      return query ${fail};
    end $callable$;`
}

/** The text of the statement that a call to pg-boss runs. */
async function capture(call: (db: QueueDb) => Promise<unknown>): Promise<string> {
  let captured = ''
  await call({
    executeSql: async (text) => {
      captured = text
      return { rows: [{ count: '0', ids: [] }] }
    },
  })
  return captured
}
