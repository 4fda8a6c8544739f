import { randomUUID } from 'node:crypto'
import type { PgBoss, Db as QueueDb } from 'pg-boss'
import { DEAD_LETTERS, DELIVERIES } from './queue.ts'

/**
 * The text that makes what pg-boss does callable from our functions, so that publishing, claiming and recording are one round trip each
 * and still queue exactly as pg-boss would. Like those, it is installed with a version of its own (migrate.ts). `table` is the one that
 * pg-boss made for the deliveries queue.
 */
export const queueFunctions = async (boss: PgBoss, table: string): Promise<string> =>
  (await callables(boss)) + enqueueNew(table)

/**
 * `waybill.enqueue_new` queues deliveries that are due at once straight into the table; those with a bundle share its job
 * (sql/functions/bundles.sql). Those that are `held` wait as rows or, in waybill.release_held, get their jobs from the caller.
 * `waybill.enqueue_one` queues one. Their rows are the same as those that `waybill.enqueue` makes, at a third of the cost, but that they
 * have their places in their turns (waybill.moment_in_turn).
 */
function enqueueNew(table: string): string {
  const insert = (jobs: string) => `
    insert into ${table} (id, name, data, priority, start_after, created_on, keep_until, expire_seconds, deletion_seconds,
      retry_limit, retry_delay, retry_backoff, retry_delay_max, policy, dead_letter, heartbeat_seconds)
    select j.id, q.name, j.data, -floor(j.tag)::int, pgboss.job_now(), waybill.moment_in_turn(j.tag),
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
 * pg-boss's own statements as functions, for our functions to call: `enqueue` and `enqueue_dead_letters`
 * take jobs as JSON; `fetch_due` the bounds of their
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
  const bury = await capture((db) => boss.insert(DEAD_LETTERS, [], { db }))
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
    create or replace function waybill.enqueue_dead_letters(jobs text) returns void language plpgsql as $callable$
    #variable_conflict use_column
    begin
      ${bury};
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
