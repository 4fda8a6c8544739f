-- The ways of claimed jobs back into the queue.

-- Of workers that were lost: what nobody has touched for `lapse`, at most `most` of it, is due at once, in the place that it
-- had. The next claim counts as a retry, which is pg-boss's fence against the worker that was only thought lost. `crashes` is how
-- many attempts in a row have no record. From `suspect` of them on, or with no retry left, the job is not due: it is for the
-- caller to fail it, which from `poison` on leaves it no retry.
create function waybill.take_back(lapse interval, suspect int, poison int, most int)
returns table (tenant_id text, delivery_id uuid, retry_count int, crashes int, due_now boolean) language sql
-- By index alone, whatever the statistics say of a queue that changes faster than they do.
set enable_seqscan = off set enable_bitmapscan = off
as $$
  with lapsed as (
    -- What somebody settles at this moment is not lost.
    select id, data ->> 'tenant_id' as tenant_id, retry_count, retry_limit from pgboss.job
    where name = 'deliveries' and state = 'active' and heartbeat_on < now() - lapse limit most for update skip locked
  ), judged as (
    select l.*, coalesce(l.retry_count + 1 - (d.attempt_count - d.earlier_attempts), 1) as crashes
    from lapsed l left join waybill.deliveries d on d.tenant_id = l.tenant_id and d.delivery_id = l.id
  ), decided as (
    select *, crashes < suspect and retry_count < retry_limit as due_now from judged
  )
  update pgboss.job j set
    state = case when due_now then 'retry' else j.state end,
    start_after = case when due_now then now() else j.start_after end,
    heartbeat_on = case when due_now then null else j.heartbeat_on end,
    retry_limit = case when crashes >= poison then j.retry_count else j.retry_limit end
  from decided d where j.name = 'deliveries' and j.id = d.id
  returning d.tenant_id, d.id, d.retry_count, d.crashes, d.due_now
$$;

-- Of workers that shut down: as if they had not been claimed, due at once, no retry spent, nothing counted. Only what is
-- still claimed as it was is touched; answers with how many.
create function waybill.unclaim(ids uuid[], retry_counts int[]) returns bigint language sql as $$
  with given as (
    -- started_on decides whether pg-boss's next fetch counts a retry.
    update pgboss.job j set state = 'created', started_on = null, heartbeat_on = null
    from unnest(ids, retry_counts) as u (id, retry_count)
    where j.name = 'deliveries' and j.id = u.id and j.retry_count = u.retry_count and j.state = 'active'
    returning j.data ->> 'tenant_id' as tenant_id
  ), refunded as (
    update waybill.usage u set count = u.count - g.n
    from (select tenant_id, count(*) as n from given group by tenant_id order by tenant_id) g
    where u.tenant_id = g.tenant_id and u.month = date_trunc('month', now() at time zone 'utc')::date and u.metric = 'attempts'
  )
  select count(*) from given
$$;
