-- Settles the jobs of failed attempts as pg-boss does: a retry or, when none is left, the dead letter queue. A fence is
-- `job id:retry count`; if another worker has claimed the job meanwhile, nothing happens and no row is returned. `not_before`
-- (seconds from now, because of Retry-After or to spread failures out) may only make the backoff longer. Retries stand behind
-- first attempts. next_attempt_at is null where no retry follows: then the failed job is deleted, since the dead-letter worker
-- takes every failed job that is left for one whose worker was lost. This is planned anew each time and lists the ids that it
-- looks for, like the functions of give-back.sql.
create or replace function waybill.settle_failed(deliveries uuid[], fences text[], not_before int[])
returns table (delivery_id uuid, next_attempt_at timestamptz) language plpgsql
set plan_cache_mode = force_custom_plan set enable_seqscan = off
as $$
declare
  settled constant uuid[] := (select ids from waybill.fail_jobs('deliveries', deliveries, null, fences));
begin
  return query
  with retried as (
    update pgboss.job j set start_after = greatest(j.start_after, now() + f.not_before * interval '1 second'),
      priority = waybill.retry_priority(greatest(j.start_after, now() + f.not_before * interval '1 second'))
    from unnest(deliveries, not_before) as f (id, not_before)
    where j.name = 'deliveries' and j.id = any(settled) and j.id = f.id and j.state = 'retry'
    returning j.id, j.start_after
  ), exhausted as (
    delete from pgboss.job where name = 'deliveries' and id = any(settled) and state = 'failed' returning id
  )
  select id, start_after from retried union all select id, null from exhausted;
end $$;
